"""A model of the short accumulator of FP8 tensor cores: what sums lose in it without promotion.

Hopper's FP8 instructions add 32 products to an accumulator in fixed point: every addend is cut
off 13 bits below the largest one. Promotion adds what 128 of K gave to an FP32 register instead.
The width is the one that DeepSeek-V3's authors and others have found by experiment.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..ops import quantize
from . import pages, plot
from .table import markdown

FRACTION_BITS = 13
INSTRUCTION = 32  # products that one instruction adds
PROMOTE = 128
SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
SIDE = 32  # of the result
DATA = ("randn", "uniform [0, 1]")

Matrix = npt.NDArray[np.float64]


def short_sum(acc: Matrix, products: Matrix) -> Matrix:
    """acc [M, N] + the sum of products [M, N, 32], every addend cut off as the hardware does."""
    addends = np.concatenate([acc[..., None], products], axis=-1)
    largest = np.abs(addends).max(axis=-1, keepdims=True)
    exponent = np.frexp(largest)[1] - 1
    unit = np.ldexp(1.0, exponent - FRACTION_BITS)
    return np.where(largest[..., 0] > 0, (np.trunc(addends / unit) * unit).sum(axis=-1), 0.0)


def short_gemm(a: Matrix, b: Matrix, promote: int | None) -> Matrix:
    """a [M, K] @ b [K, N] in the short accumulator, emptied into FP32 after each `promote` of K."""
    m, k = a.shape
    total = np.zeros((m, b.shape[1]), np.float32)
    acc = np.zeros((m, b.shape[1]))
    for start in range(0, k, INSTRUCTION):
        part = slice(start, start + INSTRUCTION)
        acc = short_sum(acc, a[:, None, part] * b[part].T[None])
        if promote is not None and (start + INSTRUCTION) % promote == 0:
            total, acc = total + acc.astype(np.float32), np.zeros_like(acc)
    return total.astype(np.float64) + acc


def operands(data: str, k: int, seed: int = 0) -> tuple[Matrix, Matrix]:
    """Values of E4M3, [SIDE, k] and [k, SIDE]."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    make = torch.randn if data == "randn" else torch.rand
    values = [make(shape, generator=generator) for shape in ((SIDE, k), (k, SIDE))]
    a, b = (quantize(x, "e4m3").data.double().numpy() for x in values)
    return a, b


def relative_error(data: str, k: int, promote: int | None) -> float:
    """||C - C64|| / ||C64||, Frobenius."""
    a, b = operands(data, k)
    exact = a @ b
    return float(np.linalg.norm(short_gemm(a, b, promote) - exact) / np.linalg.norm(exact))


def measure(sizes: tuple[int, ...] = SIZES) -> dict[str, dict[str, list[float]]]:
    """{data: {"without" and "with" promotion: error for each size of K}}."""
    ways = {"without": None, "with": PROMOTE}
    return {
        data: {way: [relative_error(data, k, p) for k in sizes] for way, p in ways.items()}
        for data in DATA
    }


def table(errors: dict[str, dict[str, list[float]]]) -> str:
    """Markdown: a line per size of K."""
    columns = [(data, way) for data in DATA for way in ("without", "with")]
    header = ("K", *(", ".join(column) for column in columns))
    body = [
        (str(k), *(f"{errors[data][way][i]:.1e}" for data, way in columns))
        for i, k in enumerate(SIZES)
    ]
    return markdown(header, body)


def write(docs: Path) -> str:
    """Compute, write docs/accumulator.png and the table of docs/numerics.md; return the table."""
    errors = measure()
    text = table(errors)
    plot.accumulator(errors, SIZES, docs / "accumulator.png")
    page = docs / "numerics.md"
    page.write_text(pages.fill(page.read_text(), "accumulator", text))
    return text
