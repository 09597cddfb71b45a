"""What is measured: one row per op and case, with its inputs, rivals and target.

Rows of a GPU are named "cuda/op/case"; their cases are in gpu_run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Medians = Mapping[str, float]  # seconds per call, by name; "ours", the rivals, and the floor
# What a row that counts its bytes is held against besides its rivals: a plain copy of as many.
FLOOR = "copy of the bytes"


def quantity(value: float, unit: str) -> str:
    """Three figures and the unit: "3.5x", "12 us"."""
    return f"{value:.3g}{unit if unit.startswith('x') else ' ' + unit}"


class NotMeasured(Exception):
    """Raised while a case is made: this machine cannot measure it, for the reason given."""


@dataclass(frozen=True)
class Target:
    """A figure to reach: `figure(medians)` in `unit`, at least or at most `value`."""

    value: float
    unit: str
    at_least: bool
    figure: Callable[[Medians], float]

    def met(self, figure: float) -> bool:
        return figure >= self.value if self.at_least else figure <= self.value

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {quantity(self.value, self.unit)}"


def best_rival(medians: Medians) -> str | None:
    """The name of the fastest rival, or None where the row has none."""
    rivals = (name for name in medians if name not in ("ours", FLOOR))
    return min(rivals, key=lambda name: medians[name], default=None)


def _speedup(medians: Medians) -> float:
    rival = best_rival(medians)
    assert rival is not None, "a speedup needs a rival"
    return medians[rival] / medians["ours"]


def times_faster(value: float) -> Target:
    """ours is `value` times as fast as the best rival, or more."""
    return Target(value, "x", True, _speedup)


def times_faster_than(rival: str, value: float) -> Target:
    """ours is `value` times as fast as the rival of this name, or more."""
    return Target(value, "x", True, lambda medians: medians[rival] / medians["ours"])


def times_the_time(value: float) -> Target:
    """ours takes at most `value` times the time of the best rival."""
    return Target(value, "x the time", False, lambda medians: 1.0 / _speedup(medians))


def at_most(value: float, unit: str, figure: Callable[[Medians], float] | None = None) -> Target:
    """ours (or a `figure` in seconds made of the medians) takes at most `value` us, ms or s."""
    per_second = {"us": 1e6, "ms": 1e3, "s": 1.0}[unit]
    seconds = figure if figure is not None else (lambda medians: medians["ours"])
    return Target(value, unit, False, lambda medians: seconds(medians) * per_second)


@dataclass
class Case:
    """One measurable case: the callables with their inputs bound, and how to see that they agree.

    check: None when ours gives the right values, else what is wrong in one line; it runs before
    any timing. flops, bytes: per call of ours, as an ideal program would need them. external:
    the callables return the seconds themselves (a subprocess that times its inside).
    """

    ours: Callable[[], Any]
    rivals: dict[str, Callable[[], Any]]
    check: Callable[[], str | None]
    flops: float = 0.0
    bytes: float = 0.0
    external: bool = False


@dataclass(frozen=True)
class Row:
    """One line of the table. name: "op/case"; make: builds the inputs when the row is run.

    target: None for a figure of the machine, not of ours. share: of the speed of a plain copy,
    which has to be reached too. bytes, flops: of the case, where they are known beforehand.
    """

    name: str
    what: str
    target: Target | None
    make: Callable[[], Any] = field(repr=False)
    device: str = "cpu"
    quick: bool = False  # also part of a --quick run
    share: float | None = None
    bytes: float = 0.0
    flops: float = 0.0

    @property
    def op(self) -> str:
        return self.name.removeprefix("cuda/").split("/", 1)[0]


ROWS: dict[str, Row] = {}


def row(
    name: str, what: str, target: Target | None, **more: Any
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register the decorated function, which makes the case, as the row `name`; more: of Row."""

    def register(make: Callable[[], Any]) -> Callable[[], Any]:
        if name in ROWS:
            raise ValueError(f"row: name must be unique, got {name!r} twice")
        ROWS[name] = Row(name, what, target, make, **more)
        return make

    return register


def select(words: Iterable[str], *, device: str | None = None, quick: bool = False) -> list[Row]:
    """The rows that `words` name, in order: an op ("gemm"), the start of a name ("gemm/fp16") or
    a whole name; all rows if there are no words. ValueError for a word that names no row."""
    words = [w.rstrip("/") for w in words]
    for word in words:
        if not any(_names(word, r) for r in ROWS.values()):
            ops = ", ".join(dict.fromkeys(r.name.split("/", 1)[0] for r in ROWS.values()))
            raise ValueError(f"bench: op must be one of {ops} (or a row's name), got {word!r}")
    return [
        r
        for r in ROWS.values()
        if (not words or any(_names(w, r) for w in words))
        and (device is None or r.device == device)
        and (r.quick or not quick)
    ]


def _names(word: str, row: Row) -> bool:
    return row.name == word or row.name.startswith(word + "/")
