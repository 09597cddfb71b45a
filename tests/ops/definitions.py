"""The ops by the rules of tests/independent*.py, in NumPy, with the arguments of their schemas."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import independent as ind
import independent_mx as mx
import numpy as np
import torch
from cases import from_bits

from mixprec.ops._dispatch.op import OPS
from mixprec.ops._reference import state8

F32 = np.float32
SIDES = {"row": (1, 0), "block1x128": (1, 128), "block128x128": (128, 128)}
PLAIN = (torch.float32, None, False, "tensor", True)  # the cast of a fused op that casts nothing


def filled(bits: np.ndarray, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of these bits, in their shape or another one."""
    return from_bits(bits, dtype).reshape(shape or bits.shape)


def number(value: Any) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def fp32(x: np.ndarray, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.array(x, F32).reshape(shape or np.shape(x)))


def matrix(x: torch.Tensor) -> torch.Tensor:
    """As [M, K]: leading dimensions are flattened, no dimension is [1, 1]."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1] if x.dim() else 1)


def amax(x: torch.Tensor) -> torch.Tensor:
    return number(ind.amax(x))


def scales_of_blocks(x: torch.Tensor, spec: ind.Spec, sides: tuple[int, int], two: bool) -> Any:
    """The scale of each block, and of each element."""
    (m, k), height, width = x.shape, sides[0], sides[1] or max(x.shape[1], 1)
    magnitude = np.abs(ind.values(x))
    scales = np.ones((-(-m // height), -(-k // width) if sides[1] else 1), F32)
    for i, j in product(*map(range, scales.shape)):
        block = magnitude[i * height : (i + 1) * height, j * width : (j + 1) * width]
        scales[i, j] = ind.scale_of(block.max(initial=0.0), spec.max, power_of_two=two)
    return scales, np.kron(scales, np.ones((height, width), F32))[:m, :k]


def quantize(
    x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None, transpose: bool,
    granularity: str, two: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Also with what only the fused ops take: dtype float32, granularity "mx"."""
    rows, largest = matrix(x), amax(x)
    nothing = torch.zeros(0, 0, dtype=dtype), torch.zeros(0)
    if granularity == "mx":
        fmt = f"mxfp8_{ind.BY_DTYPE[dtype].name}"
        return *quantize_mx(x, fmt, "rceil", transpose, None)[:4], largest
    if granularity != "tensor":
        results: list[torch.Tensor] = []
        for part in (rows, rows.t())[: 1 + transpose]:
            spec = ind.BY_DTYPE[dtype]
            scales, of_each = scales_of_blocks(part, spec, SIDES[granularity], two)
            results += [filled(ind.cast(part, of_each, spec), dtype), fp32(1 / scales)]
        data, scale_inv, data_t, scale_inv_t = [*results, *nothing][:4]
        return data.reshape(x.shape), data_t, scale_inv, scale_inv_t, largest
    used = 0.0 if scale is None else scale.item()
    if used == 0:
        fp8 = dtype.itemsize == 1
        used = ind.scale_of(largest.item(), ind.BY_DTYPE[dtype].max, 0, two) if fp8 else 1.0
    elif not 2.0**-126 <= used <= 2.0**126:
        used = math.nan
    if dtype == torch.float32:
        codes = ind.narrow(ind.values(rows), dtype)
    else:
        codes = ind.cast(rows, used, ind.BY_DTYPE[dtype])
    data_t = filled(codes.T, dtype, *codes.T.shape) if transpose else nothing[0]
    scale_inv = number(F32(1) / F32(used))
    return filled(codes, dtype).reshape(x.shape), data_t, scale_inv, nothing[1], largest


def dequantize(data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rows, s = ind.values(matrix(data)), ind.values(scale_inv).astype(F32)
    m, k = rows.shape
    if s.size == 1:
        of_each = s.reshape(1, 1)
    else:  # of a row and of a block
        at = [i if s.shape[0] == m else i // 128 for i in range(m)]
        of_each = s[np.ix_(at, [j // 128 if s.shape[1] > 1 else 0 for j in range(k)])]
    with np.errstate(all="ignore"):
        return filled(ind.narrow(rows.astype(F32) * of_each, dtype), dtype).reshape(data.shape)


def quantize_mx(
    x: torch.Tensor, fmt: str, mode: str, transpose: bool, seed: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    (spec, size), rows = mx.BLOCKS[fmt], ind.values(matrix(x))
    results: list[torch.Tensor] = []
    kind = torch.float8_e4m3fn if fmt == "nvfp4" else torch.uint8
    for stream, part in enumerate((rows, rows.T)[: 1 + transpose]):
        count = part.shape[0] * -(-part.shape[1] // size) * size
        random = None if seed is None else ind.random16(count, seed.item(), 0, 0, stream)
        codes, scales, of_tensor = mx.quantize(part, fmt, mode, ind.amax(x), random)
        results += [filled(codes, spec.dtype), filled(scales, kind)]
    results += [torch.zeros(0, 0, dtype=spec.dtype), torch.zeros(0, dtype=kind)]
    data, scale_inv, data_t, scale_inv_t = results[:4]
    data = data.reshape((*x.shape[:-1], data.shape[-1]) if x.dim() else ())
    of_tensor = torch.zeros(0) if of_tensor is None else number(of_tensor)
    return data, data_t, scale_inv, scale_inv_t, of_tensor, amax(x)


def dequantize_mx(
    data: torch.Tensor, scale_inv: torch.Tensor, tensor_inv: torch.Tensor | None, fmt: str,
    columns: int, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    codes, scales = (t.contiguous().view(torch.uint8).numpy() for t in (matrix(data), scale_inv))
    of_tensor = None if tensor_inv is None else tensor_inv.item()
    want = ind.narrow(mx.dequantize(codes, scales, of_tensor, fmt, columns), dtype)
    return filled(want, dtype).reshape((*data.shape[:-1], columns) if data.dim() else ())


def note(
    grads: list[torch.Tensor], factor: float | None, found_inf: torch.Tensor,
    counts: torch.Tensor | None, rounded: bool,
) -> None:  # fmt: skip
    kinds = [ind.grad_counts(g, factor, rounded) for g in grads]
    if any(inf or nan for inf, nan, *_ in kinds):
        found_inf.fill_(1.0)
    if counts is not None:
        counts.copy_(torch.tensor(kinds, dtype=torch.int64).view(-1, 4))


def unscale_(
    grads: list[torch.Tensor], inv_scale: torch.Tensor, found_inf: torch.Tensor,
    counts: torch.Tensor | None,
) -> None:  # fmt: skip
    note(grads, inv_scale.item(), found_inf, counts, rounded=True)
    for grad in grads:
        grad.copy_(filled(ind.unscale(grad, inv_scale.item())[0], grad.dtype))


def grad_stats_(
    grads: list[torch.Tensor], inv_scale: torch.Tensor | None, found_inf: torch.Tensor,
    sum_sq: torch.Tensor, counts: torch.Tensor | None,
) -> None:  # fmt: skip
    factor = None if inv_scale is None else inv_scale.item()
    note(grads, factor, found_inf, counts, rounded=False)
    for i, grad in enumerate(grads):
        with np.errstate(all="ignore"):
            try:
                sum_sq[i] = ind.sum_of_squares([grad], factor)
            except OverflowError:
                sum_sq[i] = math.inf


def scale_from_amax_(
    scale: torch.Tensor, scale_inv: torch.Tensor, amax: torch.Tensor, dtype: torch.dtype,
    margin: int, two: bool,
) -> None:  # fmt: skip
    pairs, most = zip(ind.values(amax).flat, ind.values(scale).flat, strict=True), ind.BY_DTYPE
    scales = [ind.scale_of(a, most[dtype].max, margin, two, previous=s) for a, s in pairs]
    want = np.array(scales, F32).reshape(tuple(scale.shape))
    scale.copy_(fp32(want))
    scale_inv.copy_(fp32(F32(1) / want))


@np.errstate(all="ignore")
def inv_scale(scale: torch.Tensor) -> torch.Tensor:
    return fp32(F32(1) / ind.values(scale).astype(F32))


@np.errstate(all="ignore")
def clip_coef(sum_sq: torch.Tensor, max_norm: float) -> torch.Tensor:
    norm = np.sqrt(np.float64(math.fsum(ind.values(sum_sq).flat)))
    return fp32(np.minimum(1.0, max_norm / (norm + 1e-6)))


@np.errstate(all="ignore")
def update_scale_(
    scale: torch.Tensor, growth: torch.Tensor, left: torch.Tensor, counters: torch.Tensor,
    found_inf: torch.Tensor, underflow: torch.Tensor | None, growth_factor: float,
    backoff_factor: float, interval: int, min_scale: float, max_scale: float, hysteresis: int,
    grow_on_underflow: float,
) -> None:  # fmt: skip
    now, hit = scale.item(), found_inf.item() != 0
    skipped, applied, in_a_row = counters.tolist()
    counters.copy_(torch.tensor([skipped + hit, applied + (not hit), in_a_row + 1 if hit else 0]))
    if hit:
        growth.zero_()
        left.copy_((left - 1).clamp(min=0))
        if left == 0:
            lower = np.maximum(np.float64(F32(now * backoff_factor)), min_scale)
            scale.fill_(np.minimum(now, lower))
        return
    early = underflow is not None and underflow.item() > F32(grow_on_underflow)
    growth += 1
    if growth.item() >= interval / (20 if early else 1):
        higher = np.minimum(np.float64(F32(now * growth_factor)), max_scale)
        if np.isfinite(higher):
            scale.fill_(np.maximum(now, higher))
        growth.zero_()
        left.fill_(hysteresis)


UPDATES: dict[str, tuple[Callable[..., Any], str]] = {
    "adamw_": (ind.adamw, "beta1 beta2 eps weight_decay decoupled_weight_decay"),
    "sgd_": (ind.sgd, "momentum dampening weight_decay nesterov"),
    "lion_": (ind.lion, "beta1 beta2 weight_decay"),
    "muon_direction_": (ind.muon_direction, "momentum nesterov"),
}
KINDS = (state8.SIGNED, state8.UNSIGNED)  # of the first state, of the second


def update_(
    op: str, params: list[torch.Tensor], grads: list[torch.Tensor], states: list[torch.Tensor],
    state_scales: list[torch.Tensor], masters: list[torch.Tensor], steps: torch.Tensor, lr: float,
    settings: list[float], maximize: bool, max_value: float, stochastic: bool, seed: int,
    indices: list[int], lr_tensor: torch.Tensor | None, inv_scale: torch.Tensor | None,
    clip: torch.Tensor | None, found_inf: torch.Tensor | None,
) -> None:  # fmt: skip
    if found_inf is not None and found_inf.item() != 0:
        return
    steps += 1
    formula, names = UPDATES[op]
    options = dict(zip(names.split(), settings, strict=True))
    options |= {"maximize": maximize, "max_value": max_value, "lr": lr}
    given = {"lr": lr_tensor, "inv_scale": inv_scale, "clip": clip}
    options |= {name: t.item() for name, t in given.items() if t is not None}
    for i, param in enumerate(params):
        step, real = int(steps[i]), np.float64 if param.dtype == torch.float64 else F32
        mine, scales = states[i :: len(params)], state_scales[i :: len(params)]
        master = masters[i] if masters else None

        def random(stream: int, count: int, i: int = i, step: int = step) -> np.ndarray:
            return ind.random16(count, seed & 2**64 - 1, step, indices[i], stream)

        before = [
            s if s.dtype != torch.uint8 else state8.decode(s, scale, KINDS[k])
            for k, (s, scale) in enumerate(zip(mine, scales, strict=True))
        ]
        p, *after = formula(
            ind.values(held(param, master)), ind.values(grads[i]),
            *([ind.values(s) for s in before] or [None] * (op == "sgd_")),
            step, real=real, **options,
        )  # fmt: skip
        for k, state in enumerate(mine):
            if state.dtype == torch.uint8:
                of_block = random(3, 2 * len(scales[k]))[k::2]
                bits = random(1 + k, state8.BLOCK).astype(np.int64) + of_block[:, None] & 0xFFFF
                codes, scale = state8.encode(
                    fp32(after[k], *state.shape), KINDS[k], torch.from_numpy(bits)
                )
                scales[k].copy_(scale)
                state.copy_(codes)
            else:
                bits = random(1 + k, state.numel()) if state.dtype == torch.bfloat16 else None
                write(state, after[k], bits)
        if master is not None and master.dtype == torch.int16:
            write_with_remainder(param, master, p)
            continue
        at_random = stochastic and master is None and param.dtype == torch.bfloat16
        write(param, p, random(0, param.numel()) if at_random else None)
        if master is not None:
            write(master, p, None)


def write(t: torch.Tensor, x: np.ndarray, bits: np.ndarray | None) -> None:
    with np.errstate(all="ignore"):
        codes = ind.narrow(x, t.dtype) if bits is None else ind.stochastic_bf16(x, bits)
    t.copy_(filled(codes, t.dtype).reshape(t.shape))


def held(param: torch.Tensor, master: torch.Tensor | None) -> torch.Tensor:
    """What is updated: the master, which may be the param and its remainder, or the param. One that
    other code set to 0 stays that."""
    if master is None or master.dtype != torch.int16:
        return param if master is None else master
    low = master.numpy().astype(np.int64)
    low = np.where((ind.values(param) == 0) & (low < 0), 0, low)
    code = (ind.bits(param).astype(np.int64) << 16) + low & 0xFFFFFFFF
    return fp32(code.astype(np.uint32).view(F32))


def write_with_remainder(param: torch.Tensor, remainder: torch.Tensor, p: np.ndarray) -> None:
    code = np.array(p, F32).view(np.uint32).astype(np.int64)
    high = code + 0x8000 >> 16
    nan = np.isnan(p)
    high, low = np.where(nan, 0x7FC0, high), np.where(nan, 0, code - (high << 16))
    param.copy_(filled(high.astype(np.uint16), torch.bfloat16).reshape(param.shape))
    remainder.copy_(torch.from_numpy(low.astype(np.int16)).reshape(remainder.shape))


def row_sums(x: np.ndarray) -> np.ndarray:
    """[M, 1]: one FP32 addition after the other, in the defined order."""
    partial = np.zeros((len(x), 256), F32)
    for first in range(0, x.shape[1], 256):
        part = x[:, first : first + 256]
        partial[:, : part.shape[1]] += part
    while partial.shape[1] > 1:
        left, right = np.split(partial, 2, axis=1)
        partial = left + right
    return partial


def column_sums(x: np.ndarray) -> torch.Tensor:
    total = np.zeros(x.shape[1], F32)
    for band in range(0, len(x), 64):
        of_band = np.zeros(x.shape[1], F32)
        for row in x[band : band + 64]:
            of_band = of_band + row
        total = total + of_band
    return fp32(total)


def wide(x: torch.Tensor | None) -> Any:
    """As [M, K] in FP32."""
    return None if x is None else ind.values(matrix(x)).astype(F32)


@np.errstate(all="ignore")
def norm_quantize(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None,
    bias: torch.Tensor | None, eps: float, subtract_mean: bool, *cast: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    rows, total, mean, k = wide(x), torch.zeros(0, dtype=x.dtype), torch.zeros(0), F32(x.shape[-1])
    if residual is not None:
        total = filled(ind.narrow(rows + wide(residual), x.dtype), x.dtype).reshape(x.shape)
        rows = wide(total)
    if subtract_mean:
        average = row_sums(rows) / k
        rows, mean = rows - average, fp32(average, len(rows))
    variance = row_sums(rows * rows) / k
    rstd = np.where(np.isinf(variance), F32(np.nan), F32(1) / np.sqrt(variance + F32(eps)))
    y = rows * rstd
    y = y if weight is None else y * wide(weight)
    y = y if bias is None else y + wide(bias)
    return *quantize(fp32(y, *x.shape), *cast), total, mean, fp32(rstd, len(rows))


@np.errstate(all="ignore")
def norm_backward(
    g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, mean: torch.Tensor,
    rstd: torch.Tensor, g_total: torch.Tensor | None, with_bias: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    of_y, rows, r, k = wide(g), wide(x), ind.values(rstd).astype(F32)[:, None], F32(x.shape[-1])
    xhat = (rows - ind.values(mean).astype(F32)[:, None] if len(mean) else rows) * r
    gw = of_y if weight is None else of_y * wide(weight)
    centred = gw - row_sums(gw) / k if len(mean) else gw
    dx = (centred - xhat * (row_sums(gw * xhat) / k)) * r
    dx = dx if g_total is None else dx + wide(g_total)
    nothing = torch.zeros(0)
    return (
        filled(ind.narrow(dx, x.dtype), x.dtype).reshape(x.shape),
        nothing if weight is None else column_sums(of_y * xhat),
        column_sums(of_y) if with_bias else nothing,
    )


def act_quantize(
    x: torch.Tensor, up: torch.Tensor | None, kind: str, *cast: Any
) -> tuple[torch.Tensor, ...]:
    """The activation itself is the reference's: test_act_quantize.py has its values."""
    y = wide(OPS["act_quantize"].handle("reference")(x, None, kind, *PLAIN)[0])
    with np.errstate(all="ignore"):
        return quantize(fp32(y if up is None else y * wide(up), *x.shape), *cast)


@np.errstate(all="ignore")
def act_backward(
    g: torch.Tensor, x: torch.Tensor, up: torch.Tensor | None, kind: str, *cast: Any
) -> tuple[torch.Tensor, ...]:
    one = torch.ones(x.shape)
    slope = wide(OPS["act_backward"].handle("reference")(one, x, None, kind, *PLAIN)[0])
    value = wide(OPS["act_quantize"].handle("reference")(x, None, kind, *PLAIN)[0])
    of_y = wide(g)
    if up is None:
        data = (torch.zeros(shape, dtype=cast[0]) for shape in ((0,), (0, 0)))
        numbers = (torch.zeros(0) for _ in range(3))
        return *quantize(fp32(of_y * slope, *x.shape), *cast), *data, *numbers
    dx, dup = (fp32(t, *x.shape) for t in (of_y * wide(up) * slope, of_y * value))
    return *quantize(dx, *cast), *quantize(dup, cast[0], None, *cast[2:])


DEFINITIONS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (amax, quantize, dequantize, quantize_mx, dequantize_mx, unscale_, grad_stats_,
              scale_from_amax_, inv_scale, clip_coef, update_scale_, norm_quantize, norm_backward,
              act_quantize, act_backward)
} | {op: partial(update_, op) for op in UPDATES}  # fmt: skip
