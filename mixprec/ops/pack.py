"""pack and unpack: a tensor in 8, 4 or 2 bits by groups, with unbiased stochastic rounding."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from ._dispatch import checks
from ._dispatch.op import Op
from ._reference import rounding

BITS = (8, 4, 2)
# Elements that share a minimum and a step, which take 0.25 bits of each. Groups of 64 have a tenth
# less error on normal values for 0.25 bits more.
GROUP = 128
_MIN_NORMAL = 2.0**-126
_MIN_STEP = (127 - 84) << 7  # 2^-84, as bits of BF16


def packed_sizes(numel: int, bits: int) -> tuple[int, int]:
    """The bytes of the codes and the number of groups of a tensor of `numel` elements."""
    return (numel * bits + 7) // 8, (numel + GROUP - 1) // GROUP


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of an FP32 tensor as int64, from 0 on."""
    return x.view(torch.int32).long() & 0xFFFFFFFF


def _bf16(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).to(torch.int16).view(torch.bfloat16)


def _up(magnitude: torch.Tensor) -> torch.Tensor:
    """The bits of the BF16 number next to FP32 bits, away from 0."""
    return (magnitude + 0xFFFF) >> 16


def _range(x: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The minimum and the step, bf16 [groups], of the rows of x, fp32 [groups, GROUP]."""
    low, high = x.amin(1), x.amax(1)
    finite = torch.isfinite(low) & torch.isfinite(high)
    # Subnormal numbers are moved outwards to a normal one or 0: what comes of them must not depend
    # on whether the processor flushes them.
    least = torch.full_like(low, _MIN_NORMAL)
    low = torch.where(low.abs() >= _MIN_NORMAL, low, torch.where(low < 0, -least, 0.0))
    high = torch.where(high.abs() >= _MIN_NORMAL, high, torch.where(high > 0, least, 0.0))
    bits = _bits(low)
    minimum = _bf16(torch.where(low < 0, _up(bits), bits >> 16))
    low = minimum.float()
    # By a tensor: torch on a GPU multiplies by the reciprocal of a number, which is rounded.
    code = _up(_bits((high - low) / torch.full_like(low, levels))).clamp(min=_MIN_STEP)
    short = low + _bf16(code).float() * levels < high  # the division rounded down
    step = _bf16(torch.where(high == low, 0, code + short))
    span = step.float() * levels
    finite &= torch.isfinite(span) & torch.isfinite(low + span)
    return minimum.masked_fill(~finite, torch.nan), step.masked_fill(~finite, 0.0)


def _random(
    groups: int, seed: int, counter: int | torch.Tensor, device: torch.device
) -> torch.Tensor:
    """16 random bits for each element as int64 [groups, GROUP]: a byte of its own, above one for
    the group: the exclusive or of all of its bytes, which is independent of each of them."""
    call = torch.arange(groups * GROUP // 16, device=device)
    low, high = (torch.zeros_like(call) + (counter >> shift & 0xFFFFFFFF) for shift in (0, 32))
    words = rounding.philox((call & 0xFFFFFFFF, call >> 32, low, high), seed)
    own = (words[..., None] >> torch.arange(0, 32, 8, device=device) & 0xFF).view(groups, GROUP)
    shared = own
    while shared.shape[1] > 1:
        shared = torch.bitwise_xor(*shared.chunk(2, 1))
    return own << 8 | shared


def pack_reference(
    x: torch.Tensor, bits: int, seed: int, counter: int, offset: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    numel, levels = x.numel(), 2**bits - 1
    size, groups = packed_sizes(numel, bits)
    flat = x.reshape(-1)
    padding = flat[-1:].expand(groups * GROUP - numel)  # changes no minimum or maximum
    wide = torch.cat([flat, padding]).float().view(groups, GROUP)
    minimum, step = _range(wide, levels)
    low, span = minimum.float()[:, None], step.float()[:, None]
    factor = torch.where(span == 0, 0.0, torch.full_like(span, 256.0) / span)
    random = _random(groups, seed, counter if offset is None else offset + counter, x.device)
    # In units of 2^-8 of a step, rounded down after a shift by a random part of a unit.
    steps = ((wide - low) * factor + (random & 0xFF).float() * 2.0**-8).nan_to_num(0.0)
    steps = steps.to(torch.int32).clamp(max=levels << 8)
    codes = ((steps + (random >> 8)) >> 8).masked_fill(torch.isnan(low), 0).view(-1)
    codes[numel:] = 0
    shifts = torch.arange(0, 8, bits, device=x.device)
    data = (codes.view(-1, 8 // bits) << shifts).sum(1).to(torch.uint8)
    return data[:size].clone(), torch.stack([minimum, step], 1)


def unpack_reference(
    codes: torch.Tensor, ranges: torch.Tensor, bits: int, shape: list[int], dtype: torch.dtype
) -> torch.Tensor:
    """minimum + code * step: the product is exact, the sum is rounded to FP32, then to dtype."""
    numel = prod(shape)
    shifts = torch.arange(0, 8, bits, device=codes.device)
    code = (codes[:, None] >> shifts & 2**bits - 1).reshape(-1)[:numel].float()
    minimum, step = ranges.float().repeat_interleave(GROUP, 0)[:numel].unbind(1)
    largest = torch.finfo(dtype).max
    return (minimum + code * step).clamp(-largest, largest).to(dtype).view(shape)


def _check_bits(op: str, bits: int) -> None:
    if bits not in BITS:
        raise ValueError(f"{op}: bits must be 8, 4 or 2, got {bits}")


def _check_pack(x: torch.Tensor, bits: int, offset: torch.Tensor | None) -> None:
    op = "pack"
    checks.has_dtype(op, "x", x, checks.FLOATS)
    _check_bits(op, bits)
    if offset is not None:
        checks.has_dtype(op, "offset", offset, (torch.int64,))
        checks.has_shape(op, "offset", offset, (1,), "one number")
        checks.on_device(op, "offset", offset, x.device, "x")


def _fake_pack(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    size, groups = packed_sizes(x.numel(), bits)
    return x.new_empty(size, dtype=torch.uint8), x.new_empty((groups, 2), dtype=torch.bfloat16)


pack_op = Op(
    "pack",
    "(Tensor x, int bits, int seed, int counter, Tensor? offset) -> (Tensor codes, Tensor ranges)",
    reference=pack_reference,
    fake=_fake_pack,
    check=_check_pack,
    triton="pack",
)


def _check_unpack(
    codes: torch.Tensor, ranges: torch.Tensor, bits: int, shape: Sequence[int], dtype: torch.dtype
) -> None:
    op = "unpack"
    checks.has_dtype(op, "codes", codes, (torch.uint8,))
    checks.has_dtype(op, "ranges", ranges, (torch.bfloat16,))
    checks.on_device(op, "ranges", ranges, codes.device, "codes")
    _check_bits(op, bits)
    if any(size < 0 for size in shape):
        raise ValueError(f"{op}: shape must have no negative size, got {tuple(shape)}")
    size, groups = packed_sizes(prod(shape), bits)
    of = f"the packed form of shape {tuple(shape)} in {bits} bits"
    checks.has_shape(op, "codes", codes, (size,), of)
    checks.has_shape(op, "ranges", ranges, (groups, 2), of)
    if dtype not in checks.FLOATS:
        raise ValueError(f"{op}: dtype must be float32, bfloat16 or float16, got {dtype}")


def _fake_unpack(codes: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return codes.new_empty(list(shape), dtype=dtype)


unpack_op = Op(
    "unpack",
    "(Tensor codes, Tensor ranges, int bits, int[] shape, ScalarType dtype) -> Tensor",
    reference=unpack_reference,
    fake=_fake_unpack,
    check=_check_unpack,
    triton="pack",
)


def pack(
    x: torch.Tensor,
    bits: int,
    *,
    seed: int = 0,
    counter: int = 0,
    offset: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (codes, ranges): x in `bits` bits an element, for `unpack`.

        minimum = the least value of the group, rounded down to BF16
        step    = (the greatest value - minimum) / (2^bits - 1), rounded up to BF16
        code    = floor((x - minimum) / step + u),  u uniform in [0, 1)

    x: fp32, bf16 or fp16, of any shape and memory layout. bits: 8, 4 or 2. The elements in
    row-major order form groups of 128. codes: uint8 [ceil(elements * bits / 8)], the codes in
    order, the first in the lowest bits of a byte; bits left over are 0. ranges: bf16 [groups, 2],
    minimum and step.

    The rounding is unbiased: the expectation of a code is (x - minimum) / step to within 2^-16, and
    an element changes by less than a step. u has 16 bits of Philox4x32-10, keyed by `seed`, counted
    by element and `counter` (two int64): 8 of its own, and 8 lower ones that its group shares.
    Calls are reproducible; give every tensor a counter of its own. All backends give the same bits.
    offset: None, or int64 [1] on x's device, which the kernel adds to counter: a captured graph, in
    which seed and counter are constants, rounds anew at each replay if the offset changes.

    A group of equal BF16 values, such as zeros, has step 0 and is kept exactly; otherwise the step
    is at least 2^-84. A group that holds Inf or NaN, or whose values are so far apart that
    minimum + (2^bits - 1) * step overflows FP32, becomes NaN as a whole (minimum NaN, codes 0).
    TypeError or ValueError names an invalid argument. Source: ActNN (Chen et al., 2021).
    """
    checks.is_tensor("pack", "x", x)
    checks.needs_no_grad("pack", "call it under torch.no_grad()", x)
    checks.is_int64("pack", "seed", seed)
    checks.is_int64("pack", "counter", counter)
    codes, ranges = pack_op(x, bits, seed, counter, offset)
    return codes, ranges


def unpack(
    codes: torch.Tensor,
    ranges: torch.Tensor,
    bits: int,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return minimum + code * step as `dtype` (fp32, bf16 or fp16), contiguous, of `shape`.

    codes, ranges, bits: as `pack` returned and took them. shape: of the tensor that was packed. The
    product is exact, the sum is rounded to FP32, then once to dtype. TypeError or ValueError names
    an invalid argument, or codes and ranges that do not fit the shape.
    """
    checks.is_tensor("unpack", "codes", codes)
    y: torch.Tensor = unpack_op(codes, ranges, bits, list(shape), dtype)
    return y
