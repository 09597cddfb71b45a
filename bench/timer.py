"""Interleaved timing: every candidate meets the same state of the machine."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

MIN_SAMPLES = 9


def _synchronize(device: str) -> None:
    """Wait for the device's queue; a CPU has none."""
    if device != "cpu":
        torch.get_device_module(device).synchronize()


def _seconds(run: Callable[[], Any], calls: int, device: str) -> float:
    """Seconds per call over `calls` calls in a row."""
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        run()
    _synchronize(device)
    return (time.perf_counter() - start) / calls


def _calls_per_sample(run: Callable[[], Any], min_time: float, device: str) -> int:
    """How many calls last about `min_time` seconds; also warms up."""
    run()
    calls = 1
    while True:
        seconds = _seconds(run, calls, device)
        if seconds * calls >= min_time:
            return calls
        calls = max(2 * calls, min(10 * calls, int(min_time / max(seconds, 1e-9))))


def interleave(
    candidates: Mapping[str, Callable[[], Any]],
    *,
    samples: int = MIN_SAMPLES,
    min_time: float = 0.02,
    device: str = "cpu",
    external: bool = False,
) -> dict[str, list[float]]:
    """Seconds per call, `samples` of each candidate, taken in turns.

    Each round times every candidate once and starts with another one, so that a slow moment of
    a shared machine, or what the predecessor left in the caches, hits all alike. A sample covers
    as many calls as fit in `min_time` seconds. external: a call returns its seconds itself.
    """
    if samples < MIN_SAMPLES:
        raise ValueError(f"interleave: samples must be at least {MIN_SAMPLES}, got {samples}")
    names = list(candidates)
    times: dict[str, list[float]] = {name: [] for name in names}
    calls = {
        n: 1 if external else _calls_per_sample(candidates[n], min_time, device) for n in names
    }
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection inside a sample would be charged to whoever ran then
    try:
        for i in range(samples):
            first = i % len(names)
            for name in names[first:] + names[:first]:
                run = candidates[name]
                times[name].append(run() if external else _seconds(run, calls[name], device))
    finally:
        if collecting:
            gc.enable()
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(samples) for name, samples in times.items()}
