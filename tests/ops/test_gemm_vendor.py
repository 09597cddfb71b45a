"""gemm by torch's own kernels: exact where it is used, and why it is not used elsewhere."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cases import name, small_integers
from gemm_calls import (
    A8,
    B8,
    BF16,
    BLOCKS,
    CAN,
    CANNOT,
    COLUMN,
    E4M3,
    FP32,
    HALF,
    ONE,
    ROW,
    arguments,
    operands,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from mixprec.ops._dispatch import gemm_table, gemm_vendor
from mixprec.ops.gemm import gemm_accumulate_op, gemm_op


@pytest.mark.parametrize("case", CAN)
def test_what_torch_does_in_one_call_has_the_right_values(case: str) -> None:
    """The very calls, on torch's CPU kernels (which have no FP32 result for 16-bit operands)."""
    args = CAN[case]
    assert gemm_vendor.gemm_why_not(gemm_op.Args(*args), (9, 0)) is None
    if args[0].dtype.itemsize == 2 and args[5] == FP32:
        pytest.skip("torch's CPU kernels give 16-bit operands no fp32 result")
    try:
        got = gemm_vendor.gemm_vendor(*args)
    except RuntimeError as error:  # torch 2.11; the library calls it on GPUs only
        if "only supports per-tensor scaling for CPU" not in str(error):
            raise
        pytest.skip("the CPU kernels of this torch take no scales per row")
    want = torch.ops.mixprec.gemm_reference(*args)
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    assert torch.equal(got, want)


@pytest.mark.parametrize("case", CANNOT)
def test_what_torch_cannot_do_is_refused_with_the_reason(case: str) -> None:
    args, reason = CANNOT[case]
    assert re.search(
        f"^torch.*{reason}", str(gemm_vendor.gemm_why_not(gemm_op.Args(*args), (9, 0)))
    )


def test_what_a_gpu_is_too_old_for() -> None:
    old, rows = "8.9 or more", "only on compute capability 9 and 10"
    for capability, of_plain, of_rows in (
        *(((8, 0), old, old), ((8, 9), None, rows), ((9, 0), None, None)),
        *(((12, 0), None, rows), (None, None, None)),
    ):
        for case, reason in (("fp8", of_plain), ("fp8 by rows", of_rows), ("bf16", None)):
            got = gemm_vendor.gemm_why_not(gemm_op.Args(*CAN[case]), capability)
            assert (got is None) is (reason is None)
            assert reason is None or reason in (got or "")
    args = gemm_op.Args(*CAN["fp8"])
    assert gemm_table.cuda_why_not(args, (9, 0)) is None
    too_old = str(gemm_table.cuda_why_not(args, (8, 0)))
    assert "for compute capability 9.0 (Hopper), this GPU is 8.0" in too_old
    args = gemm_op.Args(*BLOCKS["1x128"])
    args = args._replace(a=args.a.half(), b=args.b.half())
    assert "FP8 operands only" in str(gemm_table.cuda_why_not(args, (9, 0)))


def test_accumulate_is_the_fp32_product_added(monkeypatch: pytest.MonkeyPatch) -> None:
    def why_not(*args: Any) -> str | None:
        return gemm_vendor.gemm_why_not(gemm_accumulate_op.Args(*args), (9, 0))

    acc = small_integers((32, 48), FP32, seed=5)
    want, args = acc.clone(), (A8, B8, ONE * 2, ONE / 4)
    assert why_not(acc, *args) is None
    gemm_vendor.gemm_accumulate_vendor_(acc, *args)
    torch.ops.mixprec.gemm_accumulate_reference_(want, *args)
    assert torch.equal(acc, want)

    def addmm(self: torch.Tensor, *ab: torch.Tensor, **options: Any) -> None:
        """Which the CPU has in one dtype only."""
        assert options.pop("out_dtype") == FP32
        (a, b), out = ab, options.pop("out")
        assert not options
        out.copy_(self + a.float() @ b.float())

    monkeypatch.setattr(torch, "addmm", addmm)
    for dtype in (BF16, HALF):
        args16 = *operands(dtype), None, None
        gemm_vendor.gemm_accumulate_vendor_(acc, *args16)
        torch.ops.mixprec.gemm_accumulate_reference_(want, *args16)
        assert torch.equal(acc, want)
    assert "bfloat16 result" in str(why_not(acc, A8, B8, ROW, COLUMN)), "no FP32 result by rows"
    assert why_not(acc, *operands(BF16), None, None) is None


@pytest.mark.parametrize("case", BLOCKS)
def test_scales_of_blocks_on_hopper(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """torch's checks accept them, of fake CUDA tensors; their values, read as cuBLAS does."""
    args = gemm_op.Args(*BLOCKS[case])
    assert gemm_vendor.gemm_why_not(args, (9, 0)) is None
    assert "compute capability 9 only" in str(gemm_vendor.gemm_why_not(args, (10, 0)))
    assert "needs K next to each other" in str(
        gemm_vendor.gemm_why_not(args._replace(b=args.b.contiguous()), (9, 0))
    )
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "CUDA 12.9 or later" in str(gemm_vendor.gemm_why_not(args, (9, 0)))
    # A CPU build of torch copies no fake CUDA tensors: scales are in the order that is asked for.
    in_order = args._replace(a_scale_inv=args.a_scale_inv.t().contiguous().t())
    in_order = in_order._replace(b_scale_inv=args.b_scale_inv.contiguous())
    with FakeTensorMode():
        fake = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")
            if isinstance(t, torch.Tensor)
            else t
            for t in in_order
        ]
        y = gemm_vendor.gemm_vendor(*fake)
        assert (y.shape, y.dtype) == ((args.a.shape[0], args.b.shape[1]), args.out_dtype)

    def as_cublas(
        a: Any, b: Any, scale_a: Any, recipe_a: Any, scale_b: Any, recipe_b: Any, *, bias: Any,
        output_dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        wide = []
        for x, scales, recipe in ((a, scale_a, recipe_a), (b.t(), scale_b, recipe_b)):
            (rows, k), line = x.shape, scales.stride(1)
            flat = scales.as_strided(((scales.shape[1] - 1) * line + scales.shape[0],), (1,))
            r, i = torch.arange(rows)[:, None], torch.arange(k)
            square = recipe == F.ScalingType.BlockWise128x128
            each = flat[r // 128 * line + i // 128] if square else flat[i // 128 * line + r]
            assert (line % 4 == 0) if square else (line == rows and rows % 4 == 0)
            wide.append(x.double() * each)
        y = wide[0] @ wide[1].t()
        return (y if bias is None else y + bias).to(output_dtype)

    monkeypatch.setattr(F, "scaled_mm", as_cublas)
    assert torch.equal(gemm_vendor.gemm_vendor(*args), torch.ops.mixprec.gemm_reference(*args))


def test_blackwell_reads_either_order() -> None:
    (a, b), (m, n) = operands(E4M3), (32, 48)
    orders = [(x, y) for x in (a, a.t().contiguous().t()) for y in (b, b.contiguous())]
    for capability, allowed in (((10, 0), 4), ((10, 3), 4), ((9, 0), 1), ((12, 0), 1), (None, 1)):
        found = [
            gemm_vendor.gemm_why_not(gemm_op.Args(*arguments(*pair, BF16, ONE, ONE)), capability)
            for pair in orders
        ]
        assert found[0] is None
        assert found.count(None) == allowed
    by_rows = arguments(orders[-1][0], orders[-1][1], BF16, torch.ones(m, 1), torch.ones(1, n))
    assert "K next to" in str(gemm_vendor.gemm_why_not(gemm_op.Args(*by_rows), (10, 0)))
    odd = operands(E4M3, m=24)[0].t().contiguous().t()
    refused = gemm_vendor.gemm_why_not(gemm_op.Args(*arguments(odd, b, BF16)), (10, 0))
    assert "lines 16 bytes apart" in str(refused)


FLAGS = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=name)
@pytest.mark.parametrize("on", [True, False])
def test_torch_sums_in_fp32_whatever_the_flags_say(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, on: bool
) -> None:
    """They are off from the first launch on: other threads see no change with each product."""
    matmul, seen = torch.backends.cuda.matmul, []
    kind = "fp16" if dtype == HALF else "bf16"

    def mm(a: torch.Tensor, b: torch.Tensor, **_: object) -> torch.Tensor:
        seen.append([getattr(matmul, flag) for flag in FLAGS if kind in flag])
        raise MemoryError

    monkeypatch.setattr(torch, "mm", mm)
    before = [getattr(matmul, flag) for flag in FLAGS]
    try:
        for flag in FLAGS:
            setattr(matmul, flag, on)
        for out in (dtype, FP32):
            with pytest.raises(MemoryError):
                gemm_vendor.gemm_vendor(*arguments(*operands(dtype), out))
        after = {flag: getattr(matmul, flag) for flag in FLAGS}
        assert after == {flag: on and kind not in flag for flag in FLAGS}
    finally:
        for flag, value in zip(FLAGS, before, strict=True):
            setattr(matmul, flag, value)
    assert seen == [[False] * (2 if dtype == HALF else 1)] * 2
