"""A clock for the timer of mixprec.bench: a GPU whose time passes only in the work it is given."""

from __future__ import annotations


class SimulatedClock:
    """A GPU that works through its queue while the host's own time goes on."""

    def __init__(self) -> None:
        self.now = self.free = 0.0  # the host's time, and when the queue is empty

    def host(self) -> float:
        return self.now

    def work(self, host: float, kernel: float) -> None:
        self.now += host
        self.free = max(self.free, self.now) + kernel

    def delay(self, seconds: float) -> None:
        self.work(1e-6, seconds)

    def mark(self) -> float:
        self.now += 1e-6
        return max(self.free, self.now)

    def reached(self, mark: float) -> bool:
        return self.now >= mark

    def between(self, first: float, last: float) -> float:
        self.now = max(self.now, last)
        return last - first

    def synchronize(self) -> None:
        self.now = max(self.now, self.free)
