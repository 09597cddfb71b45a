"""The device side of gemm_grouped: which group a program works for, and its tile of the product.

Groups are found on the device, from offs: nothing is read on the host. Operands, scales and the
epilogue are those of gemm_kernel.
"""

import triton
import triton.language as tl

from .gemm_kernel import _by_column, _by_row, _load, _scales, _store, _tile
from .tiles import int64

CHUNK = tl.constexpr(128)  # of K, and of S: elements per block scale


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
    starts = _valid_ends(offs, 1, groups + 1, S, GROUPS)
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
def _product(a, b, lda, ldb, a_scale, b_scale, a_scale_m, a_scale_k, b_scale_n, b_scale_k, first_m,
             first_n, end_m, N, first_k, end_k, A: tl.constexpr, B: tl.constexpr,
             A_K_MAJOR: tl.constexpr, B_K_MAJOR: tl.constexpr, A_SCALE: tl.constexpr,
             B_SCALE: tl.constexpr, B_GROUP: tl.constexpr, PROMOTE: tl.constexpr,
             SOFT_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
             BLOCK_K: tl.constexpr):  # fmt: skip
    """A tile of a @ b over [first_k, end_k) of K, with the scales that change along K."""
    tl.static_assert(CHUNK % BLOCK_K == 0, "a block of K must not hold two block scales")
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(first_k, end_k, BLOCK_K):
        x = _load(a, lda, first_m, k, end_m, end_k, A, A_K_MAJOR, BLOCK_M, BLOCK_K, False,
                  SOFT_CAST)  # fmt: skip
        y = _load(b, ldb, first_n, k, N, end_k, B, B_K_MAJOR, BLOCK_N, BLOCK_K, False, SOFT_CAST)
        if PROMOTE:
            # The last argument also keeps the compiler from folding the sum into the dot.
            chunk = tl.dot(x, tl.trans(y), input_precision="ieee", max_num_imprecise_acc=BLOCK_K)
            if A_SCALE == "blocks":
                at = a_scale + int64(k // CHUNK) * a_scale_k
                chunk = _by_row(chunk, _scales(at, a_scale_m, first_m, end_m, 1, BLOCK_M))
            if B_SCALE == "blocks":
                at = b_scale + int64(k // CHUNK) * b_scale_k
                chunk = _by_column(chunk, _scales(at, b_scale_n, first_n, N, B_GROUP, BLOCK_N))
            acc += chunk
        else:
            acc = tl.dot(x, tl.trans(y), acc, input_precision="ieee")
    return acc


@triton.jit
def gemm_grouped_kernel(
    a,  # [S, K], or [M, S]
    b,  # [E, N, K], or [N, S]
    out,  # [S, N], or [E, M, N]
    offs,  # [E], contiguous
    a_scale,  # offset: e * a_scale_e + m * a_scale_m + (k // 128) * a_scale_k
    b_scale,
    groups,
    M,  # S where rows are grouped
    N,
    K,  # S where K is grouped
    lda,
    ldb,
    stride_b,  # between the groups of b
    out_e,
    out_m,
    out_n,
    a_scale_e,
    a_scale_m,
    a_scale_k,
    b_scale_e,
    b_scale_n,
    b_scale_k,
    BY_ROWS: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    OUT: tl.constexpr,
    A_K_MAJOR: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
    A_SCALE: tl.constexpr,  # as in gemm_kernel
    B_SCALE: tl.constexpr,
    B_GROUP: tl.constexpr,
    PROMOTE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    SOFT_CAST: tl.constexpr,
    SOFT_OUT: tl.constexpr,
    GROUPS: tl.constexpr,  # more than E, a power of two
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    if BY_ROWS:
        # As many tiles of rows as there can be: one more for each group that ends within a tile.
        rows = (M // BLOCK_M + groups + 1) * BLOCK_M
        tile, first_n = _tile(tl.program_id(0), rows, N, BLOCK_M, BLOCK_N, GROUP)
        group, first_m, end_m = _rows_of_tile(tile // BLOCK_M, offs, groups, M, BLOCK_M, GROUPS)
        first_k, end_k = 0, K
        if group == groups:  # rows beyond the last group: zeros
            end_k = 0
            group = 0
    else:
        tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
        group = tl.program_id(0) // tiles
        first_m, first_n = _tile(tl.program_id(0) % tiles, M, N, BLOCK_M, BLOCK_N, GROUP)
        end_m = M
        e = tl.arange(0, GROUPS)
        ends = _valid_ends(offs, 0, groups, K, GROUPS)
        first_k = tl.max(tl.where(e < group, ends, 0), 0)
        end_k = tl.max(tl.where(e <= group, ends, 0), 0)
    if first_m < end_m:
        b += int64(group) * stride_b
        out += int64(group) * out_e
        if A_SCALE != "none":
            a_scale += int64(group) * a_scale_e
        if B_SCALE != "none":
            b_scale += int64(group) * b_scale_e
        acc = _product(a, b, lda, ldb, a_scale, b_scale, a_scale_m, a_scale_k, b_scale_n,
                       b_scale_k, first_m, first_n, end_m, N, first_k, end_k, A, B, A_K_MAJOR,
                       B_K_MAJOR, A_SCALE, B_SCALE, B_GROUP, PROMOTE, SOFT_CAST, BLOCK_M, BLOCK_N,
                       BLOCK_K)  # fmt: skip
        _store(out, acc, None, a_scale, b_scale, first_m, first_n, end_m, N, out_m, out_n,
               a_scale_m, b_scale_n, A_SCALE, B_SCALE, 1, B_GROUP, None, OUT, ACCUMULATE, SOFT_OUT,
               BLOCK_M, BLOCK_N)  # fmt: skip
