"""gemm_grouped and gemm_grouped_accumulate_: the products of a mixture's experts in one call."""

from __future__ import annotations

import torch

from ._dispatch import checks, gemm_vendor
from ._dispatch.op import Op
from ._reference import gemm_scales
from ._reference.gemm_scales import Operands, by_rows, groups
from .gemm import plain_operand


def gemm_grouped_reference(
    operands: Operands, offs: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    out = _empty(operands, offs, out_dtype).zero_()
    for e, (part, group) in enumerate(groups(operands, offs)):
        out[part if by_rows(operands) else e] = gemm_scales.product(group).to(out_dtype)
    return out


def gemm_grouped_accumulate_reference_(
    acc: torch.Tensor, operands: Operands, offs: torch.Tensor
) -> None:
    for of_group, (_, group) in zip(acc.unbind(), groups(operands, offs), strict=True):
        of_group.add_(gemm_scales.product(group))


def _check_operands(op: str, operands: Operands, offs: torch.Tensor) -> None:
    a, b, *_ = operands
    gemm_scales.check_operands(op, a, b)
    checks.matches(op, "offs", offs, (torch.int32,), a, owner="a")
    if a.dim() != 2:
        raise ValueError(f"{op}: a must be [S, K] or [M, S], got shape {tuple(a.shape)}")
    if b.dim() not in (2, 3):
        raise ValueError(f"{op}: b must be [E, K, N] or [S, N], got shape {tuple(b.shape)}")
    grouped_rows = by_rows(operands)
    letter = "K" if grouped_rows else "S"
    if a.shape[1] != b.shape[-2]:
        raise ValueError(
            f"{op}: a and b must agree in {letter}, got a {tuple(a.shape)} and b {tuple(b.shape)}"
        )
    if offs.dim() != 1 or (grouped_rows and offs.shape[0] != b.shape[0]):
        e = f"E = {b.shape[0]} as in b [E, K, N]" if grouped_rows else "one end of each group"
        raise ValueError(f"{op}: offs must be [E], {e}, got shape {tuple(offs.shape)}")
    gemm_scales.check_scales(op, operands, offs)
    gemm_scales.check_offs(op, operands, offs)


def _check_grouped(operands: Operands, offs: torch.Tensor, out_dtype: torch.dtype) -> None:
    op = "gemm_grouped"
    _check_operands(op, operands, offs)
    checks.is_float(op, "out_dtype", out_dtype)


def _check_accumulate(acc: torch.Tensor, operands: Operands, offs: torch.Tensor) -> None:
    op, (a, b, *_) = "gemm_grouped_accumulate_", operands
    _check_operands(op, operands, offs)
    if by_rows(operands):
        raise ValueError(f"{op}: b must be [S, N], got shape {tuple(b.shape)}")
    shape = offs.shape[0], a.shape[0], b.shape[1]
    gemm_scales.check_acc(op, acc, shape, "[E, M, N]", a, **operands._asdict(), offs=offs)


def _empty(operands: Operands, offs: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    rows, n = operands.a.shape[0], operands.b.shape[-1]
    shape = (rows, n) if by_rows(operands) else (offs.shape[0], rows, n)
    return operands.a.new_empty(shape, dtype=out_dtype)


gemm_grouped_op = Op(
    "gemm_grouped",
    "(Tensor a, Tensor b, Tensor? a_scale_inv, Tensor? b_scale_inv, Tensor offs, "
    "ScalarType out_dtype, bool fast_accum) -> Tensor",
    reference=gemm_grouped_reference,
    fake=_empty,
    check=_check_grouped,
    triton="gemm_grouped",
    vendor=gemm_vendor.gemm_grouped_vendor,
    prefers=lambda args, capability: ("vendor", "triton", "reference"),  # nothing is measured
    refuses={"vendor": gemm_vendor.grouped_why_not},
    operands=("a", "b"),
)
gemm_grouped_accumulate_op = Op(
    "gemm_grouped_accumulate_",
    "(Tensor(a!) acc, Tensor a, Tensor b, Tensor? a_scale_inv, Tensor? b_scale_inv, Tensor offs) "
    "-> ()",
    reference=gemm_grouped_accumulate_reference_,
    check=_check_accumulate,
    triton="gemm_grouped",
    operands=("a", "b"),
)


def gemm_grouped(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    *,
    a_scale_inv: float | torch.Tensor | None = None,
    b_scale_inv: float | torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    fast_accum: bool = False,
) -> torch.Tensor:
    """Return the products of E groups, each as `gemm` defines it, in one call; contiguous.

    offs: int32 [E] on the device of a, the ends of the groups along S, ascending: group e is
    offs[e - 1] to offs[e], and the first begins at 0. Empty groups are allowed. As in
    torch.nn.functional.grouped_mm, the dimensions of b say what is grouped:

        rows  a [S, K], b [E, K, N] -> [S, N]     a[group e] @ b[e]; rows beyond offs[-1] are 0
        K     a [M, S], b [S, N] -> [E, M, N]     a[:, group e] @ b[group e]; 0 for an empty group

    a and b: both fp16, both bf16, or FP8 (E4M3 and E5M2 in any mix), any strides. Scales: fp32, any
    strides, one element (a number is accepted) or

        rows  a_scale_inv   [S, 1], [S, ceil(K/128)]
              b_scale_inv   [E, 1, 1], [E, 1, N], [E, ceil(K/128), N],
                            [E, ceil(K/128), ceil(N/128)]
        K     a_scale_inv   [E, 1, 1], [E, M, 1], [M, ceil(S/128)]
              b_scale_inv   [E, 1, 1], [E, 1, N], [ceil(S/128), N]

    Scales that change along S need groups that begin at multiples of 128. out_dtype, fast_accum,
    sums and roundings: as in `gemm`.

    Raises ValueError naming the invalid argument. On a GPU offs is not read on the host: an end
    below the one before, or beyond S, is replaced by the nearest valid one, and with scales that
    change along S a group that begins elsewhere has values that are not defined.
    """
    op = "gemm_grouped"
    a, a_inv = plain_operand(op, "a", a, a_scale_inv)
    b, b_inv = plain_operand(op, "b", b, b_scale_inv)
    hint = "use mixprec.functional.grouped_linear"
    checks.needs_no_grad(op, hint, a, b)
    if out_dtype is None:
        out_dtype = torch.bfloat16 if a.dtype in checks.FP8 else a.dtype
    return gemm_grouped_op(a, b, a_inv, b_inv, offs, out_dtype, fast_accum)


def gemm_grouped_accumulate_(
    acc: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    *,
    a_scale_inv: float | torch.Tensor | None = None,
    b_scale_inv: float | torch.Tensor | None = None,
) -> None:
    """acc[e] += a[:, group e] @ b[group e] * a_scale_inv * b_scale_inv in FP32, in place.

    The weight gradients of a mixture's experts. acc: fp32 [E, M, N], any strides, inside
    torch.autocast too. a [M, S], b [S, N], offs and the scales: as in `gemm_grouped`. An empty
    group leaves acc[e] unchanged. ValueError also if acc overlaps in memory with another argument.
    """
    op = "gemm_grouped_accumulate_"
    a, a_inv = plain_operand(op, "a", a, a_scale_inv)
    b, b_inv = plain_operand(op, "b", b, b_scale_inv)
    hint = "use mixprec.functional.grouped_linear"
    checks.needs_no_grad(op, hint, acc, a, b)
    gemm_grouped_accumulate_op(acc, a, b, a_inv, b_inv, offs)
