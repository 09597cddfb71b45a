"""quantize_nf4 and dequantize_nf4: a weight in 4 bits, by blocks of 64, as bitsandbytes has it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch

from ._dispatch import checks
from ._dispatch.op import Op

BLOCK = 64  # elements that share a scale
NESTED = 256  # scales that share one of their own
# Quantiles of the normal distribution, of its negative half and of its positive one, and 0.
# Source: QLoRA (Dettmers et al., 2023, arXiv 2305.14314), appendix E.
VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_ZERO = 7  # the code of 0
_MIN_SCALE = 1e-38  # what a scale is at least where numbers are divided by it


class Nf4(NamedTuple):
    """A weight of n elements: codes uint8 [ceil(n / 2)] and absmax fp32 [ceil(n / 64)].

    With double quantization absmax is uint8, and nested_absmax fp32 [ceil(n / 64 / 256)] and offset
    fp32 [] belong to it.
    """

    codes: torch.Tensor
    absmax: torch.Tensor
    nested_absmax: torch.Tensor | None
    offset: torch.Tensor | None


def nf4_sizes(numel: int) -> tuple[int, int, int]:
    """The bytes of the codes, the number of scales and that of their scales."""
    blocks = -(-numel // BLOCK)
    return -(-numel // 2), blocks, -(-blocks // NESTED)


def _fp32(x: float) -> float:
    return ctypes.c_float(x).value


@cache
def dynamic_map() -> tuple[float, ...]:
    """The 256 values of the codes of scales, in order, FP32 numbers.

    0, 1, and with either sign the centers of 2^i equal parts of [0.1, 1], times 10^(i - 6), for i
    from 0 to 6. Source: 8-Bit Approximations for Parallelism in Deep Learning (Dettmers, 2015). The
    roundings, one to FP32 each, are those of bitsandbytes on processors with AVX2.
    """
    positive, tenth = [1.0], _fp32(0.1)
    for i in range(7):
        parts, power = 2**i, _fp32(10.0 ** (i - 6))
        width = _fp32(1.0 - tenth) / parts
        from_left = [tenth + width * k for k in range((parts + 1) // 2)]
        from_right = [1.0 - width * k for k in reversed(range(parts // 2 + 1))]
        edges = pairwise(map(_fp32, [*from_left, *from_right]))
        positive += [_fp32(_fp32(left + right) / 2 * power) for left, right in edges]
    negative = [-x for x in positive if x != 1.0]
    return tuple(sorted([*negative, 0.0, *positive]))


def _tensor(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _nearest(x: torch.Tensor, values: tuple[float, ...]) -> torch.Tensor:
    """The indices of the values, in ascending order, next to x; of two as near the lower one."""
    table = _tensor(values, x.device)
    return torch.bucketize(x, (table[:-1] + table[1:]) / 2, out_int32=True)


def quantize_nf4_reference(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (codes, absmax) of w without double quantization, for the formulas of `quantize_nf4`.

    A block that holds Inf or NaN has the absmax NaN and the codes of 0.
    """
    numel = w.numel()
    size, count, _ = nf4_sizes(numel)
    flat = w.reshape(-1).float()
    blocks = torch.nn.functional.pad(flat, (0, count * BLOCK - numel)).view(count, BLOCK)
    absmax = blocks.abs().amax(1)
    least = absmax.clamp(min=_MIN_SCALE)
    scaled = blocks * (1.0 / least)[:, None]
    if numel % BLOCK:  # the incomplete block at the end
        scaled[-1], absmax[-1] = blocks[-1] / least[-1], least[-1]
    codes = _nearest(scaled, VALUES)
    bad = ~absmax.isfinite()
    codes = codes.masked_fill(bad[:, None], _ZERO).to(torch.uint8).view(-1)
    joined = codes[::2] << 4 | codes[1::2]
    return joined[:size].clone(), absmax.masked_fill(bad, torch.nan)


def dequantize_nf4_reference(
    codes: torch.Tensor,
    absmax: torch.Tensor,
    nested_absmax: torch.Tensor | None,
    offset: torch.Tensor | None,
    shape: list[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The value of the code * absmax, a product in FP32, and one rounding to dtype."""
    numel = prod(shape)
    if nested_absmax is not None and offset is not None:
        values = _tensor(dynamic_map(), codes.device)[absmax.long()]
        outer = nested_absmax.repeat_interleave(NESTED)[: len(absmax)]
        absmax = values * outer + offset.reshape(())
    pairs = torch.stack([codes >> 4, codes & 15], 1).view(-1)[:numel]
    scale = absmax.repeat_interleave(BLOCK)[:numel]
    return (_tensor(VALUES, codes.device)[pairs.long()] * scale).to(dtype).view(shape)


def _check_quantize(w: torch.Tensor) -> None:
    checks.has_dtype("quantize_nf4", "w", w, checks.FLOATS)


def _fake_quantize(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size, blocks, _ = nf4_sizes(w.numel())
    return w.new_empty(size, dtype=torch.uint8), w.new_empty(blocks, dtype=torch.float32)


quantize_nf4_op = Op(
    "quantize_nf4",
    "(Tensor w) -> (Tensor codes, Tensor absmax)",
    reference=quantize_nf4_reference,
    fake=_fake_quantize,
    check=_check_quantize,
)


def _check_dequantize(
    codes: torch.Tensor,
    absmax: torch.Tensor,
    nested_absmax: torch.Tensor | None,
    offset: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> None:
    op = "dequantize_nf4"
    if any(size < 0 for size in shape):
        raise ValueError(f"{op}: shape must have no negative size, got {tuple(shape)}")
    if (nested_absmax is None) != (offset is None):
        raise ValueError(f"{op}: nested_absmax and offset must be given both or not at all")
    size, blocks, nested = nf4_sizes(prod(shape))
    of = f"of shape {tuple(shape)}"
    checks.has_dtype(op, "codes", codes, (torch.uint8,))
    checks.has_shape(op, "codes", codes, (size,), f"the codes {of}")
    scale = torch.float32 if nested_absmax is None else torch.uint8
    checks.has_dtype(op, "absmax", absmax, (scale,))
    checks.has_shape(op, "absmax", absmax, (blocks,), f"the blocks of {BLOCK} {of}")
    checks.on_device(op, "absmax", absmax, codes.device, "codes")
    if nested_absmax is not None and offset is not None:
        checks.has_dtype(op, "nested_absmax", nested_absmax, (torch.float32,))
        checks.has_shape(op, "nested_absmax", nested_absmax, (nested,), f"the scales {of} / 256")
        checks.on_device(op, "nested_absmax", nested_absmax, codes.device, "codes")
        checks.is_scalar(op, "offset", offset, torch.float32)
        checks.on_device(op, "offset", offset, codes.device, "codes")
    if dtype not in checks.FLOATS:
        raise ValueError(f"{op}: dtype must be float32, bfloat16 or float16, got {dtype}")


def _fake_dequantize(codes: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return codes.new_empty(list(shape), dtype=dtype)


dequantize_nf4_op = Op(
    "dequantize_nf4",
    "(Tensor codes, Tensor absmax, Tensor? nested_absmax, Tensor? offset, int[] shape, "
    "ScalarType dtype) -> Tensor",
    reference=dequantize_nf4_reference,
    fake=_fake_dequantize,
    check=_check_dequantize,
)


def quantize_scales(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (codes uint8 [n], absmax fp32 [ceil(n / 256)]) of x, fp32 [n], in `dynamic_map`.

    x / absmax of its block is first rounded to one of 65,536 equidistant numbers in [-1, 1], then
    to the nearest value of the map, as bitsandbytes does on a CPU: 0 gets the code of 2.125e-5, and
    in a block of zeros code 0.
    """
    count = -(-len(x) // NESTED)
    blocks = torch.nn.functional.pad(x, (0, count * NESTED - len(x))).view(count, NESTED)
    absmax = blocks.abs().amax(1)
    scaled = (blocks * (1.0 / absmax)[:, None]).clamp(-1.0, 1.0)
    # FP64 holds the product and the sum, which are rounded to FP32 once.
    place = ((1.0 + scaled).double() * (0.5 * 65535.0) + 0.5).float().nan_to_num(0.0)
    place = place.to(torch.int32).float()
    codes = _nearest(place * 2.0 / torch.full_like(place, 65535.0) - 1.0, dynamic_map())
    return codes.to(torch.uint8).view(-1)[: len(x)].clone(), absmax


def quantize_nf4(w: torch.Tensor, double_quant: bool = True) -> Nf4:
    """w in NF4: 16 values between -1 and 1, times the absmax of a block of 64.

    w: fp32, bf16 or fp16, any shape and strides, in blocks of 64 along its elements in row-major
    order.

        absmax = max |w| of the block
        code   = the nearest of VALUES to w * (1 / max(absmax, 1e-38)), of two the lower one

    codes: the first of two in the upper half of a byte; the code of 0 beside the last of an odd
    number. In an incomplete block at the end absmax is at least 1e-38, and w is divided by it.

    double_quant: absmax is stored in 8 bits. offset = its mean, and absmax - offset is quantized in
    blocks of 256 (`quantize_scales`): 4.127 bits an element instead of 4.5.

    Everything has the bits of quantize_4bit of bitsandbytes 0.50.2 on a CPU, tested with it.
    ValueError where w holds Inf or NaN, or where the sum of absmax, for its mean, overflows FP32.
    Source: QLoRA (Dettmers et al., 2023, arXiv 2305.14314).
    """
    op = "quantize_nf4"
    checks.is_tensor(op, "w", w)
    checks.needs_no_grad(op, "use w.detach()", w)
    codes, absmax = quantize_nf4_op(w)
    if not double_quant:
        if not (w.is_meta or bool(absmax.isfinite().all())):
            raise ValueError(f"{op}: w must be finite, got Inf or NaN")
        return Nf4(codes, absmax, None, None)
    offset = absmax.mean() if len(absmax) else absmax.new_zeros(())
    if not (w.is_meta or bool(offset.isfinite())):
        why = "w must be finite, got Inf or NaN"
        if bool(absmax.isfinite().all()):
            why = "the mean of absmax overflows FP32, which double_quant=False does not need"
        raise ValueError(f"{op}: {why}")
    return Nf4(codes, *quantize_scales(absmax - offset), offset)


def dequantize_nf4(
    q: Nf4, shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the weight of `quantize_nf4`, of `shape`, as `dtype` (fp32, bf16 or fp16).

    The value of the code * absmax is a product in FP32, rounded once to dtype; with double
    quantization absmax is map[code] * nested_absmax + offset, both rounded to FP32. These are the
    bits of dequantize_4bit of bitsandbytes 0.50.2, but for its kernel for AVX-512, which takes
    scales of other blocks for some shapes whose last dimension is no multiple of 64. TypeError or
    ValueError names an invalid argument, or what does not fit the shape.
    """
    checks.is_tensor("dequantize_nf4", "codes", q.codes)
    w: torch.Tensor = dequantize_nf4_op(*q, list(shape), dtype)
    return w
