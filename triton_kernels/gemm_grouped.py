"""gemm_grouped and gemm_grouped_accumulate_: the host side, from tensors to one launch."""

from __future__ import annotations

import torch
import triton

from . import gemm as products
from .configs import family
from .gemm_grouped_kernel import gemm_grouped_kernel
from .launch import FORMATS, INTERPRETED, codes, on, soft_cast


def _scale(scale_inv: torch.Tensor | None, size: int) -> tuple[products.Scale, int]:
    """scale_inv of an operand [size, K], and its stride between groups: one element, [size, c], or
    [E, r, c] with one entry for each group."""
    if scale_inv is None or scale_inv.dim() < 3 or scale_inv.numel() == 1:
        return products._scale(scale_inv, size), 0
    stride, rows, columns = scale_inv.stride(0), *scale_inv.shape[1:]
    if rows == columns == 1:
        return products.Scale(scale_inv, "scalar", 1, 0, 0), stride
    return products._scale(scale_inv[0], size), stride


def _launch(op: str, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
            a_scale_inv: torch.Tensor | None, b_scale_inv: torch.Tensor | None, offs: torch.Tensor,
            fast_accum: bool) -> None:  # fmt: skip
    """out <- the products of all groups, or out += them; out and offs are not empty."""
    by_rows, groups = b.dim() == 3, offs.shape[0]
    if by_rows and 1 not in b.stride()[1:]:
        b = b.contiguous()
    left, right = products._operand(a), products._operand(b[0].t() if by_rows else b.t())
    M, N, K = left.size, right.size, left.K
    if b_scale_inv is not None and b_scale_inv.dim() > 1:
        b_scale_inv = b_scale_inv.transpose(-1, -2)
    (sa, a_scale_e), (sb, b_scale_e) = _scale(a_scale_inv, M), _scale(b_scale_inv, N)
    capability, multiprocessors = products._gpu(a.device)
    fp8, blocks = a.element_size() == 1, "blocks" in (sa.mode, sb.mode)
    soft = soft_cast(a.device, a.dtype, b.dtype)
    # The tile for a group of the mean size.
    mean = triton.cdiv(M if by_rows else K, groups)
    config = products.pick(capability, family(fp8, soft and fp8, blocks, fast_accum),
                           mean if by_rows else M, N, K if by_rows else mean, a.element_size(),
                           multiprocessors)  # fmt: skip
    # mma.sync keeps operands in registers: with the masks of groups, a warp for 1024 elements.
    least = min(8, config.block_m * config.block_n // 1024) if capability < 90 else 1
    rows = M // config.block_m + groups + 1 if by_rows else triton.cdiv(M, config.block_m) * groups
    x, y, target = left.x, b if by_rows else right.x, out
    if soft:
        x, y = codes(x), codes(y)
    if INTERPRETED:
        target = codes(out)
    with on(a):
        gemm_grouped_kernel[(rows * triton.cdiv(N, config.block_n),)](
            x, y, target, offs.contiguous(), sa.x, sb.x, groups, M, N, K, left.ld, right.ld,
            b.stride(0) if by_rows else 0, 0 if by_rows else out.stride(0), *out.stride()[-2:],
            a_scale_e, sa.stride, sa.stride_k, b_scale_e, sb.stride, sb.stride_k, BY_ROWS=by_rows,
            A=FORMATS[a.dtype], B=FORMATS[b.dtype], OUT=FORMATS[out.dtype],
            A_K_MAJOR=left.k_major, B_K_MAJOR=right.k_major, A_SCALE=sa.mode, B_SCALE=sb.mode,
            B_GROUP=sb.group, PROMOTE=blocks or (fp8 and not (soft or fast_accum)),
            ACCUMULATE=op == "gemm_grouped_accumulate_", SOFT_CAST=soft, SOFT_OUT=INTERPRETED,
            GROUPS=triton.next_power_of_2(groups + 1), GROUP=config.group, BLOCK_M=config.block_m,
            BLOCK_N=config.block_n, BLOCK_K=config.block_k, num_warps=max(config.warps, least),
            num_stages=config.stages,
        )  # fmt: skip


def gemm_grouped(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor | None,
    b_scale_inv: torch.Tensor | None,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    rows, n = a.shape[0], b.shape[-1]
    shape = (rows, n) if b.dim() == 3 else (offs.shape[0], rows, n)
    out = torch.empty(shape, dtype=out_dtype, device=a.device)
    if out.numel() == 0:
        return out
    if offs.shape[0] == 0 or a.shape[1] == 0:
        return out.zero_()
    _launch("gemm_grouped", out, a, b, a_scale_inv, b_scale_inv, offs, fast_accum)
    return out


def gemm_grouped_accumulate_(
    acc: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor | None,
    b_scale_inv: torch.Tensor | None,
    offs: torch.Tensor,
) -> None:
    if acc.numel() and a.shape[1]:
        _launch("gemm_grouped_accumulate_", acc, a, b, a_scale_inv, b_scale_inv, offs, False)
