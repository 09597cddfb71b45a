"""A model of the short accumulator of FP8 tensor cores: what sums lose in it without promotion.

Hopper's FP8 instructions add 32 products to an accumulator in fixed point: every addend is cut
off 13 bits below the largest one. Promotion adds what 128 of K gave to an FP32 register instead.
The width is the one that DeepSeek-V3's authors and others have found by experiment.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..ops import quantize

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
    """Markdown: a row per size of K."""
    head = [f"{data}, {way}" for data in DATA for way in ("without", "with")]
    lines = [f"| K | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    for i, k in enumerate(SIZES):
        cells = [f"{errors[data][way][i]:.1e}" for data in DATA for way in ("without", "with")]
        lines.append(f"| {k} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(errors: dict[str, dict[str, list[float]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for data, color in zip(DATA, ("tab:blue", "tab:red"), strict=True):
        for way, style in (("without", "--"), ("with", "-")):
            label = f"{data}, {way} promotion"
            axes.loglog(SIZES, errors[data][way], style, color=color, marker="o", label=label)
    axes.axhline(2.0**-8, color="gray", linewidth=0.8)
    axes.annotate("half a unit of bf16", (SIZES[0], 2.0**-8), va="bottom", fontsize=8)
    axes.set(xlabel="K", ylabel="relative error of the result (Frobenius)")
    axes.set_title("FP8 products summed in a 13-bit accumulator (model)", fontsize=10)
    axes.set_xticks(SIZES, [str(k) for k in SIZES])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


MARKERS = ("<!-- accumulator -->", "<!-- end accumulator -->")


def write(docs: Path) -> str:
    """Compute, write docs/accumulator.png and the table of docs/numerics.md; return the table."""
    errors = measure()
    text = table(errors)
    plot(errors, docs / "accumulator.png")
    page = docs / "numerics.md"
    inside = re.compile(re.escape(MARKERS[0]) + ".*?" + re.escape(MARKERS[1]), re.S)
    page.write_text(inside.sub(f"{MARKERS[0]}\n{text}\n{MARKERS[1]}", page.read_text()))
    return text
