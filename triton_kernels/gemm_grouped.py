"""gemm_grouped and gemm_grouped_accumulate_: one launch for all groups, which are found on the
device, from offs: nothing is read on the host. Operands, scales and the epilogue are those of
gemm_kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import gemm as products
from .gemm_kernel import store_product, sum_products, tile_at
from .launch import FORMATS, codes, on
from .tiles import int64


@triton.jit
def _maximum(x, y):
    return tl.maximum(x, y)


@triton.jit
def _valid_ends(offs, before, groups, S, GROUPS: tl.constexpr):
    """Of groups -before to GROUPS - before, in ascending order and from 0 to S whatever offs holds;
    beyond the last group its end."""
    e = tl.arange(0, GROUPS) - before
    ends = tl.load(offs + e, mask=(e >= 0) & (e < groups), other=0)
    return tl.associative_scan(tl.minimum(tl.maximum(ends, 0), S), 0, _maximum)


@triton.jit
def _rows_of_tile(tile, offs, groups, S, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr):
    """The group of a tile of rows, its first row, and the end of the group; the group is `groups`
    for rows beyond all of them."""
    starts = _valid_ends(offs, 1, groups, S, GROUPS)
    ends = _valid_ends(offs, 0, groups, S, GROUPS)
    # One more group holds the rows beyond the last.
    index = tl.arange(0, GROUPS)
    ends = tl.where(index == groups, S, ends)
    tiles = tl.where(index <= groups, tl.cdiv(ends - starts, BLOCK_M), 0)
    after = tl.cumsum(tiles, 0)
    mine = (after - tiles <= tile) & (tile < after)
    group = tl.sum(tl.where(mine, index, 0), 0)
    first = tl.sum(tl.where(mine, starts + (tile - after + tiles) * BLOCK_M, 0), 0)
    return group, first, tl.sum(tl.where(mine, ends, 0), 0)


@triton.jit
def gemm_grouped_kernel(
    a,  # [S, K], or [M, S]
    b,  # [E, N, K], or [N, S]
    out,  # an Output: [S, N], or the first of [E, M, N]
    offs,  # [E], contiguous
    a_scale,  # a Scale
    b_scale,
    groups,
    M,  # S where rows are grouped
    N,
    K,  # S where K is grouped
    lda,
    ldb,
    stride_b,  # between the groups of b
    out_e,
    BY_ROWS: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    A_K_MAJOR: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
    PROMOTE: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    GROUPS: tl.constexpr,  # more than E, a power of two
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    if BY_ROWS:
        # As many tiles of rows as there can be: one more for each group that ends within a tile.
        rows = (M // BLOCK_M + groups + 1) * BLOCK_M
        tile, first_n = tile_at(tl.program_id(0), rows, N, BLOCK_M, BLOCK_N, GROUP)
        group, first_m, end_m = _rows_of_tile(tile // BLOCK_M, offs, groups, M, BLOCK_M, GROUPS)
        first_k, end_k = 0, K
        if group == groups:  # rows beyond the last group: zeros
            end_k = 0
            group = 0
    else:
        tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
        group = tl.program_id(0) // tiles
        first_m, first_n = tile_at(tl.program_id(0) % tiles, M, N, BLOCK_M, BLOCK_N, GROUP)
        end_m = M
        e = tl.arange(0, GROUPS)
        ends = _valid_ends(offs, 0, groups, K, GROUPS)
        first_k = tl.max(tl.where(e < group, ends, 0), 0)
        end_k = tl.max(tl.where(e <= group, ends, 0), 0)
    if first_m < end_m:
        b += int64(group) * stride_b
        CODES: tl.constexpr = a.dtype.element_ty.primitive_bitwidth == 8
        if (CODES and not BY_ROWS) and (A_K_MAJOR and B_K_MAJOR):
            # The compiler has to see that groups which layers set apart are whole lines of 16.
            if (first_k | end_k) % 16 == 0:
                last_k = end_k // 16 * 16
                acc = sum_products(a, b, lda, ldb, a_scale, b_scale, group, first_m, first_n, end_m,
                                   N, first_k // 16 * 16, last_k, last_k, A, B, True, True, PROMOTE,
                                   False, SOFT_CAST, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip
            else:
                acc = sum_products(a, b, lda, ldb, a_scale, b_scale, group, first_m, first_n, end_m,
                                   N, first_k, end_k, end_k, A, B, True, True, PROMOTE, False,
                                   SOFT_CAST, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip
        else:
            acc = sum_products(a, b, lda, ldb, a_scale, b_scale, group, first_m, first_n, end_m, N,
                               first_k, end_k, end_k, A, B, A_K_MAJOR, B_K_MAJOR, PROMOTE, False,
                               SOFT_CAST, BLOCK_M, BLOCK_N, BLOCK_K)  # fmt: skip
        store_product(out, int64(group) * out_e, acc, a_scale, b_scale, group, first_m, first_n,
                      end_m, N, True, BLOCK_M, BLOCK_N)  # fmt: skip


def _scale(scale_inv: torch.Tensor | None, size: int) -> products.Scale:
    """scale_inv of an operand [size, K]: one element, [size, c], or [E, r, c] with one entry for
    each group."""
    if scale_inv is None or scale_inv.dim() < 3 or scale_inv.numel() == 1:
        return products.scale_of(scale_inv, size)._replace(stride_e=0)
    stride = scale_inv.stride(0)
    return products.scale_of(scale_inv[0], size)._replace(x=scale_inv, stride_e=stride)


def _launch(op: str, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
            a_scale_inv: torch.Tensor | None, b_scale_inv: torch.Tensor | None, offs: torch.Tensor,
            fast_accum: bool) -> None:  # fmt: skip
    """out <- the products of all groups, or out += them; out and offs are not empty."""
    by_rows, groups = b.dim() == 3, offs.shape[0]
    if by_rows and 1 not in b.stride()[1:]:
        b = b.contiguous()
    left, right = products.operand_of(a), products.operand_of(b[0].t() if by_rows else b.t())
    M, N, K = left.size, right.size, left.K
    if b_scale_inv is not None and b_scale_inv.dim() > 1:
        b_scale_inv = b_scale_inv.transpose(-1, -2)
    scales = _scale(a_scale_inv, M), _scale(b_scale_inv, N)
    # The tile for a group of the mean size.
    mean = triton.cdiv(M if by_rows else K, groups)
    config, capability, _, soft, promote = products.loop_of(
        a, b, scales, fast_accum, mean if by_rows else M, N, K if by_rows else mean
    )
    # mma.sync keeps operands in registers: with the masks of groups, a warp for 1024 elements.
    least = min(8, config.block_m * config.block_n // 1024) if capability < 90 else 1
    rows = M // config.block_m + groups + 1 if by_rows else triton.cdiv(M, config.block_m) * groups
    x, y = left.x, b if by_rows else right.x
    if soft:
        x, y = codes(x), codes(y)
    constants = products.constants(config)
    with on(a):
        gemm_grouped_kernel[(rows * triton.cdiv(N, config.block_n),)](
            x, y, products.output_of(out, op == "gemm_grouped_accumulate_"), offs.contiguous(),
            *scales, groups, M, N, K, left.ld, right.ld, b.stride(0) if by_rows else 0,
            0 if by_rows else out.stride(0), BY_ROWS=by_rows, A=FORMATS[a.dtype],
            B=FORMATS[b.dtype], A_K_MAJOR=left.k_major, B_K_MAJOR=right.k_major, PROMOTE=promote,
            SOFT_CAST=soft, GROUPS=triton.next_power_of_2(groups + 1),
            **constants | {"num_warps": max(config.warps, least)},
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
