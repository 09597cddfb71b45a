"""gemm by torch's own kernels: exact where it is used, and why it is not used elsewhere."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cases import name, small_integers
from gemm_calls import A8, B8, BF16, CAN, CANNOT, COLUMN, FP32, HALF, ONE, ROW, arguments, operands

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


@pytest.mark.parametrize("head", [(), ("acc",)])
def test_the_cuda_kernel_has_scales_along_k_for_fp8_only(head: tuple[Any, ...]) -> None:
    def why_not(dtype: torch.dtype, *shapes: tuple[int, ...] | None) -> str | None:
        scales = [None if shape is None else torch.ones(shape) for shape in shapes]
        a, b = (torch.ones(shape).to(dtype) for shape in ((256, 384), (384, 128)))
        tail = () if head else (None, FP32, False)
        op = gemm_accumulate_op if head else gemm_op
        return gemm_table.cuda_why_not(op.Args(*head, a, b, *scales, *tail), (9, 0))

    for fp8 in (torch.float8_e4m3fn, torch.float8_e5m2):
        assert why_not(fp8, (256, 3), (3, 1)) is None
    for shapes in ((None, None), ((), ()), ((256, 1), (1, 128)), (None, (1, 128))):
        assert why_not(torch.bfloat16, *shapes) is None
    for shapes in (((256, 3), None), ((2, 3), (1, 128)), (None, (3, 128)), ((), (3, 1))):
        assert "FP8 operands only" in str(why_not(torch.float16, *shapes))


def test_accumulate_is_the_fp32_product_added() -> None:
    def why_not(*args: Any) -> str | None:
        return gemm_vendor.gemm_why_not(gemm_accumulate_op.Args(*args), (9, 0))

    acc = small_integers((32, 48), FP32, seed=5)
    want, args = acc.clone(), (A8, B8, ONE * 2, ONE / 4)
    assert why_not(acc, *args) is None
    gemm_vendor.gemm_accumulate_vendor_(acc, *args)
    torch.ops.mixprec.gemm_accumulate_reference_(want, *args)
    assert torch.equal(acc, want)
    assert "bfloat16 result" in str(why_not(acc, A8, B8, ROW, COLUMN)), "no FP32 result by rows"
    assert why_not(acc, *operands(BF16), None, None) is None


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
    """They are off during the launch, and afterwards as before, also after an error."""
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
        assert [getattr(matmul, flag) for flag in FLAGS] == [on] * 3
    finally:
        for flag, value in zip(FLAGS, before, strict=True):
            setattr(matmul, flag, value)
    assert seen == [[False] * (2 if dtype == HALF else 1)] * 2
