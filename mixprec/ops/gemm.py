"""gemm and gemm_accumulate_: matrix products of low-precision operands, accumulated in FP32."""

from __future__ import annotations

import torch

from ..quantized import Quantized
from . import _backends, _checks, _library

Operand = torch.Tensor | Quantized


def _product(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor | None,
    b_scale_inv: torch.Tensor | None,
) -> torch.Tensor:
    """(a @ b) * a_scale_inv * b_scale_inv in FP32, [M, N]; every product of operands is exact."""
    acc = a.float() @ b.float()
    for scale_inv in (a_scale_inv, b_scale_inv):
        if scale_inv is not None:
            acc = acc * scale_inv.reshape(())
    return acc


def gemm_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor | None,
    b_scale_inv: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    acc = _product(a, b, a_scale_inv, b_scale_inv)
    if bias is not None:
        acc = acc + bias.float()
    return acc.to(out_dtype)


def gemm_accumulate_reference_(
    acc: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor | None,
    b_scale_inv: torch.Tensor | None,
) -> None:
    acc.add_(_product(a, b, a_scale_inv, b_scale_inv))


def _check_operands(
    op: str,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor | None,
    b_scale_inv: torch.Tensor | None,
) -> None:
    _checks.is_tensor(op, "a", a)
    _checks.is_tensor(op, "b", b)
    if a.dim() != 2:
        raise ValueError(f"{op}: a must be [M, K], got shape {tuple(a.shape)}")
    if b.dim() != 2:
        raise ValueError(f"{op}: b must be [K, N], got shape {tuple(b.shape)}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"{op}: a [M, K] and b [K, N] must agree in K, "
            f"got a {tuple(a.shape)} and b {tuple(b.shape)}"
        )
    both_fp8 = a.dtype in _checks.FP8 and b.dtype in _checks.FP8
    if not both_fp8 and (a.dtype != b.dtype or a.dtype not in (torch.float16, torch.bfloat16)):
        raise ValueError(
            f"{op}: a and b must both be float16, both bfloat16, or FP8 in any mix of "
            f"float8_e4m3fn and float8_e5m2, got a {a.dtype} and b {b.dtype}"
        )
    _checks.on_device(op, "b", b, a.device, "a")
    for name, t in (("a_scale_inv", a_scale_inv), ("b_scale_inv", b_scale_inv)):
        if t is not None:
            _checks.is_scalar(op, name, t, torch.float32)
            _checks.on_device(op, name, t, a.device, "a")


def _check_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor | None,
    b_scale_inv: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> None:
    op = "gemm"
    _check_operands(op, a, b, a_scale_inv, b_scale_inv)
    if out_dtype not in _checks.FLOATS:
        raise ValueError(f"{op}: out_dtype must be float32, bfloat16 or float16, got {out_dtype}")
    if bias is not None:
        _checks.is_tensor(op, "bias", bias)
        _checks.has_dtype(op, "bias", bias, _checks.FLOATS)
        _checks.has_shape(op, "bias", bias, (b.shape[1],), "[N]")
        _checks.on_device(op, "bias", bias, a.device, "a")


def _check_accumulate(
    acc: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor | None,
    b_scale_inv: torch.Tensor | None,
) -> None:
    op = "gemm_accumulate_"
    _check_operands(op, a, b, a_scale_inv, b_scale_inv)
    _checks.is_tensor(op, "acc", acc)
    _checks.has_dtype(op, "acc", acc, (torch.float32,))
    _checks.has_shape(op, "acc", acc, (a.shape[0], b.shape[1]), "[M, N]")
    _checks.on_device(op, "acc", acc, a.device, "a")
    _checks.is_writable(op, "acc", acc)


def _fake(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor | None,
    b_scale_inv: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


_library.define(
    "gemm",
    "(Tensor a, Tensor b, Tensor? a_scale_inv, Tensor? b_scale_inv, Tensor? bias, "
    "ScalarType out_dtype, bool fast_accum) -> Tensor",
    check=_check_gemm,
    reference=gemm_reference,
    fake=_fake,
)
_library.define(
    "gemm_accumulate_",
    "(Tensor(a!) acc, Tensor a, Tensor b, Tensor? a_scale_inv, Tensor? b_scale_inv) -> ()",
    check=_check_accumulate,
    reference=gemm_accumulate_reference_,
)


def _unpack(
    op: str, name: str, x: Operand, scale_inv: float | torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The data of an operand and the fp32 tensor that undoes its scale."""
    if isinstance(x, Quantized):
        if scale_inv is not None:
            raise ValueError(f"{op}: {name} is Quantized and brings its own {name}_scale_inv")
        return x.data, x.scale_inv
    _checks.is_tensor(op, name, x)
    return x, _checks.positive_scale(op, f"{name}_scale_inv", scale_inv, x.device)


def gemm(
    a: Operand,
    b: Operand,
    *,
    a_scale_inv: float | torch.Tensor | None = None,
    b_scale_inv: float | torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    fast_accum: bool = False,
) -> torch.Tensor:
    """Return (a @ b) * a_scale_inv * b_scale_inv + bias, [M, N] contiguous.

    a: [M, K], b: [K, N], any strides: both fp16, both bf16, or FP8 (E4M3 and E5M2 in any mix); a
    Quantized brings its scale_inv. a_scale_inv, b_scale_inv: fp32, one element (a number is
    accepted). bias: [N], fp32, bf16 or fp16. out_dtype: fp32, bf16 or fp16; None takes the
    operands' dtype, bf16 for FP8. Accumulation is FP32 and there is one rounding, at the end.
    fast_accum lets FP8 tensor cores keep their shorter accumulator; no effect on a CPU.
    K = 0 gives the bias or zeros. Raises ValueError naming the argument that does not fit.
    """
    a_data, a_inv = _unpack("gemm", "a", a, a_scale_inv)
    b_data, b_inv = _unpack("gemm", "b", b, b_scale_inv)
    hint = "use mixprec.functional.matmul or linear"
    _checks.needs_no_grad("gemm", hint, a_data, b_data, bias)
    if out_dtype is None:
        out_dtype = torch.bfloat16 if a_data.dtype in _checks.FP8 else a_data.dtype
    args = (a_data, b_data, a_inv, b_inv, bias, out_dtype, fast_accum)
    return _backends.call("gemm", a_data.device.type, *args)


def gemm_accumulate_(
    acc: torch.Tensor,
    a: Operand,
    b: Operand,
    *,
    a_scale_inv: float | torch.Tensor | None = None,
    b_scale_inv: float | torch.Tensor | None = None,
) -> None:
    """acc += (a @ b) * a_scale_inv * b_scale_inv in FP32, in place: weight gradients.

    acc: [M, N] fp32, any strides. a: [M, K], b: [K, N] as in `gemm`. K = 0 leaves acc unchanged.
    """
    op = "gemm_accumulate_"
    a_data, a_inv = _unpack(op, "a", a, a_scale_inv)
    b_data, b_inv = _unpack(op, "b", b, b_scale_inv)
    _checks.needs_no_grad(op, "use mixprec.functional.linear", acc, a_data, b_data)
    _backends.call(op, a_data.device.type, acc, a_data, b_data, a_inv, b_inv)
    _checks.mutated(acc)
