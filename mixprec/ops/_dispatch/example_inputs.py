"""Small inputs of every op, on which a GPU kernel is compared with the reference before use.

Every rounding is defined, so results are compared exactly; GEMM operands are small integers, whose
sums are exact in FP32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from .._reference import block_formats, state8

Arguments = list[Any]
SHAPE = (37, 29)  # odd: no multiple of any vector length
LOW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16)
AWKWARD = (0.0, -0.0, 448.0, -464.0, 6.5e4, 1e-8, math.inf, -math.inf, math.nan)


def _random(device: str, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    return x.to(device)


def _integers(device: str, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(shape[0])
    x = torch.randint(-4, 5, shape, generator=generator, dtype=torch.float32, device="cpu")
    return x.to(device, dtype)


def _tensor(device: str, values: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def _awkward(device: str) -> torch.Tensor:
    return _tensor(device, AWKWARD).repeat(7)


def quantize(device: str) -> Iterator[Arguments]:
    for dtype in LOW:
        yield [_random(device), dtype, None, True, "tensor", True]
        yield [_random(device).bfloat16(), dtype, None, False, "tensor", False]
        yield [_awkward(device), dtype, _tensor(device, 1.0), False, "tensor", True]
        yield [_random(device), dtype, _tensor(device, 0.0), False, "tensor", True]
    blocks = _random(device, 1, (130, 257))
    blocks[0, 3], blocks[129, 256], blocks[:, 200] = math.nan, math.inf, 0.0
    for granularity in ("row", "block1x128", "block128x128"):
        for dtype in LOW[:2]:
            yield [blocks, dtype, None, True, granularity, True]


def dequantize(device: str) -> Iterator[Arguments]:
    codes = torch.arange(256, device=device).to(torch.uint8)
    for dtype in LOW:
        data = codes.view(dtype) if dtype.itemsize == 1 else _random(device).to(dtype)
        yield [data, _tensor(device, 0.25), torch.float32]
    data = _random(device, 1, (130, 257)).to(torch.float8_e5m2)
    for shape in ((130, 1), (130, 3), (2, 3)):
        yield [data, _random(device, 2, shape).abs(), torch.bfloat16]


def amax(device: str) -> Iterator[Arguments]:
    yield [_random(device)]
    yield [_random(device).half()]
    yield [_awkward(device)]


def _operands(device: str, *, plain: bool = False) -> Iterator[Arguments]:
    """a, b and their scales; plain: such that torch's GEMM accepts them too."""
    half, quarter = _tensor(device, 0.5), _tensor(device, 0.25)
    for a_dtype, b_dtype in [(d, d) for d in LOW] + [LOW[:2]]:
        fp8 = a_dtype.itemsize == 1
        m, n, k = (16, 32, 64) if plain and fp8 else (19, 23, 70)
        a, b = _integers(device, (m, k), a_dtype), _integers(device, (n, k), b_dtype).t()
        yield [a, b, None, None] if plain and not fp8 else [a, b, half, quarter]


def _blocks(device: str) -> Iterator[Arguments]:
    """Operands with scales per block and per row. Triton compiles a kernel for each."""
    a = _integers(device, (12, 144), torch.float8_e4m3fn)
    b = _integers(device, (32, 144), torch.float8_e4m3fn).t()
    powers = _tensor(device, [1.0, 2.0, 4.0, 8.0])
    yield [a, b, powers[:2].repeat(12, 1), powers[2:, None]]
    yield [a, b, powers[:3].repeat(4)[:, None], powers.repeat(8)[None]]


def gemm(device: str) -> Iterator[Arguments]:
    bias = torch.arange(23, dtype=torch.float32, device=device)
    for operands in _operands(device):
        yield [*operands, bias, torch.float32, False]
    for operands in _operands(device, plain=True):
        dtype = operands[0].dtype
        yield [*operands, None, torch.bfloat16 if dtype.itemsize == 1 else dtype, False]
    for operands in _blocks(device):
        yield [*operands, None, torch.bfloat16, False]


def gemm_simulated(device: str) -> Iterator[Arguments]:
    for operands in _operands(device):
        for arch in ("hopper", "blackwell"):
            yield [*operands, None, torch.float32, False, arch]


def gemm_accumulate(device: str) -> Iterator[Arguments]:
    for operands in [*_operands(device, plain=True), *list(_blocks(device))[:1]]:
        shape = operands[0].shape[0], operands[1].shape[1]
        yield [_integers(device, shape, torch.float32), *operands]


def _grads(device: str) -> list[torch.Tensor]:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return [_random(device, seed, (seed + 31,)).to(d) for seed, d in enumerate(dtypes)]


def _counts(device: str, rows: int) -> torch.Tensor:
    return torch.full((rows, 4), -1, dtype=torch.int64, device=device)


def unscale(device: str) -> Iterator[Arguments]:
    inv_scale = _tensor(device, 2.0**-3)
    grads = _grads(device)
    yield [grads, inv_scale, _tensor(device, 0.0), None]
    grads = [*_grads(device), _awkward(device)]
    yield [grads, inv_scale, _tensor(device, 0.0), _counts(device, len(grads))]


def grad_stats(device: str) -> Iterator[Arguments]:
    # powers of two: their squares add up exactly in any order
    exact = [_tensor(device, 2.0 ** (n % 5)).repeat(n) for n in (1, 37, 1000)]
    tiny = _tensor(device, [0.0, 2.0**-24, 1.0], torch.float16)
    for grads in ([*exact, tiny], [*exact, _tensor(device, math.inf)]):
        sum_sq = torch.zeros(4, dtype=torch.float64, device=device)
        flag = _tensor(device, 0.0)
        yield [grads, _tensor(device, 0.5), flag, sum_sq, _counts(device, 4)]


def update(states: int, settings: list[float], device: str) -> Iterator[Arguments]:
    """An optimizer's update: bf16 params with an fp32 master and fp32 states, with a remainder and
    a bf16 state, and with an fp32 master and states in 8 bits."""
    values = [_random(device, 1), _random(device, 2, (5,)), _random(device, 3, (300,))]
    for found_inf, stochastic in ((0.0, False), (0.0, True), (1.0, False)):
        params, grads = [x.bfloat16() for x in values], [x.half() for x in values]
        masters = [values[0].clone(), torch.arange(-2, 3, device=device).short(), values[2].clone()]
        m, v = ([torch.full_like(x, value) for x in values] for value in (0.1, 0.2))
        m[1] = m[1].bfloat16()
        m[2], m_scale = state8.encode(values[2], state8.SIGNED)
        v[2], v_scale = state8.encode(values[2].square(), state8.UNSIGNED)
        none = torch.empty(0, device=device)
        scales = [none, none, m_scale, none, none, v_scale][: 3 * states]
        lists = [params, grads, [*m, *v][: 3 * states], scales, [] if stochastic else masters]
        steps, lr = _tensor(device, [3.0, 0.0, 7.0]), _tensor(device, 1e-3, torch.float64)
        # A setting that is 0 or 1 is a flag, or has a case of its own.
        numbers = [1 - x if stochastic and x in (0, 1) else x for x in settings]
        options = [False, 1.5, stochastic, 2**40 + 7, [3, 0, 1], lr if stochastic else None]
        flags = _tensor(device, 0.5), _tensor(device, 0.25), _tensor(device, found_inf)
        yield [*lists, steps, 1e-3, numbers, *options, *flags]


def scale_from_amax(device: str) -> Iterator[Arguments]:
    amax = _tensor(device, [0.0, 1e-40, 1.0, 3.0, 448.0, math.inf, math.nan])
    for power_of_two in (True, False):
        scale, scale_inv = torch.full_like(amax, 2.0), torch.full_like(amax, 0.5)
        yield [scale, scale_inv, amax, torch.float8_e4m3fn, 0, power_of_two]


def inv_scale(device: str) -> Iterator[Arguments]:
    yield [_tensor(device, 3.0)]


def clip_coef(device: str) -> Iterator[Arguments]:
    yield [_tensor(device, 7.0, torch.float64), 1.0]
    yield [_tensor(device, [4.0, 0.25, 16.0], torch.float64), 1.0]


def update_scale(device: str) -> Iterator[Arguments]:
    for found_inf in (0.0, 1.0):
        trackers = _tensor(device, 1, torch.int32), _tensor(device, 1, torch.int32)
        counters = _tensor(device, [4, 5, 2], torch.int64)
        state = _tensor(device, 2.0**16), *trackers, counters, _tensor(device, found_inf)
        yield [*state, _tensor(device, 0.5), 2.0, 0.5, 20, 2.0**-24, math.inf, 1, 0.25]


def update_delayed_scales(device: str) -> Iterator[Arguments]:
    amaxes = (-1.0, 0.0, 3.0, math.inf, math.nan)  # not used, zero, plain, not recorded
    for most_recent in (False, True):
        histories = [_random(device, seed, (4,)).abs() for seed in range(len(amaxes))]
        scales = [_tensor(device, 2.0) for _ in amaxes]
        staged = [_tensor(device, amax) for amax in amaxes]
        yield [histories, scales, staged, [448.0, 57344.0] * 2 + [448.0], 1, True, most_recent]


def pack(device: str) -> Iterator[Arguments]:
    x = _random(device, 1, (20, 129))
    x[:3] = 0.0
    x[3], x[9, 0], x[13, 0], x[16, 0] = 0.1, math.nan, -math.inf, 1e-40
    for bits in (8, 4, 2):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            yield [x.to(dtype), bits, 2**40 + 7, 2**33 + bits]


def unpack(device: str) -> Iterator[Arguments]:
    ranges = _random(device, 1, (10, 2)).bfloat16()
    ranges[3, 1], ranges[7, 0] = 0.0, math.nan
    for bits in (8, 4, 2):
        codes = torch.arange((1153 * bits + 7) // 8, device=device).to(torch.uint8)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            yield [codes, ranges, bits, [1153], dtype]


def _in_blocks(device: str) -> torch.Tensor:
    """Blocks of different magnitudes, of zeros, with Inf and NaN, and odd lengths."""
    x = _random(device, 1, (70, 101)) * 2.0 ** torch.arange(-50, 51, device=device)
    x[3], x[9, 40], x[69, 100], x[17, 0], x[5] = 0.0, math.nan, math.inf, -1e38, 1e-40
    return x


def quantize_mx(device: str) -> Iterator[Arguments]:
    x = _in_blocks(device)
    seed = _tensor(device, [2**40 + 7], torch.int64)
    for i, fmt in enumerate(block_formats.BLOCK_FORMATS):
        nvfp4 = block_formats.BLOCK_FORMATS[fmt].nvfp4
        for j, mode in enumerate(("rceil",) if nvfp4 else block_formats.SCALE_MODES):
            dtype = (torch.float32, torch.bfloat16, torch.float16)[(i + j) % 3]
            yield [x.to(dtype), fmt, mode, j % 2 == 0, seed if j == 3 else None]
        yield [_random(device, 2, (2, 33)), fmt, "rceil", True, seed]


def dequantize_mx(device: str) -> Iterator[Arguments]:
    codes = torch.arange(7 * 101, device=device).to(torch.uint8).view(7, 101)
    one = _tensor(device, 0.37)
    for i, (fmt, block) in enumerate(block_formats.BLOCK_FORMATS.items()):
        columns = 101 * block_formats.per_byte(fmt) - i % 2
        columns = columns if block.element.bits == 4 else 101
        across = block_formats.sizes(fmt, columns)[1]
        scales = (torch.arange(7 * across, device=device) * 37 + 120).to(torch.uint8)
        scales = scales.view(7, across)
        data = codes.view(block.element.dtype)
        if block.nvfp4:
            scales = scales.view(torch.float8_e4m3fn)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            yield [data, scales, one if block.nvfp4 else None, fmt, columns, dtype]


def attention(device: str) -> Iterator[Arguments]:
    """Each query has a score of 0 for one key and -256 for others, whose weights are then 0."""
    generator = torch.Generator("cpu").manual_seed(0)
    features = torch.eye(17, 24, dtype=torch.float32, device="cpu") * 16
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q = (16 - features).expand(2, 4, 17, 24).to(device, dtype)
        v = torch.randint(-1, 2, (2, 2, 17, 24), generator=generator, device="cpu")
        for causal in (False, True):
            k = features if causal else features.roll(5, 0)
            yield [q, k.expand(2, 2, 17, 24).to(device, dtype), v.to(device, dtype), causal, -1.0]


def attention_backward(device: str) -> Iterator[Arguments]:
    generator = torch.Generator("cpu").manual_seed(1)
    for q, k, v, causal, scale in attention(device):
        drawn = torch.randint(-1, 2, (2, *q.shape), generator=generator, device="cpu")
        logsumexp = torch.zeros(q.shape[:3], dtype=torch.float32, device=device)
        g, out = drawn.to(device, q.dtype)
        yield [g.float() if causal else g, q, k, v, out, logsumexp, causal, scale]


def rotary(device: str) -> Iterator[Arguments]:
    cos, sin = (_random(device, seed, (9, 4)) for seed in (1, 2))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for interleaved in (False, True):
            yield [_random(device, 3, (2, 3, 9, 8)).to(dtype), cos, sin, interleaved]


def _casts(device: str) -> Iterator[Arguments]:
    """dtype, scale, transpose, granularity and power_of_two_scale of a fused op."""
    one = _tensor(device, 0.5)
    yield [torch.float32, None, False, "tensor", True]
    yield [torch.bfloat16, None, True, "tensor", True]
    yield [torch.float8_e4m3fn, None, True, "tensor", True]
    yield [torch.float8_e5m2, one, False, "tensor", True]
    yield [torch.float8_e4m3fn, None, True, "row", False]
    yield [torch.float8_e4m3fn, None, True, "block1x128", True]
    yield [torch.float8_e5m2, None, False, "block128x128", True]
    yield [torch.float8_e4m3fn, None, True, "mx", True]
    yield [torch.float8_e5m2, None, False, "mx", True]


def norm_quantize(device: str) -> Iterator[Arguments]:
    x, residual = _random(device, 1, (67, 257)), _random(device, 2, (67, 257))
    weight, bias = _random(device, 3, (257,)), _random(device, 4, (257,))
    x[7, 3], x[66, 256], x[5] = math.nan, math.inf, 0.0
    for i, cast in enumerate(_casts(device)):
        added, shift = residual if i % 2 else None, bias if i % 3 else None
        yield [x, added, None if i == 2 else weight, shift, 1e-5, i % 3 > 0, *cast]
    low = [t.bfloat16() for t in (x, residual, weight, bias)]
    yield [*low, 1e-5, True, torch.bfloat16, None, False, "tensor", True]


def norm_backward(device: str) -> Iterator[Arguments]:
    g, x, total = (_random(device, seed, (67, 257)) for seed in (1, 2, 3))
    g[7, 3], x[66, 256] = math.nan, math.inf
    weight, mean = _random(device, 4, (257,)), _random(device, 5, (67,))
    rstd = _random(device, 6, (67,)).abs()
    yield [g, x, weight, mean, rstd, total, True]
    yield [g.bfloat16(), x.bfloat16(), None, mean[:0], rstd, None, False]
    yield [g, x.half(), weight.half(), mean[:0], rstd, total.half(), False]


def act_quantize(device: str) -> Iterator[Arguments]:
    x, up = _random(device, 1, (130, 257)) * 8, _random(device, 2, (130, 257))
    x.view(-1)[: 9 * 7], up[100, 3] = _awkward(device), math.nan
    for i, cast in enumerate(_casts(device)):
        for kind in ("silu", "gelu", "gelu_tanh", "relu2")[i % 2 :: 2]:
            yield [x, None if i % 3 else up, kind, *cast]
    yield [x.bfloat16(), up.bfloat16(), "silu", torch.bfloat16, None, False, "tensor", True]


def act_backward(device: str) -> Iterator[Arguments]:
    for i, arguments in enumerate(act_quantize(device)):
        g = _random(device, 3, (130, 257))
        yield [g.bfloat16() if i % 2 else g, *arguments]
