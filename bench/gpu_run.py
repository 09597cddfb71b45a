"""One row on the GPU: every variant of ours beside every rival, values before speed."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

import mixprec
from mixprec.ops._dispatch import backends

from . import gpu, gpu_timer, sources
from .gpu_timer import Candidate
from .registry import FLOOR, Row, best_rival

MAX_SETS = 64
_MEMORY = 0.4  # of what is free, for the sets of buffers
_COPY = 1 << 29  # numbers of 4 bytes
CHOSEN = sources.CHOSEN


@dataclass
class GpuCase:
    """One measurable case. ours and rivals take what `inputs` made; inputs(i) is the i-th set.

    ops: all that ours runs, its main op first; none: not ours (the copy). check: as in Case, run
    under each backend. bytes, flops: per call. host: the row is about the time that Python takes.
    arguments: of the main op's schema, where its variant is chosen call by call. mixed: many calls
    of several ops, each on the backend that a user gets, instead of every backend in turn.
    """

    ops: tuple[str, ...]
    inputs: Callable[[int], Any]
    ours: Callable[[Any], Any]
    rivals: dict[str, Callable[[Any], Any]]
    check: Callable[[], str | None]
    bytes: float = 0.0
    flops: float = 0.0
    host: bool = False
    arguments: Callable[[Any], tuple[Any, ...]] | None = None
    mixed: bool = False


class DeviceLost(Exception):
    """The GPU no longer answers this process: an illegal access, or an assertion in a kernel."""


def one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0][:300]}"


@cache
def clock() -> gpu_timer.Clock:
    return gpu_timer.HostClock() if gpu.ON_CPU else gpu_timer.CudaClock()


@contextlib.contextmanager
def on(backend: str, ops: tuple[str, ...]) -> Iterator[None]:
    """Everything inside runs on `backend`, chosen now and not by the first call that is timed."""
    if backend == CHOSEN:
        yield
        return
    with mixprec.use_backend(backend):
        for op in ops:
            backends.choose(op, gpu.DEVICE.type)
        yield


def answers() -> None:
    """Wait for the GPU. DeviceLost if it no longer works for this process."""
    if gpu.ON_CPU:
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise DeviceLost(one_line(error)) from None


def _variants(
    case: GpuCase, trying: Callable[[str], None], broken: dict[str, str]
) -> tuple[dict[str, dict[str, Any]], str | None]:
    """What each backend says before it is timed, and the one that a user gets."""
    found: dict[str, dict[str, Any]] = {}
    for backend in (CHOSEN,) if case.mixed else gpu.BACKENDS:
        ops = () if case.mixed else case.ops
        reasons = (backends.why_not(op, backend, gpu.DEVICE.type) for op in ops)
        reason = next((r for r in reasons if r is not None), None)
        status = "refused"
        if backend in broken:
            status, reason = "failed", broken[backend]
        elif reason is None:
            trying(backend)
            try:
                with on(backend, case.ops):
                    reason = case.check()
                answers()
                status = "ok" if reason is None else "wrong"
            except Exception as error:  # one variant must not hide the others
                answers()
                status, reason = _kind_of(error), one_line(error)
        digest = sources.digest(case.ops, backend)
        found[backend] = {"status": status, "reason": reason or "", "sources": digest}
    fine = [b for b, v in found.items() if v["status"] == "ok"]
    default = _default(case)
    return found, default if default in fine else next(iter(fine), None)


def _kind_of(error: Exception) -> str:
    """A variant that cannot do this call says so; one that differs from its reference at its first
    use is wrong; anything else has failed."""
    text = str(error)
    if isinstance(error, (ValueError, TypeError, NotImplementedError)):
        return "refused"
    if "no backend can run" in text:
        return "refused"
    return "wrong" if "does not agree with its reference" in text else "failed"


def _default(case: GpuCase) -> str | None:
    """The backend that a user gets."""
    if case.mixed:
        return CHOSEN
    call = None if case.arguments is None else case.arguments(case.inputs(0))
    try:
        return backends.chosen_backend(case.ops[0], gpu.DEVICE.type, 0, call)
    except RuntimeError:
        return None


def _working(rivals: dict[str, Callable[[Any], Any]], inputs: Any) -> tuple[dict[str, Any], Any]:
    """The rivals that run at all, and what stopped the others."""
    fine, refused = {}, {}
    for name, run in rivals.items():
        try:
            run(inputs)
            answers()
            fine[name] = run
        except DeviceLost:
            raise
        except Exception as error:
            answers()
            refused[name] = one_line(error)
    return fine, refused


def _copy(sets: int, count: float) -> Candidate:
    """A copy of as many bytes as the case moves, half of them read and half written; of many
    gigabytes, the same two again and again."""
    numbers = max(1, int(count) // 8)
    length = min(numbers, _COPY)
    whole, rest = divmod(numbers, length)
    pairs = []
    for i in range(sets):
        source = gpu.randn(length, seed=i)
        pairs.append((torch.empty_like(source), source))

    def run(i: int) -> None:
        target, source = pairs[i]
        for _ in range(whole):
            target.copy_(source)
        if rest:
            target[:rest].copy_(source[:rest])

    return Candidate(run)


def _sets(count: float) -> int:
    """How many sets of buffers of `count` bytes are twice the cache, if there is memory for them
    (inputs, outputs and the copy's)."""
    wanted = math.ceil(2 * gpu.l2_bytes() / max(count, 1.0))
    room = int(_MEMORY * gpu.free_bytes() / max(2 * count, 1.0))
    return max(1, min(wanted, room, MAX_SETS))


def measure(
    row: Row,
    case: GpuCase,
    *,
    samples: int,
    seconds: float,
    trying: Callable[[str], None] = lambda _: None,
    broken: dict[str, str] | None = None,
) -> dict[str, Any]:
    """The part of a row's result that comes after its making. ours: the variant a user gets.

    trying: told of every backend before it first runs, and of "" before the timing. broken:
    backends that must not run, and why.
    """
    variants, default = _variants(case, trying, broken or {}) if case.ops else ({}, None)
    trying("")
    result: dict[str, Any] = {"variants": variants, "default": default, "ops": case.ops}
    bad = [f"{b}: {v['reason']}" for b, v in variants.items() if v["status"] in ("wrong", "failed")]
    if case.ops and default is None:
        reasons = bad or [f"{b}: {v['reason']}" for b, v in variants.items()]
        wrong = any(v["status"] == "wrong" for v in variants.values())
        status = "wrong" if wrong else "failed" if bad else "not measured"
        return result | {"status": status, "reason": "; ".join(reasons)}
    sets = _sets(case.bytes)
    inputs = [case.inputs(i) for i in range(sets)]
    rivals, result["rivals_refused"] = _working(case.rivals, inputs[0])
    candidates = {
        backend: Candidate(lambda i: case.ours(inputs[i]), partial(on, backend, case.ops))
        for backend, v in variants.items()
        if v["status"] == "ok"
    }
    if not case.ops:
        candidates["ours"] = Candidate(lambda i: case.ours(inputs[i]))
    for name, run in rivals.items():
        candidates[name] = Candidate(partial(lambda run, i: run(inputs[i]), run))
    if case.bytes and not case.flops and case.ops and not case.host:
        candidates[FLOOR] = _copy(sets, case.bytes)
    times = gpu_timer.interleave(
        candidates, sets=sets, clock=clock(), samples=samples, seconds=seconds
    )
    answers()
    kernel = gpu_timer.medians(times)
    calls = gpu_timer.medians(times, host=True)
    judged = calls if case.host else kernel
    others = {n: m for n, m in judged.items() if n not in variants and n != "ours"}
    for backend, variant in variants.items():
        if backend in times:
            variant |= _judge(row, {"ours": judged[backend], **others})
            variant |= {"seconds": kernel[backend], "call": calls[backend]}
    ours = judged[default or "ours"]
    return result | {
        **_judge(row, {"ours": ours, **others}),
        "status": "ok",
        "reason": "; ".join(bad),  # of the variants that are not timed
        "samples": {n: _short(t.kernel) for n, t in times.items()},
        "calls": {n: _short(t.host) for n, t in times.items()},
        "calls_per_sample": {n: t.calls for n, t in times.items()},
        "waits": [n for n, t in times.items() if t.waits],
        "spread": {n: _spread(t.kernel) for n, t in times.items()},
        "median": {"ours": ours, **others},
        "best_rival": best_rival({"ours": ours, **others}),
        "flops": case.flops,
        "bytes": case.bytes,
        "sets": sets,
        "host": case.host,
    }


def _judge(row: Row, medians: dict[str, float]) -> dict[str, Any]:
    """figure: against the target; None without one, or when its rival did not run. share: of the
    speed of a copy."""
    share = medians[FLOOR] / medians["ours"] if FLOOR in medians else None
    try:
        figure = row.target.figure(medians) if row.target is not None else None
    except (KeyError, AssertionError):
        figure = None
    met = row.target is None or (figure is not None and row.target.met(figure))
    enough = row.share is None or share is None or share >= row.share
    return {"figure": figure, "share": share, "met": met and enough}


def _short(samples: list[float]) -> list[float]:
    """To a millionth: the file is written often."""
    return [float(f"{s:.6g}") for s in samples]


def _spread(samples: list[float]) -> float:
    """The distance of the quartiles, relative to the median."""
    low, middle, high = statistics.quantiles(samples, n=4)
    return (high - low) / middle if middle else 0.0
