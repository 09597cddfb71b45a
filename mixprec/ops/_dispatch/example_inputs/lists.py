"""Examples of the ops on lists of tensors: gradients, and updates of params.

Each list of one dtype has a tensor of aligned size, one of an odd size, and one whose memory begins
between multiples of 16 bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from ..._reference import state8
from .inputs import FLOATS, Arguments, awkward, integers, random, shifted, tensor

# Elements of a list's three tensors, more than a block of Triton's kernels and, of gradients whose
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
