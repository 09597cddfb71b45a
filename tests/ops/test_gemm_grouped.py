"""gemm_grouped and gemm_grouped_accumulate_: a gemm for each group, whatever the groups are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import FP8, LAYOUTS, for_each, name, padded_rows, small_integers, transposed

import mixprec
from mixprec import ops
from mixprec.ops._dispatch import gemm_vendor
from mixprec.ops.gemm_grouped import gemm_grouped_op

BF16, HALF = torch.bfloat16, torch.float16
PAIRS = ((HALF, HALF), (BF16, BF16), FP8, (FP8[1], FP8[1]))
formats = pytest.mark.parametrize("pair", PAIRS, ids=name)
# The ends of the groups, and S: empty first, empty groups, all rows in one, rows beyond the last.
GROUPS: tuple[tuple[list[int], int], ...] = (
    ([], 0), ([0, 0], 0), ([], 5), ([0], 3), ([7], 7), ([0, 0, 40], 40), ([3, 3, 30], 41),
    ([1, 2, 3, 4, 5, 6], 6), ([128, 128, 256, 300], 300), ([9, 200], 700),
)  # fmt: skip


def powers(*shape: int) -> torch.Tensor:
    """Scales under which sums of small integers stay exact."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-1, 2, shape, generator=generator).float().exp2()


def chunks(n: int) -> int:
    return -(-n // 128)


def rows(pair: Any, s: int, groups: int, k: int = 150, n: int = 37) -> tuple[Any, Any]:
    a = small_integers((s, k), pair[0], 4, seed=s)
    return a, transposed(small_integers((groups, k, n), pair[1], 4, seed=n))


def columns(pair: Any, s: int, m: int = 21, n: int = 35) -> tuple[Any, Any]:
    return transposed(small_integers((m, s), pair[0], 4, seed=m)), small_integers(
        (s, n), pair[1], 4
    )


def slices(ends: list[int]) -> list[slice]:
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def offs_of(ends: list[int]) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


@formats
def test_rows_are_a_gemm_of_each_group(backend: str, pair: Any) -> None:
    """The same bits as one gemm for each; 0 beyond the last."""
    for ends, s in GROUPS:
        a, b = rows(pair, s, len(ends))
        k, n, e = a.shape[1], b.shape[2], len(ends)
        scales: list[tuple[Any, Any]] = [
            (None, None), (powers(1)[0], powers(e, 1, 1)), (powers(s, 1), powers(e, 1, n)),
            (powers(s, chunks(k)), powers(e, chunks(k), chunks(n))),
            (powers(s, chunks(k)), transposed(powers(e, chunks(k), n))),
        ]  # fmt: skip
        for (sa, sb), out in itertools.product(scales, (torch.float32, BF16)):
            scaled = {"a_scale_inv": sa, "b_scale_inv": sb, "out_dtype": out}
            got = ops.gemm_grouped(a, b, offs_of(ends), **scaled)
            assert (got.shape, got.dtype, got.is_contiguous()) == ((s, n), out, True)
            for i, part in enumerate(slices(ends)):
                one = {"b_scale_inv": sb if sb is None else sb[i], "out_dtype": out}
                one["a_scale_inv"] = sa if sa is None or sa.dim() == 0 else sa[part]
                assert torch.equal(got[part], mixprec.gemm(a[part], b[i], **one)), (ends, i)
            assert not got[ends[-1] if ends else 0 :].any()


@formats
def test_groups_along_k_are_a_gemm_of_each(backend: str, pair: Any) -> None:
    for ends, s in GROUPS:
        (a, b), e, offs = columns(pair, s), len(ends), offs_of(ends)
        m, n = a.shape[0], b.shape[1]
        scales: list[tuple[Any, Any]] = [
            (None, None), (powers(e, 1, 1), powers(1)[0]), (powers(e, m, 1), powers(e, 1, n))
        ]  # fmt: skip
        if not any(part.start % 128 for part in slices(ends) if part.start < part.stop):
            scales.append((powers(m, chunks(s)), transposed(powers(chunks(s), n))))
        for sa, sb in scales:
            got = ops.gemm_grouped(
                a, b, offs, a_scale_inv=sa, b_scale_inv=sb, out_dtype=torch.float32
            )
            acc = padded_rows(torch.ones(e, m, n)).requires_grad_(False)
            ops.gemm_grouped_accumulate_(acc, a, b, offs, a_scale_inv=sa, b_scale_inv=sb)
            assert torch.equal(acc, got + 1)
            assert got.shape == (e, m, n)
            for i, part in enumerate(slices(ends)):
                inverse = []
                for scale, along in ((sa, 1), (sb, 0)):
                    cut = slice(part.start // 128, chunks(part.stop))
                    if scale is not None and scale.dim() == 3:
                        scale = scale[i]
                    elif scale is not None and scale.dim() == 2:
                        scale = scale[:, cut] if along else scale[cut]
                    inverse.append(scale)
                if part.start == part.stop:
                    inverse = [None, None]
                want = mixprec.gemm(
                    a[:, part], b[part], a_scale_inv=inverse[0], b_scale_inv=inverse[1],
                    out_dtype=torch.float32,
                )  # fmt: skip
                assert torch.equal(got[i], want), (ends, i)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_any_strides(backend: str, layout: Any) -> None:
    a, b = layout(rows((HALF, HALF), 17, 3)[0]), layout(rows((HALF, HALF), 17, 3)[1])
    got = ops.gemm_grouped(a, b, torch.tensor([5, 9, 17], dtype=torch.int32))
    wide = [a[p].double() @ b[i].double() for i, p in enumerate(slices([5, 9, 17]))]
    assert torch.equal(got, torch.cat(wide).half())
    strided = torch.tensor([5, 0, 9, 0, 17, 0], dtype=torch.int32)[::2]
    assert torch.equal(ops.gemm_grouped(a, b, strided), got)


@for_each("threads", [1, 2, 5])
def test_threads_do_not_change_the_result(set_threads: Callable[[int], None], threads: int) -> None:
    """One group with most of the work, and many small ones."""
    ends = [3, 900, *range(901, 1000, 9), 1000]
    a, b = torch.randn(1000, 300).bfloat16(), torch.randn(len(ends), 300, 130).bfloat16()
    g = torch.randn(1000, 130).bfloat16()
    calls = [(a, b), (a.t(), g)]
    set_threads(1)
    want = [ops.gemm_grouped(*call, offs_of(ends)) for call in calls]
    set_threads(threads)
    for call, one in zip(calls, want, strict=True):
        assert torch.equal(ops.gemm_grouped(*call, offs_of(ends)), one)


def test_ends_that_are_not_valid_make_groups_empty_where_they_are_not_refused() -> None:
    """As the kernels of a GPU, which read offs on the device, define it."""
    from mixprec.ops._reference.gemm_scales import Operands, groups

    a, b = rows((HALF, HALF), 10, 4)
    parts = [part for part, _ in groups(Operands(a, b), offs_of([-3, 6, 4, 99]))]
    assert parts == [slice(0, 0), slice(0, 6), slice(6, 6), slice(6, 10)]


A, B = rows((HALF, HALF), 10, 3)
OFFS = offs_of([2, 2, 9])


def test_scales_along_s_need_groups_at_multiples_of_128(backend: str) -> None:
    a, b = columns((HALF, HALF), 300)
    with pytest.raises(ValueError, match=r"offs must begin each group at a multiple of 128"):
        ops.gemm_grouped(a, b, offs_of([100, 300]), b_scale_inv=torch.ones(3, 35))
    with pytest.raises(ValueError, match=r"^gemm_grouped_accumulate_: b must be \[S, N\]"):
        ops.gemm_grouped_accumulate_(torch.zeros(10, 37), A, B, OFFS)
    acc = torch.zeros(1, 21, 35)
    with pytest.raises(ValueError, match="acc must have shape"):
        ops.gemm_grouped_accumulate_(acc, a, b, offs_of([100, 300]))
    shared = torch.zeros(2, 4, 4)
    views = shared.view(torch.float16)[0]
    with pytest.raises(ValueError, match="must not overlap"):
        ops.gemm_grouped_accumulate_(shared, views, views.t(), offs_of([1, 8]))


def on_cuda(pair: Any, by_rows: bool, turned: bool = False, **scales: Any) -> tuple[Any, ...]:
    """Arguments on a fake GPU, K or, along S, the rows next to each other."""
    a = torch.empty(64, 256, dtype=pair[0], device="cuda")
    b = torch.empty(3, 128, 256, dtype=pair[1], device="cuda").transpose(1, 2)
    if not by_rows:
        a, b = a.t(), torch.empty(64, 128, dtype=pair[1], device="cuda")
    if turned:
        a = torch.empty_strided(a.shape, a.stride()[::-1], dtype=pair[0], device="cuda")
    made = {n: torch.empty(shape, device="cuda") for n, shape in scales.items()}
    sa, sb = made.get("a"), made.get("b")
    offs = torch.empty(3, dtype=torch.int32, device="cuda")
    return a, b, sa, sb, offs, BF16, False


E4 = (FP8[0], FP8[0])
OF_ROWS = {"a": (64, 1), "b": (3, 1, 128)}


@for_each(
    "call, capability, reason",
    [
        (lambda: on_cuda((BF16, BF16), True), (9, 0), None),
        (lambda: on_cuda((BF16, BF16), False), (10, 0), None),
        (lambda: on_cuda(E4, True, **OF_ROWS), (9, 0), None),
        (lambda: on_cuda((BF16, BF16), True), (8, 0), "reads offs on the host"),
        (lambda: on_cuda((BF16, BF16), True, turned=True), (9, 0), "rows next to each other"),
        (lambda: on_cuda((BF16, BF16), False, turned=True), (9, 0), "whole lines"),
        (lambda: on_cuda((BF16, BF16), True, a=()), (9, 0), "no scales"),
        (lambda: on_cuda((HALF, HALF), True), (9, 0), "takes bfloat16 operands"),
        (lambda: on_cuda(E4, True, **OF_ROWS), (10, 0), "on 9.0 only"),
        (lambda: on_cuda(E4, True), (9, 0), "scales of rows only"),
        (lambda: on_cuda(E4, False), (9, 0), "multiples of 16 along K"),
        (lambda: on_cuda(E4, True, turned=True, **OF_ROWS), (9, 0), "K next to each other"),
    ],
)
def test_what_torch_computes_in_one_call(call: Any, capability: Any, reason: str | None) -> None:
    """Its own checks pass, and no value is read on the host, which a fake tensor refuses."""
    with torch._subclasses.FakeTensorMode():
        args = call()
        said = gemm_vendor.grouped_why_not(gemm_grouped_op.Args(*args), capability)
        if reason is not None:
            assert reason in str(said)
            return
        assert said is None
        out = gemm_vendor.gemm_grouped_vendor(*args)
        want = gemm_grouped_op.handle("reference")(*args)
        assert (out.shape, out.dtype, out.stride()) == (want.shape, want.dtype, want.stride())


@pytest.mark.parametrize("by_rows", [True, False])
def test_torch_computes_the_same(by_rows: bool) -> None:
    """Its CPU kernel, for the very call; rows beyond the last group are 0."""
    a, b = rows((BF16, BF16), 16, 3, 64, 32) if by_rows else columns((BF16, BF16), 16, 16, 32)
    args = a, b, None, None, offs_of([4, 4, 11]), BF16, False
    got = gemm_vendor.gemm_grouped_vendor(*args)
    assert torch.equal(got, gemm_grouped_op.handle("reference")(*args))
