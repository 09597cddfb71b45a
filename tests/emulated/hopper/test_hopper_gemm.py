"""The Hopper GEMM kernel, run on the CPU model beside this file under random interleavings: every
instance is exact on small integers."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from cases import name, small_integers
from emulated.gemm_plan import plan
from emulated.gemm_plan.plan import TileConfig as Row
from emulated.hopper import runner
from emulated.hopper.runner import scale_view

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


ALL_ROWS = plan.tile_configs()
SIXTEEN = [r for r in ALL_ROWS if not r.fp8]
EIGHT = [r for r in ALL_ROWS if r.fp8]
LAYOUTS = ("NN", "NT", "TN", "TT")  # a, b: N as the shape says, T transposed


def padded(x: torch.Tensor) -> torch.Tensor:
    """The same values; lines start at multiples of 16 bytes, with NaN between them."""
    line = 16 // x.element_size()
    width = (x.shape[1] + line - 1) // line * line
    room = torch.full((x.shape[0], width * x.element_size()), 0xFF, dtype=torch.uint8)
    room = room.view(x.dtype)[:, : x.shape[1]]
    room.copy_(x)
    return room


class Problem:
    """Small integers, so that every sum is exact in any order."""

    def __init__(
        self, shape: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype],
        layout: str = "NT", largest: int = 3,
    ) -> None:  # fmt: skip
        m, n, k = shape
        a, b = (small_integers(size, dtype, largest, seed=size[0])
                for size, dtype in zip(((m, k), (k, n)), dtypes, strict=True))  # fmt: skip
        self.a = padded(a) if layout[0] == "N" else padded(a.t().contiguous()).t()
        self.b = padded(b) if layout[1] == "N" else padded(b.t().contiguous()).t()
        self.product = a.float() @ b.float()


def check(
    loaded: ctypes.CDLL, row: Row, problem: Problem, seed: int, dtype: torch.dtype = torch.float32,
    want: torch.Tensor | None = None, **options: Any,
) -> None:  # fmt: skip
    """One launch: no error, C as it should be, nothing above, below or beside it written."""
    m, n = problem.product.shape
    line = 16 // dtype.itemsize
    width = (n + 2 * line) // line * line + (not options.get("tma_store", True))
    room = torch.full((m + 4, width), 5.0, dtype=dtype)
    before, out = room.clone(), room[2 : m + 2, :n]
    error = runner.gemm(loaded, row.index, problem.a, problem.b, out, seed=seed, **options)
    assert error == 0, f"seed {seed}: error {error}, {loaded.last_error().decode()}"
    before[2 : m + 2, :n] = (problem.product if want is None else want).to(dtype)
    wrong = (room != before).nonzero()
    assert len(wrong) == 0, f"seed {seed}: {len(wrong)} wrong, the first at {wrong[0].tolist()}"


def ragged(row: Row) -> tuple[int, int, int]:
    """Two tiles each way and seven chunks of K; of all of these the last ones only in part."""
    k = 7 * 128 - 48 if row.fp8 else 7 * 64 - 24
    return row.block_m * row.cluster + 24, row.block_n + 40, k


def combinations(row: Row) -> list[tuple[torch.dtype, torch.dtype, str]]:
    """Operand types and layouts: the instances of a row, for FP8 two of the four pairs of formats,
    so that each pair is compiled with one way to accumulate."""
    if row.fp8:
        pairs = {"direct": (E4M3, E5M2), "promoted": (E5M2, E4M3), "scaled": (E5M2, E5M2)}
        return [(*pair, "NT") for pair in ((E4M3, E4M3), pairs[row.sums])]
    return [(t, t, layout) for t in (torch.bfloat16, torch.float16) for layout in LAYOUTS]


# Orders of execution for a row, shared by its instances; more of them find rarer faults.
INTERLEAVINGS = int(os.environ.get("MIXPREC_INTERLEAVINGS", "32"))


@pytest.mark.parametrize("row", ALL_ROWS, ids=str)
def test_every_instance_is_exact_under_many_interleavings(row: Row) -> None:
    for a, b, layout in combinations(row):
        problem = Problem(ragged(row), (a, b), layout)
        for seed in range(INTERLEAVINGS // len(combinations(row))):
            stages = 2 + seed % 2 if seed % 4 != 3 else 0  # several rounds of the ring
            check(runner.library(a, b, row.sums), row, problem, seed, stages=stages)


# ---- what becomes of the sums ----

SMALL = next(r for r in SIXTEEN if r.consumers == 1)
WIDE = next(r for r in SIXTEEN if r.block_n == 256 and r.cluster == 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name)
@pytest.mark.parametrize("row", [SMALL, WIDE], ids=str)
def test_scales_bias_and_one_rounding(row: Row, dtype: torch.dtype) -> None:
    m, n, k = ragged(row)
    problem = Problem((m, n, k), (torch.bfloat16, torch.bfloat16), "NN", largest=1)
    g = torch.Generator().manual_seed(1)
    a_scale, b_scale = (2.0 ** torch.randint(-2, 3, (size,), generator=g) for size in (m, n))
    bias = torch.randint(-9, 10, (n,), generator=g).to(dtype)
    want = (problem.product * a_scale[:, None]) * b_scale + bias.float()
    scales = (scale_view(a_scale), scale_view(b_scale))
    loaded = runner.library(torch.bfloat16, torch.bfloat16)
    for seed, tma in enumerate([True, False, True]):
        options = {"scales": scales, "bias": bias, "tma_store": tma}
        check(loaded, row, problem, seed, dtype, want, **options)
    one = torch.tensor(0.25)
    scales = (scale_view(one), scale_view(one))
    check(loaded, row, problem, 4, dtype, problem.product / 16, scales=scales)


@pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulate"])
@pytest.mark.parametrize("row", SIXTEEN, ids=str)
def test_split_k_and_accumulation(row: Row, accumulate: bool) -> None:
    problem = Problem(ragged(row), (torch.bfloat16, torch.bfloat16), "NT")
    want = problem.product + (5.0 if accumulate else 0.0)
    loaded = runner.library(torch.bfloat16, torch.bfloat16)
    for seed, (splits, tma) in enumerate(((1, True), (1, False), (2, True), (3, True))):
        options = {"splits": splits, "tma_store": tma, "accumulate": accumulate}
        check(loaded, row, problem, seed, want=want, **options)


@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 300, 64), (65, 8, 72), (130, 129, 520)])
@pytest.mark.parametrize("row", [SMALL, WIDE], ids=str)
def test_small_shapes(row: Row, shape: tuple[int, int, int]) -> None:
    loaded = runner.library(torch.bfloat16, torch.bfloat16)
    for seed, layout in enumerate(LAYOUTS):
        check(loaded, row, Problem(shape, (torch.bfloat16, torch.bfloat16), layout), seed)


# ---- FP8 ----


BY_ROW, BY_BLOCK = 0, 7  # ScaleView: row_shift


def block_scales(problem: Problem, shifts: Sequence[int | None]) -> tuple[list[torch.Tensor], Any]:
    """Powers of two for a and b, [rows >> shift, chunks], None: no scales; and the product."""
    g = torch.Generator().manual_seed(2)
    scaled, scales = [], []
    for x, shift in zip((problem.a.float(), problem.b.float().t()), shifts, strict=True):
        row_of, chunk_of = torch.arange(x.shape[0]) >> (shift or 0), torch.arange(x.shape[1]) // 128
        counts = int(row_of[-1]) + 1, int(chunk_of[-1]) + 1
        exponents = torch.randint(-2, 3, counts, generator=g) * (shift is not None)
        scale = 2.0**exponents
        scales.append(scale)
        scaled.append(x * scale[row_of][:, chunk_of])
    return scales, scaled[0] @ scaled[1].t()


@pytest.mark.parametrize("shifts", list(product((BY_ROW, BY_BLOCK, None), repeat=2))[:-1], ids=str)
@pytest.mark.parametrize("row", [r for r in EIGHT if r.sums == "scaled"], ids=str)
def test_scales_of_blocks(row: Row, shifts: tuple[int | None, int | None]) -> None:
    problem = Problem(ragged(row), (E4M3, E4M3), largest=2)
    scales, want = block_scales(problem, shifts)
    loaded = runner.library(E4M3, E4M3, "scaled")
    for seed in range(3):
        # As quantize writes them; or the chunks of K first; or neither.
        laid = [s.t().contiguous().t() if seed == 1 else s for s in scales]
        if seed == 2:
            laid = [s.repeat_interleave(2, 0).repeat_interleave(3, 1)[::2, ::3] for s in scales]
        views = [
            scale_view(None if shift is None else s, shift or 0)
            for s, shift in zip(laid, shifts, strict=True)
        ]
        options = {"chunk_scales": views, "stages": 2, "splits": 1 + seed}
        check(loaded, row, problem, seed, want=want, copy_a_scales=seed == 0, **options)


def test_promotion_keeps_fp8_sums_accurate() -> None:
    """K = 4096, all positive: the case that breaks the short accumulators of the tensor cores
    (docs/numerics.md)."""
    g = torch.Generator().manual_seed(3)
    a = torch.rand(16, 4096, generator=g).to(E4M3)
    b = torch.rand(16, 4096, generator=g).to(E4M3).t()
    exact, out = a.double() @ b.double(), torch.full((16, 16), torch.nan)
    errors = {}
    for sums in ("promoted", "direct"):
        row = next(r for r in EIGHT if r.sums == sums and r.consumers == 1)
        loaded = runner.library(E4M3, E4M3, sums)
        loaded.truncate_fp8_sums(1)
        assert runner.gemm(loaded, row.index, a, b, out, seed=0) == 0
        loaded.truncate_fp8_sums(0)
        errors[sums] = float((out - exact).norm() / exact.norm())
    assert errors["promoted"] < 2e-3, errors
    assert errors["direct"] > 2e-2, errors
