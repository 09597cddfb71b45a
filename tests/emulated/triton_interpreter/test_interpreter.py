"""What the tests of ../values do not reach in Triton's interpreter: the ops as ops of torch, the
random bits of the updates, how the GEMM reads its operands, and that the grouped one finds on the
device which rows belong to which group."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import independent as ind
import numpy as np
import pytest
import torch
from cases import (
    FP8,
    WIDE,
    contiguous,
    from_bits,
    name,
    normal,
    random_bits,
    small_integers,
    transposed,
)
from emulated.agreement import OPS, TRITON, Agreement, launcher
from emulated.triton_interpreter.helpers import choose, ops_on_the_cpu, tl, triton
from emulated.values.test_fused import BF16

import mixprec
from mixprec import ops
from mixprec.ops._reference import rounding
from mixprec.ops.gemm_grouped import gemm_grouped_accumulate_reference_, gemm_grouped_reference
from mixprec.triton_kernels import gemm, launch, pack, tiles
from mixprec.triton_kernels.rounding import random16
from mixprec.triton_kernels.tiles import ceil_div, int64

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from ops_on_the_cpu(monkeypatch)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("op_name", TRITON)
def test_through_the_dispatcher(op_name: str) -> None:
    """As an op of torch, compared on the examples that a GPU would run first; of twins, whose
    difference only the compiler sees, on those of odd sizes."""
    op = OPS[op_name]

    def is_even(args: tuple[Any, ...]) -> bool:
        x = args[0]
        return isinstance(x, torch.Tensor) and x.numel() > 64 and x.numel() % 16 == 0

    with mixprec.use_backend("triton"):
        assert op.choose("cpu") is op.handle("triton")
        found = op.difference(op.handle("triton"), "cpu", is_even)
    assert found is None, found


@triton.jit
def _random16_kernel(out_ptr, start: tl.int64, seed: tl.int64, step, index, STREAM: tl.constexpr,
                     BLOCK: tl.constexpr):  # fmt: skip
    key = (seed, step.to(tl.uint32), index)
    bits = random16(start, key, STREAM, BLOCK)
    tl.store(out_ptr + tl.arange(0, BLOCK), bits.to(tl.int32))


@pytest.mark.parametrize("seed", [0, 1, -1, -(2**63), 0x123456789ABCDEF])
def test_random_bits(seed: int) -> None:
    """Also where no tensor of a test reaches: counters of more than 32 bits, the last index."""
    block = 64
    for stream, start in itertools.product(range(3), (0, 8 * (2**32 - 3), 2**45)):
        step, index = (1, 2**30 - 1) if stream == 1 else (2**24, 0)
        got = torch.zeros(block, dtype=torch.int32)
        _random16_kernel[(1,)](got, start, seed, step, index, STREAM=stream, BLOCK=block)
        eighth = torch.arange(start // 8, start // 8 + block // 8)
        words = (eighth & 0xFFFFFFFF, eighth >> 32, torch.full_like(eighth, step),
                 torch.full_like(eighth, index + (stream << 30)))  # fmt: skip
        bits = rounding.philox(words, seed)
        want = torch.stack([bits & 0xFFFF, bits >> 16], dim=-1).reshape(-1)
        assert got.tolist() == want.tolist()


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


def fits(x: torch.Tensor) -> bool:
    return gemm._fits_tma(gemm.operand_of(x))


@pytest.mark.parametrize("setting", ["wide", "tma"])
@pytest.mark.parametrize("dtype", [*FP8, torch.float16, torch.bfloat16], ids=name)
def test_tma_in_all_four_layouts(
    monkeypatch: pytest.MonkeyPatch, poisoned: None, dtype: torch.dtype, setting: str
) -> None:
    """The tests of ../values have sizes that TMA does not take."""
    choose(monkeypatch, setting)
    for m, n, k in ((48, 64, 160), (16, 272, 48)):
        for order_a, order_b in itertools.product((contiguous, transposed), repeat=2):
            a, b = small_integers((m, k), dtype, seed=k), small_integers((k, n), dtype, seed=n)
            a, b = order_a(a), order_b(b)
            assert fits(a)
            assert fits(b.t())
            got = gemm.gemm(a, b, None, None, None, torch.float32, False)
            assert torch.equal(got, a.float() @ b.float())


@triton.jit
def _last_block_kernel(x_ptr, codes_ptr, ranges_ptr, n, BITS: tl.constexpr):
    """The last group of a tensor of n elements, of which memory holds no other."""
    start = int64(n // 128) * 128
    pack._pack_block(x_ptr - start, codes_ptr - start * BITS // 8, ranges_ptr - start // 128, start,
                     n, int64(1), int64(0), "fp32", BITS, True, 1, False)  # fmt: skip


@triton.jit
def _ceil_div_kernel(n, out_ptr, D: tl.constexpr):
    tl.store(out_ptr, ceil_div(n, D))


def test_sizes_just_below_2_to_the_31() -> None:
    """Sums of a size, an int32, and a block must not overflow."""
    n = 2**31 - 1
    for d in (2, 16, 128):
        out = torch.zeros(1, dtype=torch.int32)
        _ceil_div_kernel[(1,)](n, out, D=d)
        assert out.item() == 2**31 // d
    x, codes = torch.randn(128), torch.zeros(64, dtype=torch.uint8)
    ranges = torch.zeros((1, 2), dtype=torch.bfloat16)
    _last_block_kernel[(1,)](x, codes, ranges.view(torch.int32), n, BITS=4)
    ind.assert_same_bits(ranges, ops.pack(x[:127], 4)[1])
    back = ops.unpack(codes, ranges, 4, (127,))
    assert (back - x[:127]).abs().max() < 1.01 * ranges[0, 1].float()
    assert back.unique().numel() > 8


ROTARY = ((2, 3, 19, 8), (1, 1, 3, 2), (2, 1, 4, 70))  # B, T, heads, D


@pytest.mark.parametrize("dtype", WIDE, ids=name)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(poisoned: None, dtype: torch.dtype, interleaved: bool) -> None:
    """Any bits; parts of a packed tensor, and others; factors of samples and of features."""
    run, want = launcher("rotary"), OPS["rotary"].handle("reference")
    for i, (b, t, heads, d) in enumerate(ROTARY):
        x = random_bits(b * t * heads * d, dtype, seed=i).view(b, t, heads, d).transpose(1, 2)
        parts = x.split((heads - 2, 1, 1), 1)
        tables = ((t, d // 2), (t, d), (1, t, d // 2), (b, t, d))
        for j, (shape, inverse) in enumerate(itertools.product(tables, (False, True))):
            cos, sin = (normal(shape, torch.float32, seed=seed) for seed in (1, 2))
            operands = parts if (i + j // 2) % 2 else (transposed(x), None, None)
            args = (*operands, cos, sin, interleaved, inverse)
            got = run(*args)
            ind.assert_same_bits(got, want(*args))
            assert got.transpose(1, 2).is_contiguous()
            own, rest = x.clone(), (cos, sin, interleaved, inverse)
            launcher("rotary_")(own[:, :-1], *rest)  # in its own memory, v left as it is
            ind.assert_same_bits(own[:, :-1], want(x[:, :-1], None, None, *rest))
            ind.assert_same_bits(own[:, -1:], x[:, -1:])


REFERENCES = {
    "gemm_grouped": gemm_grouped_reference,
    "gemm_grouped_accumulate_": gemm_grouped_accumulate_reference_,
}
HALF = torch.float16
GROUPS = (
    ([70], 70), ([0, 0, 33, 33], 40), ([64, 64, 100], 100), ([1, 2, 3, 4, 5], 5), ([0, 0], 3),
    ([50, 20, 90, 70], 80), ([-7, 5, 99], 60), ([32, 48, 48, 80], 85),
)  # fmt: skip


def positive(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """So that a zero has one sign."""
    return small_integers(shape, torch.float32).abs().to(dtype)


@pytest.mark.parametrize(
    ("setting", "pair"), [("square", (HALF, HALF)), ("wide", (BF16, BF16)), ("tall", FP8)], ids=name
)
def test_groups_of_any_size(
    monkeypatch: pytest.MonkeyPatch, poisoned: None, setting: str, pair: tuple[torch.dtype, ...]
) -> None:
    choose(monkeypatch, setting)
    # Without its check, which refuses such offs on a CPU.
    agree = Agreement(launcher, want=lambda op: OPS[op].by_name(REFERENCES[op]))
    for turn, (ends, s) in enumerate(GROUPS):
        offs, e, k, n = torch.tensor(ends, dtype=torch.int32), len(ends), 40, 19
        a, b = positive((s, k), pair[0]), positive((e, k, n), pair[1])
        a, b = (transposed(a), b) if turn % 2 else (a, transposed(b))
        rows, columns = torch.full((s, 1), 0.5), torch.arange(1.0, e * n + 1).view(e, 1, n)
        agree("gemm_grouped", (a, b, rows, columns, offs, torch.float32, False))
        g = positive((s, n), pair[1])
        g = transposed(g) if turn % 2 else g
        acc, of_groups = torch.ones(e, k, n), torch.arange(1.0, e + 1).view(e, 1, 1)
        agree("gemm_grouped", (a.t(), g, None, of_groups, offs, BF16, False))
        agree("gemm_grouped_accumulate_", (acc, a.t(), g, of_groups, torch.ones(()), offs))
