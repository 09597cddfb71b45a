"""The short accumulator of FP8 tensor cores: what sums lose in it without promotion.

Computed as Hopper computes it (`mixprec.simulate`). Promotion adds what 128 of K gave to an FP32
register instead of leaving it in the accumulator.
"""

from __future__ import annotations

from pathlib import Path

import torch

from .. import gemm, quantize, simulate
from . import pages, plot
from .table import markdown

SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
SIDE = 32  # of the result
DATA = ("randn", "uniform [0, 1]")
WAYS = {"without": True, "with": False}  # promotion: fast_accum


def relative_error(data: str, k: int, fast_accum: bool) -> float:
    """||C - C64|| / ||C64||, Frobenius, of values of E4M3."""
    generator = torch.Generator().manual_seed(0)
    make = torch.randn if data == "randn" else torch.rand
    a, b = (quantize(make(s, generator=generator), "e4m3").data for s in ((SIDE, k), (k, SIDE)))
    with simulate("hopper"):
        c = gemm(a, b, out_dtype=torch.float32, fast_accum=fast_accum)
    exact = a.double() @ b.double()
    return float((c - exact).norm() / exact.norm())


def measure(sizes: tuple[int, ...] = SIZES) -> dict[str, dict[str, list[float]]]:
    """{data: {"without" and "with" promotion: error for each size of K}}."""
    return {
        data: {way: [relative_error(data, k, fast) for k in sizes] for way, fast in WAYS.items()}
        for data in DATA
    }


def table(errors: dict[str, dict[str, list[float]]]) -> str:
    """Markdown: a line per size of K."""
    columns = [(data, way) for data in DATA for way in WAYS]
    header = ("K", *(", ".join(column) for column in columns))
    body = [
        (str(k), *(f"{errors[data][way][i]:.1e}" for data, way in columns))
        for i, k in enumerate(SIZES)
    ]
    return markdown(header, body)


def write(root: Path) -> str:
    """Compute, write docs/accumulator.png and the table of docs/numerics.md; return the table."""
    errors = measure()
    text = table(errors)
    plot.accumulator(errors, SIZES, root / "docs" / "accumulator.png")
    pages.update(root / "docs" / "numerics.md", "accumulator", text)
    return text
