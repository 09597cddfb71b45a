"""The device side of gemm: tiles of a @ b in FP32, and the epilogue before a tile is stored.

Both operands are treated as [size, K] (b as its transpose [N, K]), with a stride of 1 along K
(K_MAJOR) or along the other dimension; the other stride is the leading dimension `ld`.
"""

import triton
import triton.language as tl

from .tiles import decode, encode, int64, operand

# Along K: elements per block scale, and per FP8 sum before it is promoted to FP32 registers.
CHUNK = tl.constexpr(128)


@triton.jit
def _tile(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
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
def _scales(scale, stride, first, size, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """The scales of rows first to first + BLOCK, one per GROUP rows; a scalar if they share one."""
    if GROUP % BLOCK == 0:
        return tl.load(scale + int64(first // GROUP) * stride)
    else:
        i = first + tl.arange(0, BLOCK)
        return tl.load(scale + (i // GROUP).to(tl.int64) * stride, mask=i < size, other=0.0)


@triton.jit
def _by_row(acc, scales):
    return acc * (scales[:, None] if len(scales.shape) == 1 else scales)


@triton.jit
def _by_column(acc, scales):
    return acc * (scales[None, :] if len(scales.shape) == 1 else scales)


@triton.jit
def _store_part(out, acc, bias, a_scale, b_scale, first_m, first_n, M, N, out_m, out_n, a_scale_m,
           b_scale_n, A_SCALE: tl.constexpr, B_SCALE: tl.constexpr, A_GROUP: tl.constexpr,
           B_GROUP: tl.constexpr, BIAS: tl.constexpr, OUT: tl.constexpr,
           ACCUMULATE: tl.constexpr, SOFT_OUT: tl.constexpr, BLOCK_M: tl.constexpr,
           BLOCK_N: tl.constexpr):  # fmt: skip
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    if A_SCALE == "scalar":
        acc = acc * tl.load(a_scale)
    elif A_SCALE == "rows":
        acc = _by_row(acc, _scales(a_scale, a_scale_m, first_m, M, A_GROUP, BLOCK_M))
    if B_SCALE == "scalar":
        acc = acc * tl.load(b_scale)
    elif B_SCALE == "rows":
        acc = _by_column(acc, _scales(b_scale, b_scale_n, first_n, N, B_GROUP, BLOCK_N))
    if bias is not None:
        addend = tl.load(bias + n, mask=n < N, other=0)
        if SOFT_OUT:
            addend = decode(addend, BIAS, True)
        acc = acc + addend.to(tl.float32)[None, :]
    at = out + m.to(tl.int64)[:, None] * out_m + n.to(tl.int64)[None, :] * out_n
    inside = (m < M)[:, None] & (n < N)[None, :]
    if ACCUMULATE:
        acc = tl.load(at, mask=inside, other=0.0) + acc
    if SOFT_OUT:
        tl.store(at, encode(acc, acc, OUT, True), mask=inside)
    else:
        tl.store(at, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _store(out, acc, bias, a_scale, b_scale, first_m, first_n, M, N, out_m, out_n, a_scale_m,
           b_scale_n, A_SCALE: tl.constexpr, B_SCALE: tl.constexpr, A_GROUP: tl.constexpr,
           B_GROUP: tl.constexpr, BIAS: tl.constexpr, OUT: tl.constexpr,
           ACCUMULATE: tl.constexpr, SOFT_OUT: tl.constexpr, BLOCK_M: tl.constexpr,
           BLOCK_N: tl.constexpr):  # fmt: skip
    """out <- acc * a_scale * b_scale + bias, rounded once; or out += it.

    A wide tile is stored in two halves: the operands of the epilogue of a whole one do not fit
    into registers.
    """
    if BLOCK_N > 128:
        HALF: tl.constexpr = BLOCK_N // 2
        halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, HALF)), (0, 2, 1))
        left, right = tl.split(halves)
        _store_part(out, left, bias, a_scale, b_scale, first_m, first_n, M, N, out_m, out_n,
                    a_scale_m, b_scale_n, A_SCALE, B_SCALE, A_GROUP, B_GROUP, BIAS, OUT, ACCUMULATE,
                    SOFT_OUT, BLOCK_M, HALF)  # fmt: skip
        _store_part(out, right, bias, a_scale, b_scale, first_m, first_n + HALF, M, N, out_m, out_n,
                    a_scale_m, b_scale_n, A_SCALE, B_SCALE, A_GROUP, B_GROUP, BIAS, OUT, ACCUMULATE,
                    SOFT_OUT, BLOCK_M, HALF)  # fmt: skip
    else:
        _store_part(out, acc, bias, a_scale, b_scale, first_m, first_n, M, N, out_m, out_n,
                    a_scale_m, b_scale_n, A_SCALE, B_SCALE, A_GROUP, B_GROUP, BIAS, OUT, ACCUMULATE,
                    SOFT_OUT, BLOCK_M, BLOCK_N)  # fmt: skip


@triton.jit(do_not_specialize=("split_k",))
def gemm_kernel(
    a,  # [M, K], or its TMA descriptor
    b,  # [N, K], likewise
    out,  # [M, N]; fp32 [split_k, M, N] where SPLIT
    bias,  # [N] or None
    a_scale,  # offset: (m // A_GROUP) * a_scale_m + (k // 128) * a_scale_k
    b_scale,
    M,
    N,
    K,
    lda,
    ldb,
    out_m,
    out_n,
    a_scale_m,
    a_scale_k,
    b_scale_n,
    b_scale_k,
    split_k,
    A: tl.constexpr,
    B: tl.constexpr,
    BIAS: tl.constexpr,
    OUT: tl.constexpr,
    A_K_MAJOR: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
    A_SCALE: tl.constexpr,  # "none", "scalar", "rows" (at the end) or "blocks" (along K)
    B_SCALE: tl.constexpr,
    A_GROUP: tl.constexpr,  # 1 or 128
    B_GROUP: tl.constexpr,
    PROMOTE: tl.constexpr,  # add every dot to acc in FP32 registers
    ACCUMULATE: tl.constexpr,
    SPLIT: tl.constexpr,  # along K; reduce_kernel applies the epilogue
    SOFT_CAST: tl.constexpr,
    SOFT_OUT: tl.constexpr,
    TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tl.static_assert(CHUNK % BLOCK_K == 0, "a block of K must not hold two block scales")
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
        first_m, first_n = _tile(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(first_k, last_k, BLOCK_K):
            x = _load(a, lda, first_m, k, M, K, A, A_K_MAJOR, BLOCK_M, BLOCK_K, TMA, SOFT_CAST)
            y = _load(b, ldb, first_n, k, N, K, B, B_K_MAJOR, BLOCK_N, BLOCK_K, TMA, SOFT_CAST)
            if PROMOTE:
                # The last argument also keeps the compiler from folding the sum into the dot.
                chunk = tl.dot(x, tl.trans(y), input_precision="ieee",
                               max_num_imprecise_acc=BLOCK_K)  # fmt: skip
                if A_SCALE == "blocks":
                    at = a_scale + int64(k // CHUNK) * a_scale_k
                    chunk = _by_row(chunk, _scales(at, a_scale_m, first_m, M, A_GROUP, BLOCK_M))
                if B_SCALE == "blocks":
                    at = b_scale + int64(k // CHUNK) * b_scale_k
                    chunk = _by_column(chunk, _scales(at, b_scale_n, first_n, N, B_GROUP, BLOCK_N))
                acc += chunk
            else:
                acc = tl.dot(x, tl.trans(y), acc, input_precision="ieee")
        if SPLIT:
            part = out + int64(index % split_k) * M * N
            _store(part, acc, None, None, None, first_m, first_n, M, N, N, 1, 0, 0, "none", "none",
                   1, 1, None, "fp32", False, False, BLOCK_M, BLOCK_N)  # fmt: skip
        else:
            _store(out, acc, bias, a_scale, b_scale, first_m, first_n, M, N, out_m, out_n,
                   a_scale_m, b_scale_n, A_SCALE, B_SCALE, A_GROUP, B_GROUP, BIAS, OUT, ACCUMULATE,
                   SOFT_OUT, BLOCK_M, BLOCK_N)  # fmt: skip


@triton.jit(do_not_specialize=("split_k",))
def reduce_kernel(
    parts,  # fp32 [split_k, M, N]
    out,
    bias,
    a_scale,
    b_scale,
    M,
    N,
    out_m,
    out_n,
    a_scale_m,
    b_scale_n,
    split_k,
    BIAS: tl.constexpr,
    OUT: tl.constexpr,
    A_SCALE: tl.constexpr,
    B_SCALE: tl.constexpr,
    A_GROUP: tl.constexpr,
    B_GROUP: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    SOFT_OUT: tl.constexpr,
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
    _store(out, acc, bias, a_scale, b_scale, first_m, first_n, M, N, out_m, out_n, a_scale_m,
           b_scale_n, A_SCALE, B_SCALE, A_GROUP, B_GROUP, BIAS, OUT, ACCUMULATE, SOFT_OUT, BLOCK_M,
           BLOCK_N)  # fmt: skip
