"""The device side of gemm: tiles of a @ b in FP32, and the epilogue before a tile is stored.

Both operands are treated as [size, K] (b as its transpose [N, K]), with a stride of 1 along K
(K_MAJOR) or along the other dimension; the other stride is the leading dimension `ld`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .tiles import decode, encode, int64, operand

# Along K: elements per block scale, and per FP8 sum before it is promoted to FP32 registers.
CHUNK = tl.constexpr(128)


class Scale(NamedTuple):
    """scale_inv of an operand [size, K], as an argument of a kernel."""

    x: Any  # offset: e * stride_e + (row // GROUP) * stride + (k // 128) * stride_k
    MODE: Any  # constexpr: "none", "scalar", "rows" (at the end) or "blocks" (along K)
    GROUP: Any = tl.constexpr(1)  # or 128
    stride: Any = 0
    stride_k: Any = 0
    stride_e: Any = None  # between the groups of a grouped product


class Output(NamedTuple):
    """[M, N], likewise. SOFT: casts are not by the GPU's instructions."""

    x: Any
    stride_m: Any
    stride_n: Any
    bias: Any  # [N] or None
    FORMAT: Any  # constexpr, as all that is in capitals
    ACCUMULATE: Any
    SOFT: Any
    BIAS: Any


@triton.jit
def tile_at(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """First row and column of a tile. Tiles are ordered in groups of GROUP tile rows, column by
    column, so that tiles computed at the same time share operands in L2."""
    rows, columns = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = tile // (GROUP * columns) * GROUP
    height = min(rows - first, GROUP)
    inside = tile % (GROUP * columns)
    return (first + inside % height) * BLOCK_M, (inside // height) * BLOCK_N


@triton.jit
def _load(x, ld, first, k, size, K, FORMAT: tl.constexpr, K_MAJOR: tl.constexpr,
          BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
          SOFT_CAST: tl.constexpr):  # fmt: skip
    """x[first : first + BLOCK, k : k + BLOCK_K] of an operand, zero outside it."""
    if TMA:
        block = x.load([first, k]) if K_MAJOR else tl.trans(x.load([k, first]))
    else:
        i, j = first + tl.arange(0, BLOCK), k + tl.arange(0, BLOCK_K)
        if K_MAJOR:
            offsets = i.to(tl.int64)[:, None] * ld + j[None, :]
        else:
            offsets = i[:, None] + j.to(tl.int64)[None, :] * ld
        block = tl.load(x + offsets, mask=(i < size)[:, None] & (j < K)[None, :], other=0.0)
    return operand(block, FORMAT, SOFT_CAST)


@triton.jit
def _scaled(acc, scale, e, chunk, first, size, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """acc times the scales of its rows (DIM 0) or columns (DIM 1), which begin at `first`, for a
    chunk of K and a group e."""
    at = scale.x + int64(chunk) * scale.stride_k
    if scale.stride_e is not None:
        at += int64(e) * scale.stride_e
    if scale.MODE == "scalar":
        return acc * tl.load(at)
    elif scale.GROUP % BLOCK == 0:  # all share one
        return acc * tl.load(at + int64(first // scale.GROUP) * scale.stride)
    else:
        i = first + tl.arange(0, BLOCK)
        at += (i // scale.GROUP).to(tl.int64) * scale.stride
        return acc * tl.expand_dims(tl.load(at, mask=i < size, other=0.0), 1 - DIM)


@triton.jit
def sum_products(a, b, lda, ldb, a_scale, b_scale, e, first_m, first_n, end_m, N, first_k, last_k,
                 end_k, A: tl.constexpr, B: tl.constexpr, A_K_MAJOR: tl.constexpr,
                 B_K_MAJOR: tl.constexpr, PROMOTE: tl.constexpr, TMA: tl.constexpr,
                 SOFT_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                 BLOCK_K: tl.constexpr):  # fmt: skip
    """A tile of a @ b over [first_k, last_k) of K, which ends at end_k, with the scales that change
    along K."""
    tl.static_assert(CHUNK % BLOCK_K == 0, "a block of K must not hold two block scales")
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(first_k, last_k, BLOCK_K):
        x = _load(a, lda, first_m, k, end_m, end_k, A, A_K_MAJOR, BLOCK_M, BLOCK_K, TMA, SOFT_CAST)
        y = _load(b, ldb, first_n, k, N, end_k, B, B_K_MAJOR, BLOCK_N, BLOCK_K, TMA, SOFT_CAST)
        if PROMOTE:
            # The last argument also keeps the compiler from folding the sum into the dot.
            chunk = tl.dot(x, tl.trans(y), input_precision="ieee", max_num_imprecise_acc=BLOCK_K)
            if a_scale.MODE == "blocks":
                chunk = _scaled(chunk, a_scale, e, k // CHUNK, first_m, end_m, BLOCK_M, 0)
            if b_scale.MODE == "blocks":
                chunk = _scaled(chunk, b_scale, e, k // CHUNK, first_n, N, BLOCK_N, 1)
            acc += chunk
        else:
            acc = tl.dot(x, tl.trans(y), acc, input_precision="ieee")
    return acc


@triton.jit
def _store_part(out, start, acc, a_scale, b_scale, e, first_m, first_n, M, N,
                FINISH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    if FINISH:
        if a_scale.MODE == "scalar" or a_scale.MODE == "rows":
            acc = _scaled(acc, a_scale, e, 0, first_m, M, BLOCK_M, 0)
        if b_scale.MODE == "scalar" or b_scale.MODE == "rows":
            acc = _scaled(acc, b_scale, e, 0, first_n, N, BLOCK_N, 1)
        if out.bias is not None:
            addend = tl.load(out.bias + n, mask=n < N, other=0)
            if out.SOFT:
                addend = decode(addend, out.BIAS, True)
            acc = acc + addend.to(tl.float32)[None, :]
    at = out.x
    if start is not None:
        at += start
    at = at + m.to(tl.int64)[:, None] * out.stride_m + n.to(tl.int64)[None, :] * out.stride_n
    inside = (m < M)[:, None] & (n < N)[None, :]
    if out.ACCUMULATE:
        acc = tl.load(at, mask=inside, other=0.0) + acc
    if out.SOFT:
        tl.store(at, encode(acc, acc, out.FORMAT, True), mask=inside)
    else:
        tl.store(at, acc.to(out.x.dtype.element_ty), mask=inside)


@triton.jit
def store_product(out, start, acc, a_scale, b_scale, e, first_m, first_n, M, N,
                  FINISH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """out <- acc * a_scale * b_scale + bias, rounded once; or out += it; without FINISH acc.
    start: what is added to the offsets of out, or None.

    A wide tile is stored in two halves: the operands of the epilogue of a whole one do not fit
    into registers.
    """
    if BLOCK_N > 128:
        HALF: tl.constexpr = BLOCK_N // 2
        halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, HALF)), (0, 2, 1))
        left, right = tl.split(halves)
        _store_part(out, start, left, a_scale, b_scale, e, first_m, first_n, M, N, FINISH,
                    BLOCK_M, HALF)  # fmt: skip
        _store_part(out, start, right, a_scale, b_scale, e, first_m, first_n + HALF, M, N, FINISH,
                    BLOCK_M, HALF)  # fmt: skip
    else:
        _store_part(out, start, acc, a_scale, b_scale, e, first_m, first_n, M, N, FINISH, BLOCK_M,
                    BLOCK_N)  # fmt: skip


@triton.jit(do_not_specialize=("split_k",))
def gemm_kernel(
    a,  # [M, K], or its TMA descriptor
    b,  # [N, K], likewise
    out,  # an Output; fp32 [split_k, M, N], of which it has the first, where SPLIT
    a_scale,  # a Scale
    b_scale,
    M,
    N,
    K,
    lda,
    ldb,
    split_k,
    A: tl.constexpr,
    B: tl.constexpr,
    A_K_MAJOR: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
    PROMOTE: tl.constexpr,  # add every dot to acc in FP32 registers
    SPLIT: tl.constexpr,  # along K; reduce_kernel applies the epilogue
    SOFT_CAST: tl.constexpr,
    TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    first_k, last_k = 0, K
    if SPLIT:
        part_k = tl.cdiv(tl.cdiv(K, CHUNK), split_k) * CHUNK
        tiles = tiles * split_k
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        tile = index
        if SPLIT:
            tile = index // split_k
            first_k = index % split_k * part_k
            last_k = min(first_k + part_k, K)
        first_m, first_n = tile_at(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        acc = sum_products(a, b, lda, ldb, a_scale, b_scale, 0, first_m, first_n, M, N, first_k,
                           last_k, K, A, B, A_K_MAJOR, B_K_MAJOR, PROMOTE, TMA, SOFT_CAST, BLOCK_M,
                           BLOCK_N, BLOCK_K)  # fmt: skip
        if SPLIT:
            part = int64(index % split_k) * M * N
            store_product(out, part, acc, a_scale, b_scale, 0, first_m, first_n, M, N, False,
                          BLOCK_M, BLOCK_N)  # fmt: skip
        else:
            store_product(out, None, acc, a_scale, b_scale, 0, first_m, first_n, M, N, True,
                          BLOCK_M, BLOCK_N)  # fmt: skip


@triton.jit(do_not_specialize=("split_k",))
def reduce_kernel(
    parts,  # fp32 [split_k, M, N]
    out,
    a_scale,
    b_scale,
    M,
    N,
    split_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds the parts in a fixed order and applies the epilogue."""
    columns = tl.cdiv(N, BLOCK_N)
    first_m = tl.program_id(0) // columns * BLOCK_M
    first_n = tl.program_id(0) % columns * BLOCK_N
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    at = parts + m.to(tl.int64)[:, None] * N + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for part in range(split_k):
        acc += tl.load(at + int64(part) * M * N, mask=inside, other=0.0)
    store_product(out, None, acc, a_scale, b_scale, 0, first_m, first_n, M, N, True, BLOCK_M,
                  BLOCK_N)  # fmt: skip
