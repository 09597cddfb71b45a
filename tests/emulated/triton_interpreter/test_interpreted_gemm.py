"""gemm in Triton's interpreter: exact where sums are exact, within the derived bound elsewhere.

FP8 takes both ways here: decoded in integers, and as fp8 through tl.dot.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import independent as ind
import numpy as np
import pytest
import torch
from cases import (
    FP8,
    LAYOUTS,
    WIDE,
    Layout,
    contiguous,
    every_second,
    from_bits,
    name,
    normal,
    random_bits,
    small_integers,
    transposed,
)
from emulated.triton_interpreter.helpers import no_warnings, tl, triton

from mixprec.testing import assert_close, tolerance
from mixprec.triton_kernels import configs, gemm, launch, tiles

PAIRS = (
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    *itertools.product(FP8, FP8),
)
formats = pytest.mark.parametrize("pair", PAIRS, ids=name)
# Smaller than those in use, so that small problems have several tiles and rounds; 256 is stored in
# two halves.
TILES = {
    "square": configs.Config(32, 32, 64, 4, 2, group=2),
    "tall": configs.Config(64, 16, 128, 4, 2, group=1),
    "wide": configs.Config(16, 256, 32, 4, 2, group=3),
}
RAGGED = ((1, 1, 1), (1, 33, 40), (65, 1, 129), (37, 29, 7), (33, 257, 65))
pytestmark = no_warnings

Run = Callable[..., torch.Tensor]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, poisoned: None) -> Callable[..., None]:
    """Choose the tile, the GPU's size, the parts of K, TMA, and how fp8 is read. What is allocated
    is NaN, so that a tile that no program computes shows."""

    def choose(
        tile: str = "square", *, programs: int = 3, parts: int = 1, tma: bool = False,
        native_fp8: bool = False,
    ) -> None:  # fmt: skip
        config = configs.Config(**(vars(TILES[tile]) | {"tma": tma}))
        monkeypatch.setattr(gemm, "_gpu", lambda _: (90, programs))
        monkeypatch.setattr(gemm, "pick", lambda *_: config)
        monkeypatch.setattr(gemm, "split_k", lambda *_: parts)
        if native_fp8:
            fp8 = torch.uint8.itemsize
            monkeypatch.setattr(gemm, "soft_cast", lambda _, a, b: a.itemsize != fp8)

    return choose


def run(
    a: torch.Tensor, b: torch.Tensor, a_scale_inv: torch.Tensor | None = None,
    b_scale_inv: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    out: torch.dtype = torch.float32, fast: bool = False,
) -> torch.Tensor:  # fmt: skip
    """gemm, and gemm_accumulate_ onto integers where that has to give the same."""
    result = gemm.gemm(a, b, a_scale_inv, b_scale_inv, bias, out, fast)
    if bias is None and out == torch.float32:
        start = small_integers((a.shape[0], b.shape[1]), torch.float32, seed=9)
        acc = every_second(start)
        gemm.gemm_accumulate_(acc, a, b, a_scale_inv, b_scale_inv)
        ind.assert_same_bits(acc.contiguous() + 0.0, result + start + 0.0, "gemm_accumulate_")
    assert result.is_contiguous()
    assert result.dtype == out
    return result


def product(a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return ind.values(a) @ ind.values(b)


def check_exact(c: torch.Tensor, want: np.ndarray, what: str = "gemm") -> None:
    """c is `want` after one rounding; the sign of a zero is left open."""
    pattern = ind.narrow(want, c.dtype)
    negative_zero = pattern == 1 << (8 * pattern.itemsize - 1)
    ind.assert_bits(c + 0.0, np.where(negative_zero, 0, pattern).astype(pattern.dtype), what)


def test_the_interpreter_runs() -> None:
    assert launch.INTERPRETED, "TRITON_INTERPRET=1 must be set before triton is imported"


@triton.jit
def _operand_kernel(code, out, FORMAT: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tiles.operand(tl.load(code + i), FORMAT, True).to(tl.float32))


@pytest.mark.parametrize("dtype", [*FP8, torch.float16, torch.bfloat16], ids=name)
def test_operands_decode_exactly(dtype: torch.dtype) -> None:
    width = dtype.itemsize
    x = from_bits(np.arange(1 << 8 * width, dtype=f"uint{8 * width}"), dtype)
    out = torch.empty(x.shape)
    _operand_kernel[(1,)](launch.codes(x), out, FORMAT=launch.FORMATS[dtype], N=x.numel())
    with np.errstate(invalid="ignore"):
        ind.assert_bits(out, ind.narrow(ind.values(x), torch.float32))


@formats
def test_small_integers_are_exact(use: Any, pair: tuple[torch.dtype, ...]) -> None:
    for tile, (i, (m, n, k)) in itertools.product(TILES, enumerate(RAGGED)):
        a, b = small_integers((m, k), pair[0], seed=i), small_integers((k, n), pair[1], seed=-i)
        use(tile, programs=1 + 3 * i)
        check_exact(run(a, transposed(b) if i % 2 else b), product(a, b), f"{m} {n} {k}")


@pytest.mark.parametrize("pair", list(itertools.product(FP8, FP8)), ids=name)
@pytest.mark.parametrize("fast", [False, True])
def test_native_fp8(use: Any, pair: tuple[torch.dtype, ...], fast: bool) -> None:
    """Without decoding: the promoted sum, and the one that tl.dot keeps."""
    for tile in TILES:
        use(tile, native_fp8=True)
        for m, n, k in ((37, 29, 7), (70, 70, 300)):
            a, b = small_integers((m, k), pair[0]), small_integers((k, n), pair[1], seed=1)
            check_exact(run(a, b, fast=fast), product(a, b))


@pytest.mark.parametrize("layout_a", LAYOUTS, ids=name)
def test_all_layouts(use: Any, layout_a: Layout) -> None:
    """Whatever lies between the elements is NaN; TMA takes what is aligned and leaves the rest."""
    shapes = ((17, 33, 40), (1, 19, 7), (37, 1, 5), (5, 6, 1))
    for i, layout_b in enumerate(LAYOUTS):
        for j, pair in enumerate((PAIRS[0], PAIRS[3])):
            for m, n, k in (shapes[0], shapes[1 + (i + j) % 3]):
                a = layout_a(small_integers((m, k), pair[0], seed=m))
                b = layout_b(small_integers((k, n), pair[1], seed=n))
                use(tma=True)
                check_exact(gemm.gemm(a, b, None, None, None, WIDE[0], False), product(a, b))


@pytest.mark.parametrize("native", [False, True])
@formats
def test_tma_in_all_four_layouts(use: Any, pair: tuple[torch.dtype, ...], native: bool) -> None:
    if native and pair[0] not in FP8:
        pytest.skip("the interpreter has no correct bf16; fp16 is the same either way")
    used: list[bool] = []
    fits = gemm._fits_tma
    for (m, n, k), tile in (
        ((48, 64, 160), "square"),
        ((64, 32, 160), "tall"),
        ((16, 272, 48), "wide"),
    ):
        for order_a, order_b in itertools.product((contiguous, transposed), repeat=2):
            a = order_a(small_integers((m, k), pair[0], seed=k))
            b = order_b(small_integers((k, n), pair[1], seed=n))
            use(tile, tma=True, native_fp8=native)
            used.append(fits(gemm._operand(a)) and fits(gemm._operand(b.t())))
            c = gemm.gemm(a, b, None, None, None, torch.float32, False)
            check_exact(c, product(a, b))
    assert all(used)


def test_what_tma_cannot_take() -> None:
    def fits(x: torch.Tensor) -> bool:
        return gemm._fits_tma(gemm._operand(x))

    x = torch.zeros(64, 64, dtype=torch.float16)
    assert fits(x)
    assert fits(x.t())
    assert fits(x[:, :33])  # the leading dimension counts
    assert not fits(x[:, 1:])  # base
    assert not fits(torch.zeros(64, 65, dtype=torch.float16))  # leading dimension
    assert not fits(x[:1].expand(64, 64))  # rows that overlap
    assert fits(torch.zeros(64, 16, dtype=FP8[0]))
    assert not fits(torch.zeros(64, 8, dtype=FP8[0]))


@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[1], PAIRS[3]], ids=name)
@pytest.mark.parametrize("parts", [2, 3, 5])
def test_split_k(use: Any, pair: tuple[torch.dtype, ...], parts: int) -> None:
    """Parts of different lengths, and at K = 300 some without any chunk of their own."""
    for (m, n, k), tile in (
        ((70, 9, 700), "tall"),
        ((1, 19, 300), "square"),
        ((9, 270, 300), "wide"),
    ):
        a, b = small_integers((m, k), pair[0], seed=m), small_integers((k, n), pair[1], seed=n)
        bias = small_integers((n,), torch.bfloat16, seed=4)
        s = torch.tensor(0.5)
        want = product(a, b)
        use(tile, parts=parts)
        check_exact(run(a, b), want)
        c = run(a, b, s, s.view(1, 1), bias, torch.bfloat16)
        check_exact(c, want * 0.25 + ind.values(bias))


def powers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Scales under which sums of small integers stay exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).float().exp2()


def granularities(size: int, K: int) -> dict[str, tuple[int, int]]:
    rows, chunks = -(-size // 128), -(-K // 128)
    return {
        "tensor": (1, 1), "row": (size, 1), "block1x128": (size, chunks),
        "block128x128": (rows, chunks), "128 rows": (rows, 1), "chunk": (1, chunks),
    }  # fmt: skip


def expanded(s: torch.Tensor, size: int, K: int) -> np.ndarray:
    """The scale of every element of an operand [size, K], by the rule of the contract."""
    r, c = s.shape
    i, k = np.arange(size), np.arange(K)
    rows = i if r == size else i // 128 if r == -(-size // 128) else 0 * i
    return ind.values(s)[rows][:, k // 128 if c > 1 else 0 * k]


@pytest.mark.parametrize("ga", granularities(1, 1))
def test_scales_of_every_granularity(use: Any, ga: str) -> None:
    shapes = ((150, 35, 300), (70, 37, 130), (1, 150, 257), (129, 1, 100))
    for gb, (j, (m, n, k)) in itertools.product(granularities(1, 1), enumerate(shapes)):
        tile = ("tall", "square", "wide", "tall")[j]
        shape_a, shape_b = granularities(m, k)[ga], granularities(n, k)[gb]
        if (ga == "chunk" and m > 128) or (gb == "chunk" and n > 128):
            continue  # one row of scales then fits no rule
        if k > 128 and "128 rows" in (ga, gb):
            continue  # [ceil(M/128), 1] is block128x128 where K has one chunk
        sa, sb = powers(shape_a, seed=1 + j), powers(shape_b, seed=2 + j)
        pair = (PAIRS[0], PAIRS[1], PAIRS[3], PAIRS[4])[j]
        a, b = small_integers((m, k), pair[0], 4, j), small_integers((k, n), pair[1], 4, -j)
        left = ind.values(a) * expanded(sa, m, k)
        want = left @ (ind.values(b) * expanded(sb, n, k).T)
        layout = (contiguous, transposed, every_second)[j % 3]
        use(tile, parts=1 + j % 2)
        scales = layout(sa), layout(sb).t()
        c = run(a, b, *scales) if j == 1 else gemm.gemm(a, b, *scales, None, WIDE[0], False)
        check_exact(c, want, f"{ga} {gb} {m} {n} {k}")


@formats
def test_one_rounding_after_scales_and_bias(use: Any, pair: tuple[torch.dtype, ...]) -> None:
    """Sums with more bits than any 16-bit output, exact in FP32: every early rounding shows."""
    half = torch.tensor(0.5)
    shapes = ((33, 70, 64), (9, 129, 200))
    for i, (bias_dtype, out) in enumerate(itertools.product(WIDE, WIDE)):
        m, n, k = shapes[i % 2]
        a, b = small_integers((m, k), pair[0], seed=k), small_integers((k, n), pair[1], seed=n)
        bias = (normal((n,), torch.float64, seed=3) * 4096).round().div(1024).to(bias_dtype)
        exact = product(a, b) * 0.25 + ind.values(bias)
        use("wide" if n == 129 else "square", parts=1 + (n == 129))
        check_exact(run(a, b, half, half, bias, out), exact)
        strided = bias.repeat_interleave(2)[::2]
        check_exact(run(a, b, bias=strided, out=out), product(a, b) + ind.values(bias))


@formats
def test_one_hot_rows_select_exactly(use: Any, pair: tuple[torch.dtype, ...]) -> None:
    rng = np.random.default_rng(0)
    for m, n, k in ((40, 33, 70), (3, 257, 33)):
        codes = random_bits(4 * n * k, pair[1], seed=m)
        magnitude = np.nan_to_num(np.abs(ind.values(codes)), nan=np.inf)
        codes = codes[(magnitude < 1e30) & ((magnitude > 1e-30) | (magnitude == 0))]
        b, rows = codes[: k * n].view(k, n), rng.integers(0, k, m)
        a = torch.zeros(m, k)
        a[torch.arange(m), torch.from_numpy(rows)] = 1.0
        for left, right in itertools.product(
            (a.to(pair[0]), transposed(a.to(pair[0]))), (b, transposed(b))
        ):
            use("wide" if n == 257 else "square", programs=1)
            scale = torch.tensor([2.0])
            c = gemm.gemm(left, right, scale, None, None, torch.float32, False)
            check_exact(c, ind.values(b)[rows] * 2.0)
            c = gemm.gemm(right.t(), left.t(), None, scale, None, torch.float32, False)
            check_exact(c, ind.values(b)[rows].T * 2.0)


@formats
def test_random_and_one_signed_data(use: Any, pair: tuple[torch.dtype, ...]) -> None:
    """Within the bound, with the tiles that are used here without any choice as well."""
    generator = torch.Generator().manual_seed(0)
    out = WIDE[PAIRS.index(pair) % 3]
    for i, positive in enumerate((False, True)):
        a = torch.rand((70, 600), generator=generator) - (0 if positive else 0.5)
        b = torch.rand((600, 30), generator=generator) - (0 if positive else 0.5)
        a, b = a.to(pair[0]), b.to(pair[1])
        sa, sb = torch.rand((70, 5), generator=generator), torch.rand((5, 1), generator=generator)
        if i:
            use("tall")
        c = gemm.gemm(a, b, sa, sb, None, out, False)
        left = torch.from_numpy(ind.values(a) * expanded(sa, 70, 600))
        right = torch.from_numpy(ind.values(b) * expanded(sb.t(), 30, 600).T)
        assert_close(c, left @ right, tolerance(left @ right, left, right, out))
        again = gemm.gemm(a, b, sa, sb, None, out, False)
        ind.assert_same_bits(again, c, "second run")


@formats
def test_infinities_and_nan_stay_in_their_rows_and_columns(
    use: Any, pair: tuple[torch.dtype, ...]
) -> None:
    a, b = small_integers((40, 33), pair[0]), small_integers((33, 36), pair[1])
    a[3, 32], b[0, 35] = float("nan"), float("nan")
    if pair[0] != torch.float8_e4m3fn:
        a[39, 5] = float("inf")
    for tile, out in zip(TILES, WIDE, strict=True):
        use(tile)
        check_exact(gemm.gemm(a, b, None, None, None, out, False), product(a, b))


def test_empty_operands() -> None:
    bias = torch.tensor([1.0, 2.0 + 2.0**-12])
    for m, n in ((0, 3), (3, 0), (0, 0)):
        a, b = torch.zeros(m, 5).half(), torch.zeros(5, n).half()
        assert gemm.gemm(a, b, None, None, None, torch.bfloat16, False).shape == (m, n)
        gemm.gemm_accumulate_(torch.zeros(m, n), a, b, None, None)
    a, b = torch.zeros(4, 0).bfloat16(), torch.zeros(0, 2).bfloat16()
    for out in WIDE:
        assert gemm.gemm(a, b, None, None, None, out, False).eq(0).all()
        got = gemm.gemm(a, b, None, None, bias, out, False)
        assert torch.equal(got, bias.to(out).expand(4, 2))
    acc = torch.ones(4, 2)
    gemm.gemm_accumulate_(acc, a, b, None, None)
    assert acc.eq(1).all()


def test_nothing_else_is_written(use: Any) -> None:
    """acc in the middle of a larger tensor, and operands afterwards as they were."""
    for tile in TILES:
        use(tile)
        frame = torch.full((50, 61), float("nan"))
        inside = frame[5:42, 7:40]
        inside.zero_()
        a, b = small_integers((37, 45), torch.float16), small_integers((45, 33), torch.float16)
        before = a.clone(), b.clone()
        gemm.gemm_accumulate_(inside, a, b, None, None)
        check_exact(inside.contiguous(), product(a, b))
        assert frame.isnan().sum() == frame.numel() - inside.numel()
        assert torch.equal(a, before[0])
        assert torch.equal(b, before[1])
