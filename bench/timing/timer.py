"""Interleaved timing: every candidate meets the same state of the machine.

Candidates take turns, sample by sample, and every call takes the next set of buffers. On a GPU
calls are queued behind a delay, so that it finds all of a sample's work waiting and never waits for
Python: events at its ends then hold the time of the kernels alone. How long Python took to queue a
call is noted beside it.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

MIN_SAMPLES = 9  # also when a case's time is up
SAMPLES = 40
SAMPLE_SECONDS = 1e-3  # the least that a sample lasts; events resolve half a microsecond
MAX_CALLS = 64  # per sample: a GPU's queue holds about a thousand launches
MAX_DELAY = 0.05
SETTLE = 3.0  # seconds until the clocks have settled under load


@dataclass(frozen=True)
class Budget:
    """How long a case is measured: samples of each candidate, seconds for all of them together, and
    the least that a sample lasts with the most calls in it."""

    samples: int = SAMPLES
    seconds: float = 10.0
    sample_seconds: float = SAMPLE_SECONDS
    max_calls: int = MAX_CALLS


BUDGET = Budget()


class Clock:
    """A queue of work and the times at its marks. On the CPU a call returns when it is done."""

    host = staticmethod(time.perf_counter)
    mark = staticmethod(time.perf_counter)

    def delay(self, seconds: float) -> None:
        pass

    def reached(self, mark: float) -> bool:
        return False

    def between(self, first: float, last: float) -> float:
        return last - first

    def synchronize(self) -> None:
        pass


class CudaClock(Clock):
    def __init__(self) -> None:
        cycles = 20_000_000
        torch.cuda._sleep(1)  # loaded by its first call
        first = self.mark()
        torch.cuda._sleep(cycles)
        self._cycles_per_second = cycles / self.between(first, self.mark())

    def delay(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * self._cycles_per_second))

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def reached(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def between(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        last.synchronize()
        return first.elapsed_time(last) * 1e-3

    def synchronize(self) -> None:
        torch.cuda.synchronize()


@dataclass
class Candidate:
    """run(*arguments[i]) works on the i-th set of buffers; without `arguments`, run(i) does.

    around: a context that every sample is taken in.
    """

    run: Callable[..., Any]
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    arguments: Sequence[tuple[Any, ...]] | None = None


@dataclass
class Times:
    """Of one candidate, seconds per call: on the device, and for Python to queue it.

    waits: the device reached the calls before all were queued, again and again: its times then
    hold Python's as well (a host sync inside, or more launches than the queue holds).
    """

    kernel: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    calls: int = 1
    waits: bool = False


class _Turn:
    """One candidate between samples: how many calls, behind which delay, on which buffers."""

    def __init__(self, candidate: Candidate, sets: int, outputs: list[Any], clock: Clock) -> None:
        self.candidate, self.outputs, self.clock = candidate, outputs, clock
        arguments = candidate.arguments or [(i,) for i in range(sets)]
        self.sets = itertools.cycle(enumerate(arguments))
        self.late = 0
        self.times = Times()
        self.delay = 0.0

    def calibrate(self, sets: int, budget: Budget) -> None:
        """Warm up, and find how many calls a sample takes."""
        for _ in range(max(2, sets)):  # code loaded, memory there, every set touched
            _, host = self.sample()
        times = self.times
        while True:
            self.delay = min(MAX_DELAY, 1.5 * host * times.calls + 50e-6)
            seconds, host = self.sample()
            long_enough = seconds * (times.calls + 0.5) >= budget.sample_seconds
            if times.calls >= budget.max_calls or long_enough:
                break
            wanted = int(budget.sample_seconds / max(seconds, 1e-9))
            wanted = max(2 * times.calls, min(10 * times.calls, wanted))
            # As many as are queued while the longest delay lasts.
            most = min(budget.max_calls, int(MAX_DELAY / (1.5 * max(host, 1e-9))))
            if most <= times.calls:
                break
            times.calls = min(most, wanted)
        self.late = 0

    def sample(self) -> tuple[float, float]:
        """Seconds per call, on the device and to queue it. Waits for the device: what a sample
        queues must never find the queue full."""
        clock, calls, run, outputs = self.clock, self.times.calls, self.candidate.run, self.outputs
        with self.candidate.around():
            clock.delay(self.delay)
            first, before = clock.mark(), clock.host()
            for i, arguments in itertools.islice(self.sets, calls):
                # Kept until this set's turn comes again, so that outputs move through memory, too;
                # then freed first: else each call may get memory that the system has to clear.
                outputs[i] = None
                outputs[i] = run(*arguments)
            host = (clock.host() - before) / calls
            late = clock.reached(first)
        kernel = clock.between(first, clock.mark()) / calls
        if late and host > kernel / 2:
            self.late += 1
            self.delay = min(MAX_DELAY, 2 * self.delay)
        return kernel, host


def interleave(
    candidates: Mapping[str, Candidate],
    *,
    clock: Clock,
    sets: int = 1,
    budget: Budget = BUDGET,
    external: bool = False,
) -> dict[str, Times]:
    """Times of every candidate, in turns that start with another one each round, so that a slow
    moment, or what the predecessor left in the caches, hits all alike.

    A case short of time has fewer samples, MIN_SAMPLES at least. external: a call returns its
    seconds itself.
    """
    start = clock.host()
    outputs: list[Any] = [None] * sets
    turns = {name: _Turn(c, sets, outputs, clock) for name, c in candidates.items()}
    for turn in turns.values():
        if not external:
            turn.calibrate(sets, budget)
    names = list(turns)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection inside a sample would be charged to whoever ran then
    try:
        for i in range(max(budget.samples, MIN_SAMPLES)):
            if i >= MIN_SAMPLES and clock.host() - start > budget.seconds:
                break
            first = i % len(names)
            for name in names[first:] + names[:first]:
                kernel, host = turns[name].sample()
                turns[name].times.kernel.append(outputs[0] if external else kernel)
                turns[name].times.host.append(host)
    finally:
        if collecting:
            gc.enable()
    for turn in turns.values():
        turn.times.waits = turn.late > len(turn.times.kernel) / 2
    return {name: turn.times for name, turn in turns.items()}


def settle(work: Callable[[], Any], clock: Clock, seconds: float = SETTLE) -> None:
    """Keep the device busy until its clocks no longer move."""
    until = clock.host() + seconds
    while clock.host() < until:
        for _ in range(20):
            work()
        clock.synchronize()


def medians(times: Mapping[str, Times], *, host: bool = False) -> dict[str, float]:
    return {n: statistics.median(t.host if host else t.kernel) for n, t in times.items()}
