"""Examples of the fused ops."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from .inputs import FLOATS, Arguments, awkward, integers, random, tensor

# Several tiles across, several bands of rows, several tiles down.
NORMS, NORM_GRADS, ACTIVATIONS, CLASSES = (
    ((32, 272), (27, 257)),
    ((80, 272), (67, 257)),
    ((144, 80), (131, 77)),
    ((32, 1040), (27, 1031)),
)


def _casts(device: str) -> Iterator[Arguments]:
    """dtype, scale, transpose, granularity and power_of_two_scale of a fused op."""
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


def cross_entropy(device: str) -> Iterator[Arguments]:
    """Exponentials are 1 or 0, whose sums are exact, as are those of the logits."""
    for n, t in CLASSES:
        drawn = integers(device, (n, t), torch.float32)
        logits = (drawn > 0).float() * 258.0 - 256.0
        logits[3] = -math.inf
        rows = tensor(device, [-math.inf, 0.0, math.nan, 0.0]).repeat(n, 1)
        rows[1::2] = tensor(device, [2.0, 3.0, 2.0, -6.0])
        target = (torch.arange(n, device=device) * 37) % (2 * t) - 1
        yield [logits, target, rows, 0, 0.0]
        yield [logits, target, rows, t, 0.0]


def cross_entropy_backward(device: str) -> Iterator[Arguments]:
    for n, t in CLASSES:
        logits = random(device, 1, (n, t)) * 8
        logits[7, 3], logits[-1, -1], logits[2, 2] = math.nan, -math.inf, 300.0
        logsumexp, weight = random(device, 2, (n,)) + 16, random(device, 3, (n,))
        weight[5] = 0.0
        target = (torch.arange(n, device=device) * 37) % (2 * t) - 1
        for i, dtype in enumerate(FLOATS):
            settings = (0.1, 1e-3, 30.0) if i else (0.0, 0.0, 0.0)
            yield [logits, target, logsumexp, weight, t * (i % 2), 3 * t, *settings, dtype]
