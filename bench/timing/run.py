"""One case: every variant of ours beside every baseline, values before speed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

import mixprec
from mixprec.ops._dispatch.op import OPS

from .. import device
from ..cases.registry import COPY, Case, NotMeasured, Workload
from . import timer
from .timer import Budget, Candidate

MAX_SETS = 64
_MEMORY = 0.4  # of what is free, for the sets of buffers
_COPIED = 1 << 29  # numbers of 4 bytes
_MOST_CALLS = 1 << 20  # per sample on the CPU, which has no queue to fill
BROKEN = ("wrong", "failed")  # statuses that make a run fail; the others: ok, refused, not measured


class DeviceLost(Exception):
    """The GPU no longer answers this process: an illegal access, or an assertion in a kernel."""


def one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0][:300]}"


@cache
def clock(on_gpu: bool) -> timer.Clock:
    return timer.CudaClock() if on_gpu else timer.Clock()


@contextlib.contextmanager
def on(backend: str, ops: tuple[str, ...]) -> Iterator[None]:
    """Everything inside runs on `backend`, chosen now and not by the first call that is timed."""
    with mixprec.use_backend(backend):
        for op in ops:
            OPS[op].choose(device.DEVICE.type)
        yield


def synchronize() -> None:
    """Wait for the GPU. DeviceLost if it no longer works for this process."""
    if device.ON_CPU or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise DeviceLost(one_line(error)) from None


def heading(case: Case) -> dict[str, Any]:
    """What a result says before anything is known."""
    target = case.target
    return {
        "name": case.name,
        "op": case.op,
        "what": case.what,
        "device": case.device,
        "status": "ok",
        "reason": "",
        "target": target
        and {name: getattr(target, name) for name in ("value", "unit", "at_least")},
        "share_target": case.share,
        "met": False,
    }


def measure(case: Case, budget: Budget) -> dict[str, Any]:
    """The result of one case, plain values for JSON.

    A variant whose values are wrong is not timed; an exception is a result.
    """
    result = heading(case)
    try:
        if case.device != "cpu" and not (device.DRY_RUN or torch.cuda.is_available()):
            raise NotMeasured("this machine has no GPU that torch can use")
        # Cases share code, of which torch.compile compiles eight versions and then no more.
        torch.compiler.reset()
        return result | _measure(case, case.make(), budget)
    except DeviceLost:
        raise
    except NotMeasured as reason:
        return result | {"status": "not measured", "reason": str(reason)}
    except Exception as error:  # one broken case must not hide the others
        return result | {"status": "failed", "reason": one_line(error)}


def _measure(case: Case, work: Workload, budget: Budget) -> dict[str, Any]:
    variants, default = _variants(work) if work.ops else ({}, None)
    result: dict[str, Any] = {"variants": variants, "default": default, "ops": work.ops}
    bad = [f"{b}: {v['reason']}" for b, v in variants.items() if v["status"] in BROKEN]
    if work.ops and default is None:
        reasons = bad or [f"{b}: {v['reason']}" for b, v in variants.items()]
        wrong = any(v["status"] == "wrong" for v in variants.values())
        status = "wrong" if wrong else "failed" if bad else "not measured"
        return result | {"status": status, "reason": "; ".join(reasons)}
    if not work.ops and (reason := work.check()) is not None:
        return result | {"status": "wrong", "reason": reason}
    times, result["baselines_refused"] = _time(case, work, variants, budget)
    synchronize()
    for one in times.values():  # to a millionth: the file is written often
        one.kernel, one.host = _short(one.kernel), _short(one.host)
    kernel, calls = timer.medians(times), timer.medians(times, host=True)
    judged = calls if work.host else kernel
    others = {n: m for n, m in judged.items() if n not in variants and n != "ours"}
    for backend, variant in variants.items():
        if backend in times:
            variant |= judge(case, {"ours": judged[backend], **others})
            variant |= {"seconds": kernel[backend], "call": calls[backend]}
    medians = {"ours": judged[default or "ours"], **others}
    return result | {
        **judge(case, medians),
        "reason": "; ".join(bad),  # of the variants that are not timed
        "samples": {n: t.kernel for n, t in times.items()},
        "calls": {n: t.host for n, t in times.items()},
        "calls_per_sample": {n: t.calls for n, t in times.items()},
        "waits": [n for n, t in times.items() if t.waits],
        "median": medians,
        "flops": work.flops,
        "bytes": work.bytes,
        "host": work.host,
    }


def _variants(work: Workload) -> tuple[dict[str, dict[str, Any]], str | None]:
    """What each backend says before it is timed, and the one that a user gets."""
    found: dict[str, dict[str, Any]] = {}
    for backend in device.BACKENDS:
        reasons = (OPS[op].why_not(backend, device.DEVICE.type) for op in work.ops)
        reason = next((r for r in reasons if r is not None), None)
        status = "refused"
        if reason is None:
            try:
                with on(backend, work.ops):
                    reason = work.check()
                synchronize()
                status = "ok" if reason is None else "wrong"
            except Exception as error:  # one variant must not hide the others
                synchronize()
                status, reason = kind_of(error), one_line(error)
        found[backend] = {"status": status, "reason": reason or ""}
    fine = [b for b, v in found.items() if v["status"] == "ok"]
    default = _default(work)
    return found, default if default in fine else next(iter(fine), None)


def kind_of(error: Exception) -> str:
    """A variant that cannot do this call says so; one that differs from its reference at its first
    use is wrong; anything else has failed."""
    text = str(error)
    if isinstance(error, (ValueError, TypeError, NotImplementedError)):
        return "refused"
    if "does not agree with its reference" in text:
        return "wrong"
    return "refused" if "no backend can run" in text else "failed"


def _default(work: Workload) -> str | None:
    """The backend that a user gets."""
    call = None if work.arguments is None else work.arguments(*_arguments(work, 0))
    try:
        return OPS[work.ops[0]].backend(device.DEVICE.type, 0, call)
    except RuntimeError:
        return None


def _arguments(work: Workload, i: int) -> tuple[Any, ...]:
    return () if work.inputs is None else (work.inputs(i),)


def _time(
    case: Case, work: Workload, variants: dict[str, dict[str, Any]], budget: Budget
) -> tuple[dict[str, timer.Times], dict[str, str]]:
    """Ours (every variant that is right), the baselines that run at all, and a copy of the bytes;
    and why the other baselines do not run."""
    on_cpu = case.device == "cpu"
    count = 1 if on_cpu else sets(work.bytes)
    arguments = [_arguments(work, i) for i in range(count)]
    candidates = {
        backend: Candidate(work.ours, partial(on, backend, work.ops), arguments)
        for backend, variant in variants.items()
        if variant["status"] == "ok"
    }
    if not work.ops:
        candidates["ours"] = Candidate(work.ours, arguments=arguments)
    refused = {}
    for name, run in work.baselines.items():
        try:
            run(*arguments[0])
            synchronize()
            candidates[name] = Candidate(run, arguments=arguments)
        except DeviceLost:
            raise
        except Exception as error:
            synchronize()
            refused[name] = one_line(error)
    if work.bytes and not work.flops and not work.host:
        candidates[COPY] = copy(count, work.bytes, torch.device("cpu") if on_cpu else device.DEVICE)
    times = timer.interleave(
        candidates,
        sets=count,
        clock=clock(not on_cpu and not device.ON_CPU),
        budget=replace(budget, max_calls=_MOST_CALLS) if on_cpu else budget,
        external=work.external,
    )
    return times, refused


def copy(count: int, size: float, where: torch.device) -> Candidate:
    """A copy of as many bytes as the case moves, half of them read and half written; of many
    gigabytes, the same two again and again."""
    numbers = max(1, int(size) // 8)
    length = min(numbers, _COPIED)
    whole, rest = divmod(numbers, length)
    sources = [torch.randn(length, device=where) for _ in range(count)]

    def run(target: torch.Tensor, source: torch.Tensor) -> None:
        for _ in range(whole):
            target.copy_(source)
        if rest:
            target[:rest].copy_(source[:rest])

    return Candidate(run, arguments=[(torch.empty_like(source), source) for source in sources])


def sets(size: float) -> int:
    """How many sets of buffers of `size` bytes are twice the cache, if there is memory for them
    (inputs, outputs and the copy's)."""
    wanted = math.ceil(2 * device.l2_bytes() / max(size, 1.0))
    room = int(_MEMORY * device.free_bytes() / max(2 * size, 1.0))
    return max(1, min(wanted, room, MAX_SETS))


def judge(case: Case, medians: dict[str, float]) -> dict[str, Any]:
    """figure: against the target; None without one, or when its baseline did not run. share: of the
    speed of a copy."""
    share = medians[COPY] / medians["ours"] if COPY in medians else None
    try:
        figure = case.target.figure(medians) if case.target is not None else None
    except (KeyError, ZeroDivisionError):
        figure = None
    if figure is not None and not math.isfinite(figure):
        figure = None
    met = case.target is None or (figure is not None and case.target.met(figure))
    enough = case.share is None or share is None or share >= case.share
    return {"figure": figure, "share": share, "met": met and enough}


def _short(samples: list[float]) -> list[float]:
    return [float(f"{s:.6g}") for s in samples]
