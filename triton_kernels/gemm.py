"""gemm and gemm_accumulate_: the host side, from tensors to one launch (two where K is split)."""

from __future__ import annotations

from dataclasses import MISSING, fields
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from .configs import Config, family, pick, split_k
from .gemm_kernel import Output, Scale, gemm_kernel, reduce_kernel
from .launch import FORMATS, INTERPRETED, codes, format_of, on, soft_cast

REDUCE_M, REDUCE_N = 16, 128  # elements per program of the reduction over parts


class Operand(NamedTuple):
    """[size, K] with a stride of 1 along K (k_major) or along the other, and `ld` between."""

    x: torch.Tensor
    size: int
    K: int
    ld: int
    k_major: bool


@cache
def _gpu(device: torch.device) -> tuple[int, int]:
    """Compute capability and number of multiprocessors; without a GPU, one multiprocessor."""
    if device.type != "cuda":
        return 0 if INTERPRETED else driver.active.get_current_target().arch, 1
    found = torch.cuda.get_device_properties(device)
    # Other vendors number their GPUs differently: they get the most conservative tiles.
    capability = 10 * found.major + found.minor if torch.version.hip is None else 80
    return capability, found.multi_processor_count


def operand_of(x: torch.Tensor) -> Operand:
    """x [size, K], without a copy if one of its strides is 1; a dimension of 1 has any stride."""
    size, K = x.shape
    along, across = x.stride(1), x.stride(0)
    if along == 1 or K == 1:
        return Operand(x, size, K, across, True)
    if across == 1 or size == 1:
        return Operand(x, size, K, along, False)
    return Operand(x.contiguous(), size, K, K, True)


def _fits_tma(x: Operand) -> bool:
    """TMA: 16-byte aligned base and leading dimension, rows that do not overlap, 32-bit sizes."""
    inner, outer = (x.K, x.size) if x.k_major else (x.size, x.K)
    width = x.x.element_size()
    return (
        x.ld * width % 16 == 0
        and x.x.data_ptr() % 16 == 0
        and inner <= x.ld < 2**40 // width
        and max(inner, outer) < 2**31
    )


# Triton's checks of a descriptor take longer than the rest of a call; _fits_tma replaces them.
_DEFAULTS = {f.name: f.default for f in fields(TensorDescriptor) if f.default is not MISSING}


def _descriptor(x: Operand, block: int, block_k: int) -> TensorDescriptor:
    descriptor = object.__new__(TensorDescriptor)
    shape, tile = ([x.size, x.K], [block, block_k])
    if not x.k_major:
        shape, tile = shape[::-1], tile[::-1]
    descriptor.__dict__.update(
        _DEFAULTS, base=x.x, shape=shape, strides=[x.ld, 1], block_shape=tile
    )
    return descriptor


_constexpr = lru_cache(maxsize=None, typed=True)(tl.constexpr)  # 1 is not True


def scale_of(scale_inv: torch.Tensor | None, size: int) -> Scale:
    """scale_inv of an operand [size, K]: one element, or [r, c] as documented for gemm."""
    if scale_inv is None:
        return Scale(None, _constexpr("none"))
    if scale_inv.numel() == 1:
        return Scale(scale_inv, _constexpr("scalar"))
    rows, chunks = scale_inv.shape
    mode = _constexpr("rows" if chunks == 1 else "blocks")
    return Scale(scale_inv, mode, _constexpr(1 if rows == size else 128), *scale_inv.stride())


def output_of(out: torch.Tensor, accumulate: bool, bias: torch.Tensor | None = None) -> Output:
    how = map(_constexpr, (FORMATS[out.dtype], accumulate, INTERPRETED, format_of(bias)))
    if INTERPRETED:
        out, bias = codes(out), None if bias is None else codes(bias)
    return Output(out, *out.stride()[-2:], bias, *how)


class Loop(NamedTuple):
    """How a product is computed: the tile, and what follows from the dtypes and scales."""

    config: Config
    capability: int
    multiprocessors: int
    soft: bool  # operands are decoded
    promote: bool  # sums of FP8, or with scales along K, are added in FP32 registers


def loop_of(a: torch.Tensor, b: torch.Tensor, scales: tuple[Scale, Scale], fast_accum: bool,
            M: int, N: int, K: int) -> Loop:  # fmt: skip
    """For a product [M, K] @ [K, N] of the dtypes of a and b."""
    capability, multiprocessors = _gpu(a.device)
    fp8, blocks = a.element_size() == 1, any(s.MODE.value == "blocks" for s in scales)
    soft = soft_cast(a.device, a.dtype, b.dtype)
    kind = family(fp8, soft and fp8, blocks, fast_accum)
    config = pick(capability, kind, M, N, K, a.element_size(), multiprocessors)
    promote = blocks or (fp8 and not (soft or fast_accum))
    return Loop(config, capability, multiprocessors, soft, promote)


def _launch(op: str, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
            a_scale_inv: torch.Tensor | None, b_scale_inv: torch.Tensor | None,
            bias: torch.Tensor | None, fast_accum: bool) -> None:  # fmt: skip
    """out <- a @ b with the epilogue, or out += it; M, N and K are not 0."""
    left, right = operand_of(a), operand_of(b.t())
    M, N, K = left.size, right.size, left.K
    if any(0 < 2**31 - size < 512 for size in (M, N, K)):  # the end of the last tile is beyond it
        raise ValueError(f"{op}: M, N and K must not be within 512 below 2^31, got {(M, N, K)}")
    if b_scale_inv is not None and b_scale_inv.dim() == 2:
        b_scale_inv = b_scale_inv.t()
    scales = scale_of(a_scale_inv, M), scale_of(b_scale_inv, N)
    config, _, multiprocessors, soft, promote = loop_of(a, b, scales, fast_accum, M, N, K)
    parts = split_k(config, M, N, K, multiprocessors)
    tiles = -(-M // config.block_m) * -(-N // config.block_n) * parts
    use_tma = config.tma and _fits_tma(left) and _fits_tma(right)
    if soft:
        left, right = left._replace(x=codes(left.x)), right._replace(x=codes(right.x))
    x: Any = left.x
    y: Any = right.x
    if use_tma:
        x = _descriptor(left, config.block_m, config.block_k)
        y = _descriptor(right, config.block_n, config.block_k)
    target = result = output_of(out, op == "gemm_accumulate_", bias)
    if parts > 1:
        sums = torch.empty((parts, M, N), dtype=torch.float32, device=a.device)
        target = output_of(sums, False)
    with on(a):
        gemm_kernel[(min(tiles, multiprocessors * config.per_sm),)](
            x, y, target, *scales, M, N, K, left.ld, right.ld, parts, A=FORMATS[a.dtype],
            B=FORMATS[b.dtype], A_K_MAJOR=left.k_major, B_K_MAJOR=right.k_major, PROMOTE=promote,
            SPLIT=parts > 1, SOFT_CAST=soft, TMA=use_tma, FLATTEN=config.flatten,
            **constants(config),
        )  # fmt: skip
        if parts > 1:
            reduce_kernel[(-(-M // REDUCE_M) * -(-N // REDUCE_N),)](
                sums, result, *scales, M, N, parts, BLOCK_M=REDUCE_M, BLOCK_N=REDUCE_N
            )


@cache
def constants(config: Config) -> dict[str, Any]:
    """The launch arguments of a config."""
    return {
        "GROUP": config.group,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor | None,
    b_scale_inv: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    out = torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device)
    if out.numel() == 0:
        return out
    if a.shape[1] == 0:
        return out.zero_() if bias is None else out.copy_(bias)
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    _launch("gemm", out, a, b, a_scale_inv, b_scale_inv, bias, fast_accum)
    return out


def gemm_accumulate_(
    acc: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor | None,
    b_scale_inv: torch.Tensor | None,
) -> None:
    if acc.numel() and a.shape[1]:
        _launch("gemm_accumulate_", acc, a, b, a_scale_inv, b_scale_inv, None, False)
