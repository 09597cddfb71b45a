"""The largest batch that fits: up from one that does, then halving what is left between."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple


class Largest(NamedTuple):
    """batch: the largest that was seen to fit. bounded: a larger one may fit, time or `most` ended
    the search."""

    batch: int
    bounded: bool


def largest(
    fits: Callable[[int], bool],
    known: int,
    *,
    step: int,
    until: float,
    most: int,
    guess: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Largest:
    """The largest multiple of `step`, up to `most`, for which fits(batch); or `known`, which fits,
    if that is larger.

    Without a guess the batch doubles until it does not fit. With one, the search starts there and
    goes up or down from it in strides that start at a 32nd of it and double. No try begins after
    clock() has reached `until`.
    """
    low, high = known, most // step * step + step  # fits; taken not to fit
    first = high
    stride, probe = 2 * known, 2 * known
    if guess is not None and guess // step * step > known:
        probe = guess
        stride = max(step, guess // 32)
    while True:
        least = low // step * step + step
        probe = min(max(probe // step * step, least), high - step)
        if probe < least:
            return Largest(low, bounded=high == first)
        if clock() >= until:
            return Largest(low, bounded=True)
        if fits(probe):
            low = probe
        else:
            high = probe
        if high == first:
            probe = low + stride
        elif low == known:
            probe = high - stride if high - stride > low else (low + high) // 2
        else:
            probe = (low + high) // 2
        stride *= 2
