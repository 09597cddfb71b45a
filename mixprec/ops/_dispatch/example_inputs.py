"""Small inputs of every op, on which a GPU kernel is compared with the reference before use.

An example has a twin that differs in its sizes alone: those of one are multiples of 16, for which a
kernel moves 16 bytes at a time, those of the other are odd. Both are more than one tile or block of
any kernel, and no whole number of them. Every rounding is defined, so results are compared exactly.
A function has the name of its op; example_products has those of products and of attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from .._reference import block_formats, state8

Arguments = list[Any]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LOW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16)
SHAPES = ((144, 272), (131, 257))  # a pair of twins
AWKWARD = (0.0, -0.0, 448.0, -464.0, 6.5e4, 1e-8, math.inf, -math.inf, math.nan)


def random(device: str, seed: int = 0, shape: tuple[int, ...] = SHAPES[1]) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    return x.to(device)


def integers(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(shape[0])
    x = torch.randint(-4, 5, shape, generator=generator, dtype=torch.float32, device="cpu")
    return x.to(device, dtype)


def tensor(device: str, values: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def awkward(device: str) -> torch.Tensor:
    return tensor(device, AWKWARD).repeat(7)


def codes(device: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Every byte in turn."""
    return torch.arange(math.prod(shape), device=device).to(torch.uint8).view(shape)


def shifted(x: torch.Tensor) -> torch.Tensor:
    """A copy that begins one element after a multiple of 16 bytes."""
    return torch.cat([x[:1], x])[1:]


# Rows that a warp has to itself, and rows that take a block of threads.
ROWS = (*SHAPES, (16, 1040), (7, 1031))


def quantize(device: str) -> Iterator[Arguments]:
    for i, shape in enumerate(SHAPES):
        x = random(device, 0, shape)
        bad = x.clone()
        bad.view(-1)[: 9 * 7] = awkward(device)
        for j, dtype in enumerate(LOW):
            given = tensor(device, 0.0) if (i + j) % 2 else tensor(device, 1.0)
            yield [x if j < 2 else x.half(), dtype, None, True, "tensor", True]
            yield [x.bfloat16(), dtype, None, False, "tensor", False]
            yield [x if (i + j) % 2 else bad, dtype, given, False, "tensor", True]
        for dtype in LOW[:2]:
            yield [x.bfloat16(), dtype, None, True, "tensor", True]
            scaled = [x.bfloat16(), dtype, tensor(device, 2.0), True, "tensor", True]
            yield scaled
            yield [*scaled, tensor(device, -1.0)]
    yield [shifted(awkward(device)), LOW[0], tensor(device, 1.0), False, "tensor", True]
    yield from _quantize_by_blocks(device)


def _quantize_by_blocks(device: str) -> Iterator[Arguments]:
    for shape in ROWS:
        x = random(device, 1, shape)
        x[0, 3], x[-1, -1], x[:, 200] = math.nan, math.inf, 0.0
        for dtype, source in zip(LOW[:2], (torch.float32, torch.bfloat16), strict=True):
            yield [x.to(source), dtype, None, False, "row", True]
            for granularity in ("row", "block1x128", "block128x128"):
                if shape in SHAPES:
                    yield [x.to(source), dtype, None, True, granularity, True]


def dequantize(device: str) -> Iterator[Arguments]:
    for shape in SHAPES:
        for i, dtype in enumerate(LOW):
            fp8 = dtype.itemsize == 1
            data = codes(device, shape).view(dtype) if fp8 else random(device, 0, shape).to(dtype)
            yield [data, tensor(device, 0.25), FLOATS[i % 3]]
        data = random(device, 1, shape).to(torch.float8_e5m2)
        for i, scales in enumerate(((shape[0], 1), (shape[0], 3), (2, 3))):
            yield [data, random(device, 2, scales).abs(), FLOATS[(i + 1) % 3]]


def amax(device: str) -> Iterator[Arguments]:
    for shape in SHAPES:
        for dtype in FLOATS:
            yield [random(device, 0, shape).to(dtype)]
    yield [shifted(awkward(device))]


BLOCK_SHAPES = ((80, 112), (70, 101))
_OTHER_MODES = [mode for mode in block_formats.SCALE_MODES if mode != "rceil"]
PACKED = ((32, 80), (20, 129))


def _magnitudes(device: str, shape: tuple[int, int]) -> torch.Tensor:
    """Blocks of different magnitudes, of zeros, with Inf and NaN, and the last ones incomplete."""
    x = random(device, 1, shape) * 2.0 ** (torch.arange(shape[1], device=device) - 50.0)
    x[3], x[9, 40], x[-1, -1], x[17, 0], x[5] = 0.0, math.nan, math.inf, -1e38, 1e-40
    return x


def quantize_mx(device: str) -> Iterator[Arguments]:
    seed = tensor(device, [2**40 + 7], torch.int64)
    for shape in BLOCK_SHAPES:
        x = _magnitudes(device, shape)
        for i, (fmt, block) in enumerate(block_formats.BLOCK_FORMATS.items()):
            for transpose in (True, False):
                yield [x.bfloat16(), fmt, "rceil", transpose, None, False, False]
            yield [x.bfloat16(), fmt, "rceil", True, None, True, False]
            yield [x.to(FLOATS[i % 3]), fmt, "rceil", True, seed, i % 2 == 0, False]
            other = x.to(FLOATS[i % 2 * 2])
            yield [other, fmt, "rceil", False, None, False, True]
            if not block.nvfp4:
                yield [other, fmt, _OTHER_MODES[i % 3], i % 2 == 0, None, False, False]


def dequantize_mx(device: str) -> Iterator[Arguments]:
    one = tensor(device, 0.37)
    for rows, columns in BLOCK_SHAPES:
        for i, (fmt, block) in enumerate(block_formats.BLOCK_FORMATS.items()):
            size, across = block_formats.sizes(fmt, columns)
            scales = (torch.arange(rows * across, device=device) * 37 + 120).to(torch.uint8)
            scales = scales.view(rows, across)
            data = codes(device, (rows, size)).view(block.element.dtype)
            if block.nvfp4:
                scales = scales.view(torch.float8_e4m3fn)
            for dtype in (torch.bfloat16, FLOATS[i % 2 * 2]):
                yield [data, scales, one if block.nvfp4 else None, fmt, columns, dtype]


def pack(device: str) -> Iterator[Arguments]:
    for shape in PACKED:
        x = random(device, 1, shape)
        x[:3] = 0.0
        x[3], x[9, 0], x[13, 0], x[16, 0] = 0.1, math.nan, -math.inf, 1e-40
        offset = None
        for bits in (8, 4, 2):
            for dtype in FLOATS:
                yield [x.to(dtype), bits, 2**40 + 7, 2**33 + bits, offset]
                offset = tensor(device, [2**35 + 11], torch.int64) if offset is None else None


def unpack(device: str) -> Iterator[Arguments]:
    for n in map(math.prod, PACKED):
        ranges = random(device, 1, ((n + 127) // 128, 2)).bfloat16()
        ranges[3, 1], ranges[7, 0] = 0.0, math.nan
        for bits in (8, 4, 2):
            packed = codes(device, ((n * bits + 7) // 8,))
            for dtype in FLOATS:
                yield [packed, ranges, bits, [n], dtype]


# Several tiles across, several bands of rows, several tiles down.
NORMS = ((32, 272), (27, 257))
NORM_GRADS = ((80, 272), (67, 257))
ACTIVATIONS = ((144, 80), (131, 77))


def _casts(device: str) -> Iterator[Arguments]:
    """dtype, scale, transpose, granularity, power_of_two_scale and record of a fused op."""
    one = tensor(device, 0.5)
    yield [torch.float32, None, False, "tensor", True]
    yield [torch.bfloat16, None, True, "tensor", True]
    yield [torch.float8_e4m3fn, None, True, "tensor", True]
    yield [torch.float8_e5m2, one, False, "tensor", True]
    yield [torch.float8_e4m3fn, None, True, "row", False]
    yield [torch.float8_e4m3fn, None, False, "row", True]
    yield [torch.float8_e4m3fn, None, True, "block1x128", True]
    yield [torch.float8_e5m2, None, False, "block128x128", True]
    yield [torch.float8_e4m3fn, None, True, "mx", True]
    yield [torch.float8_e5m2, None, False, "mx", True]
    yield [torch.bfloat16, None, False, "tensor", True]
    yield [torch.float8_e4m3fn, one, True, "tensor", True, tensor(device, -1.0)]


def norm_quantize(device: str) -> Iterator[Arguments]:
    for shape in NORMS:
        x, residual = random(device, 1, shape), random(device, 2, shape)
        weight, bias = random(device, 3, shape[1:]), random(device, 4, shape[1:])
        x[7, 3], x[-1, -1], x[5] = math.nan, math.inf, 0.0
        for i, cast in enumerate(_casts(device)):
            low, of_weight = FLOATS[(i + 1) % 3], FLOATS[i % 2]
            added = residual.to(low) if i % 2 else None
            scaled = None if i == 2 else weight.to(of_weight)
            shift = bias.to(of_weight) if i % 3 else None
            yield [x.to(low), added, scaled, shift, 1e-5, i % 3 > 0, *cast]


def norm_backward(device: str) -> Iterator[Arguments]:
    for shape in NORM_GRADS:
        g, x, total = (random(device, seed, shape) for seed in (1, 2, 3))
        g[7, 3], x[-1, -1] = math.nan, math.inf
        weight, mean = random(device, 4, shape[1:]), random(device, 5, shape[:1])
        rstd = random(device, 6, shape[:1]).abs()
        yield [g, x, weight, mean, rstd, total, True]
        yield [g.bfloat16(), x.bfloat16(), None, mean[:0], rstd, None, False]
        yield [g, x.half(), weight.half(), mean[:0], rstd, total.half(), False]


def act_quantize(device: str) -> Iterator[Arguments]:
    kinds = ("silu", "gelu", "gelu_tanh", "relu2")
    for shape in ACTIVATIONS:
        x, up = random(device, 1, shape) * 8, random(device, 2, shape)
        x.view(-1)[: 9 * 7], up[100, 3] = awkward(device), math.nan
        for i, cast in enumerate(_casts(device)):
            low = FLOATS[i % 3]
            yield [x.to(low), None if i % 4 == 1 else up.to(low), kinds[i % 4], *cast]
        for kind in kinds:
            plain = torch.bfloat16, None, False, "tensor", True
            yield [x.bfloat16(), up.bfloat16(), kind, *plain]


def act_backward(device: str) -> Iterator[Arguments]:
    for x, up, *rest in act_quantize(device):
        g = random(device, 3, x.shape)
        yield [g if up is None else g.to(x.dtype), x, up, *rest]


# Of a list's three tensors the first has an aligned size, the second an odd one, and the third
# begins between multiples of 16 bytes. They are more than a block of Triton's kernels and, where
# squares are summed, than a chunk of ours.
GRADS, SUMMED, PARAMS = (4144, 4137, 48), (40_000, 16_391, 48), (2064, 2075, 48)


def _counts(device: str, rows: int) -> torch.Tensor:
    return torch.full((rows, 4), -1, dtype=torch.int64, device=device)


def unscale(device: str) -> Iterator[Arguments]:
    def grads(dtype: torch.dtype) -> list[torch.Tensor]:
        aligned, odd, small = (random(device, n, (n,)).to(dtype) for n in GRADS)
        return [aligned, odd, shifted(small)]

    inv_scale = tensor(device, 2.0**-3)
    for dtype in (*FLOATS, torch.float64):
        yield [grads(dtype), inv_scale, tensor(device, 0.0), None]
        yield [grads(dtype), inv_scale, tensor(device, 0.0), _counts(device, 3)]
    mixed = [grad for dtype in (*FLOATS, torch.float64) for grad in grads(dtype)]
    mixed.append(awkward(device))
    yield [mixed, inv_scale, tensor(device, 0.0), _counts(device, len(mixed))]


def grad_stats(device: str) -> Iterator[Arguments]:
    def grads(dtype: torch.dtype) -> list[torch.Tensor]:
        """Integers, whose squares add up exactly in any order."""
        aligned, odd, small = (integers(device, (n,), dtype) for n in SUMMED)
        return [aligned, odd, shifted(small)]

    half, flag = tensor(device, 0.5), tensor(device, 0.0)
    for dtype in (*FLOATS, torch.float64):
        for counts in (None, _counts(device, 3)):
            sums = torch.zeros(3, dtype=torch.float64, device=device)
            yield [grads(dtype), half, flag.clone(), sums, counts]
    tiny = tensor(device, [0.0, 2.0**-24, 1.0], torch.float16)
    mixed = [*grads(torch.float32), tensor(device, math.inf), tiny, *grads(torch.float64)]
    sums = torch.zeros(len(mixed), dtype=torch.float64, device=device)
    yield [mixed, half, flag, sums, _counts(device, len(mixed))]


# Of a param and its gradient, its master and its states; with a GradScaler every second one.
_STORED = (
    (torch.float16, torch.float32, torch.float32),
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.bfloat16, torch.int16, torch.float32),
    (torch.bfloat16, torch.int8, torch.float32),
    (torch.bfloat16, torch.float32, torch.uint8),
    (torch.bfloat16, None, torch.bfloat16),
    (torch.float32, None, torch.float32),
)


def update(states: int, settings: list[float], device: str) -> Iterator[Arguments]:
    """Of an optimizer, with each of the ways to store params; the last but one changes nothing, the
    last has other flags."""
    values = [random(device, seed, (n,)) for seed, n in enumerate(PARAMS)]
    for i, (dtype, master_dtype, state_dtype) in enumerate((*_STORED, _STORED[0], _STORED[-1])):
        params, grads = ([x.to(dtype, copy=True) for x in values] for _ in range(2))
        params[2] = shifted(params[2])
        stochastic = state_dtype == torch.bfloat16
        masters: list[torch.Tensor] = []
        if master_dtype in (torch.int16, torch.int8):
            numbers16 = (torch.arange(x.numel(), device=device).short() * 31 for x in values)
            masters = [n.to(master_dtype) for n in numbers16]
        elif master_dtype is not None:
            masters = [x.clone() for x in values]
        lists = [params, grads, *_states(values, state_dtype, states), masters]
        steps = tensor(device, [3.0, 0.0, 7.0])
        # A setting that is 0 or 1 is a flag, or has a case of its own.
        numbers = [1 - x if i == len(_STORED) + 1 and x in (0, 1) else x for x in settings]
        lr = tensor(device, 1e-3, torch.float64) if stochastic else None
        options = [False, 1.5, stochastic, 2**40 + 7, [3, 0, 1], lr]
        found_inf = tensor(device, float(i == len(_STORED)))
        flags = [tensor(device, 0.5), tensor(device, 0.25), found_inf]
        yield [*lists, steps, 1e-3, numbers, *options, *(flags if i % 2 == 0 else [None] * 3)]


def _states(
    values: list[torch.Tensor], dtype: torch.dtype, count: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """`count` states for each of the values, and their scales where they have 8 bits."""
    moments = [[0.1 * x for x in values], [x.square() for x in values]][:count]
    if dtype != torch.uint8:
        return [x.to(dtype) for moment in moments for x in moment], []
    kinds = zip(moments, (state8.SIGNED, state8.UNSIGNED), strict=False)
    encoded = [state8.encode(x, kind) for moment, kind in kinds for x in moment]
    return [codes for codes, _ in encoded], [scale for _, scale in encoded]


def scale_from_amax(device: str) -> Iterator[Arguments]:
    amaxes = tensor(device, [0.0, 1e-40, 1.0, 3.0, 448.0, math.inf, math.nan])
    for amax in (amaxes, amaxes.repeat(16), amaxes[3]):
        for power_of_two in (True, False):
            scale, scale_inv = torch.full_like(amax, 2.0), torch.full_like(amax, 0.5)
            yield [scale, scale_inv, amax, torch.float8_e4m3fn, 0, power_of_two]


def inv_scale(device: str) -> Iterator[Arguments]:
    yield [tensor(device, 3.0)]


def clip_coef(device: str) -> Iterator[Arguments]:
    yield [tensor(device, 7.0, torch.float64), 1.0]
    yield [tensor(device, [4.0, 0.25, 16.0], torch.float64), 1.0]


def update_scale(device: str) -> Iterator[Arguments]:
    for found_inf in (0.0, 1.0):
        for interval, hysteresis, underflow in ((20, 2, tensor(device, 0.5)), (20, 1, None)):
            trackers = tensor(device, 1, torch.int32), tensor(device, 1, torch.int32)
            counters = tensor(device, [4, 5, 2], torch.int64)
            state = tensor(device, 2.0**16), *trackers, counters, tensor(device, found_inf)
            limits = interval, 2.0**-24, math.inf, hysteresis, 0.25
            yield [*state, underflow, 2.0, 0.5, *limits]


def update_delayed_scales(device: str) -> Iterator[Arguments]:
    amaxes = (-1.0, 0.0, 3.0, math.inf, math.nan)  # not used, zero, plain, not recorded
    for most_recent in (False, True):
        histories = [random(device, seed, (4,)).abs() for seed in range(len(amaxes))]
        scales = [tensor(device, 2.0) for _ in amaxes]
        staged = [tensor(device, amax) for amax in amaxes]
        yield [histories, scales, staged, [448.0, 57344.0] * 2 + [448.0], 1, True, most_recent]
