"""What is measured: one case per op and situation, with its inputs, baselines and target.

Cases of a GPU are named "cuda/op/situation".
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Medians = Mapping[str, float]  # seconds per call, by name; "ours", the baselines, and the copy
# What a case that counts its bytes is held against besides its baselines: a copy of as many.
COPY = "copy of the bytes"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GPU_DTYPES = {**DTYPES, "fp16": torch.float16}  # whose conversions are instructions of their own


def quantity(value: float, unit: str) -> str:
    """Three figures and the unit: "3.5x", "12 us"."""
    return f"{value:.3g}{unit if unit.startswith('x') else ' ' + unit}"


class NotMeasured(Exception):
    """Raised while a workload is made: this machine cannot measure it, for the reason given."""


def example(name: str) -> Any:
    """A module of examples/, which is in a clone, or in PYTHONPATH beside an installed package."""
    folder = str(Path(__file__).resolve().parents[2] / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise NotMeasured(f"this needs examples/{name}.py of a clone of the project") from None


def both_passes(
    forward: Callable[[], torch.Tensor], leaves: list[torch.Tensor], grad: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The result of `forward`, and the gradients of `leaves` from that of the result."""
    y = forward()
    return y.detach(), *torch.autograd.grad(y, leaves, grad)


_DONTNEED, _NOHUGEPAGE = 4, 15  # of madvise
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def with_fresh_results(run: Callable[..., Any]) -> Callable[..., None]:
    """`run`, whose results lose their pages after each call, so that the next one writes to memory
    that the system has yet to provide, as where results are kept or malloc gives memory back."""
    if not sys.platform.startswith("linux"):
        raise NotMeasured("only Linux is asked to take pages back")
    madvise = ctypes.CDLL(None).madvise
    only_where_asked = _HUGE_PAGES.exists() and "[madvise]" in _HUGE_PAGES.read_text()

    def fresh(*args: Any) -> None:
        for t in run(*args):
            if not isinstance(t, torch.Tensor) or t.nbytes < 1 << 20:
                continue
            first = -(-t.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            size = (t.data_ptr() + t.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
            for advice in (_DONTNEED, *([_NOHUGEPAGE] if only_where_asked else ())):
                madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice)

    return fresh


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


def baselines(medians: Medians) -> dict[str, float]:
    return {n: seconds for n, seconds in medians.items() if n not in ("ours", COPY)}


def best_baseline(medians: Medians) -> str | None:
    """The name of the fastest baseline, or None where the case has none."""
    found = baselines(medians)
    return min(found, key=lambda name: found[name], default=None)


def _speedup(medians: Medians) -> float:
    """KeyError without a baseline."""
    name = best_baseline(medians)
    if name is None:
        raise KeyError("a speedup needs a baseline")
    return medians[name] / medians["ours"]


def times_faster(value: float) -> Target:
    """ours is `value` times as fast as the best baseline, or more."""
    return Target(value, "x", True, _speedup)


def times_faster_than(baseline: str, value: float) -> Target:
    """ours is `value` times as fast as the baseline of this name, or more."""
    return Target(value, "x", True, lambda medians: medians[baseline] / medians["ours"])


def times_the_time(value: float) -> Target:
    """ours takes at most `value` times the time of the best baseline."""
    return Target(value, "x the time", False, lambda medians: 1.0 / _speedup(medians))


def at_most(value: float, unit: str, figure: Callable[[Medians], float] | None = None) -> Target:
    """ours (or a `figure` in seconds made of the medians) takes at most `value` us, ms or s."""
    per_second = {"us": 1e6, "ms": 1e3, "s": 1.0}[unit]
    seconds = figure if figure is not None else (lambda medians: medians["ours"])
    return Target(value, unit, False, lambda medians: seconds(medians) * per_second)


@dataclass
class Workload:
    """What a case runs: callables, and how to see that they agree.

    ours and baselines take what `inputs` made, inputs(i) being the i-th set; nothing without it.
    check: None when ours gives the right values, else what is wrong in one line; it runs before any
    timing, under each backend. flops, bytes: per call of ours, as an ideal program would need them.
    ops: those whose GPU kernels are measured, one backend after another, the main op first; none:
    only the backend that a user gets. arguments: of the main op's schema, where its variant is
    chosen call by call. host: the case is about the time that Python takes. external: the callables
    return the seconds themselves (a subprocess that times its inside).
    """

    ours: Callable[..., Any]
    baselines: dict[str, Callable[..., Any]]
    check: Callable[[], str | None]
    inputs: Callable[[int], Any] | None = None
    ops: tuple[str, ...] = ()
    flops: float = 0.0
    bytes: float = 0.0
    arguments: Callable[[Any], tuple[Any, ...]] | None = None
    host: bool = False
    external: bool = False


@dataclass(frozen=True)
class Case:
    """One line of the table. name: "op/situation"; make: builds the workload when the case is run.

    target: None for a figure of the machine, not of ours. share: of the speed of a plain copy,
    which has to be reached too.
    """

    name: str
    what: str
    target: Target | None
    make: Callable[[], Workload] = field(repr=False)
    device: str = "cpu"
    quick: bool = False  # also part of a --quick run
    share: float | None = None

    @property
    def op(self) -> str:
        return self.name.removeprefix("cuda/").split("/", 1)[0]


CASES: dict[str, Case] = {}


def case(
    name: str, what: str, target: Target | None, make: Callable[[], Workload], **more: Any
) -> None:
    """Register a case; more: of Case. The device of a name that starts with "cuda/" is the GPU."""
    if name in CASES:
        raise ValueError(f"case: name must be unique, got {name!r} twice")
    device = "cuda" if name.startswith("cuda/") else "cpu"
    CASES[name] = Case(name, what, target, make, device, **more)


def select(words: Iterable[str], *, device: str | None = None, quick: bool = False) -> list[Case]:
    """The cases that `words` name, in order: an op ("gemm"), the start of a name ("gemm/fp16") or
    a whole name; all if there are no words. ValueError for a word that names no case."""
    words = [w.rstrip("/") for w in words]
    for word in words:
        if not any(_names(word, c) for c in CASES.values()):
            ops = ", ".join(dict.fromkeys(c.name.split("/", 1)[0] for c in CASES.values()))
            raise ValueError(f"bench: op must be one of {ops} (or a case's name), got {word!r}")
    return [
        c
        for c in CASES.values()
        if (not words or any(_names(w, c) for w in words))
        and (device is None or c.device == device)
        and (c.quick or not quick)
    ]


def _names(word: str, case: Case) -> bool:
    return case.name == word or case.name.startswith(word + "/")
