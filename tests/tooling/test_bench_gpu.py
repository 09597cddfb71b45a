"""mixprec.bench on a GPU, without one: the timer on a simulated queue, dry runs of the cases on the
CPU, and jobs that hang."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from clock import SimulatedClock
from gpu import unattended

import mixprec
from mixprec.bench import device, report, results, table
from mixprec.bench.cases import select
from mixprec.bench.cases.quantize import quantize_bytes
from mixprec.bench.cases.registry import Case
from mixprec.bench.studies import predicted_step, profile_step
from mixprec.bench.timing import run, timer
from mixprec.bench.timing.timer import Budget, Candidate

ROOT = Path(__file__).resolve().parents[2]
GPU_CASES = select([], device="cuda")


@pytest.fixture
def dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What MIXPREC_BENCH_DEVICE=cpu does."""
    monkeypatch.setattr(device, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(device, "ON_CPU", True)
    monkeypatch.setattr(device, "DRY_RUN", True)
    monkeypatch.setattr(device, "BACKENDS", ("cpp", "reference"))


# The timer


def test_the_timer_sees_the_kernel_and_not_what_python_takes_to_queue_it() -> None:
    clock = SimulatedClock()

    def syncs(_: int) -> None:
        clock.work(host=5e-6, kernel=10e-6)
        clock.synchronize()
        clock.work(host=50e-6, kernel=10e-6)

    short = Candidate(lambda _: clock.work(host=30e-6, kernel=10e-6))
    long = Candidate(lambda _: clock.work(host=30e-6, kernel=900e-6))
    slow = Candidate(lambda _: clock.work(host=10e-3, kernel=10e-6))
    runs = {"short": short, "long": long, "slow": slow}
    times = timer.interleave(runs, sets=3, clock=clock)
    kernels = {"short": 10e-6, "long": 900e-6, "slow": 10e-6}
    hosts = {"short": 30e-6, "long": 30e-6, "slow": 10e-3}
    assert timer.medians(times) == pytest.approx(kernels, rel=0.05)
    assert timer.medians(times, host=True) == pytest.approx(hosts)
    assert not any(t.waits for t in times.values())
    assert timer.interleave({"syncs": Candidate(syncs)}, sets=1, clock=clock)["syncs"].waits

    clock.delay = lambda seconds: None  # without it the kernel seems as slow as Python
    times = timer.interleave({"short": short}, sets=1, clock=clock)
    assert timer.medians(times)["short"] > 25e-6
    assert times["short"].waits


# The cases


# The first of every kind: the others differ in size, or in how Python calls them.
KINDS = {case.name.rsplit("/", 1)[0]: case for case in reversed(GPU_CASES)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_case_runs(kind: str, dry_run: None) -> None:
    """Tiny, on the CPU: ours is right, and is timed beside its baselines."""
    case = KINDS[kind]
    result = run.measure(case, Budget(timer.MIN_SAMPLES, 0.0))
    for variant in result.get("variants", {}).values():
        assert variant["status"] in ("ok", "refused"), variant
    if result["status"] == "not measured":
        pytest.skip(f"not measured here: {result['reason'][:200]}")
    assert result["status"] == "ok", result
    if case.target is not None and case.target.unit == "x":
        assert result["figure"] > 0, result["baselines_refused"]
    assert case.share is None or result["variants"]["cpp"]["share"] > 0
    assert table.lines(result)
    json.dumps(result)


GEMMS = [case for kind, case in KINDS.items() if "/gemm" in kind and "grouped" not in kind]
GEMMS += select(["gemm/fp16", "gemm/fp8-bf16", "gemm/fp8-fp32"], quick=True, device="cpu")


@pytest.mark.parametrize("case", GEMMS, ids=lambda c: c.name)
def test_a_product_that_is_off_by_a_thousandth_is_wrong(
    case: Case, dry_run: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a hundredth where it is in bf16, whose own rounding is up to 0.4 %."""

    def spoiled(right: Callable[..., Any], *args: Any, **options: Any) -> torch.Tensor:
        returned = right(*args, **options)
        c = args[0] if returned is None else returned  # of gemm_accumulate_
        return c.mul_(1.01 if c.dtype == torch.bfloat16 else 1.001)

    for name in ("gemm", "gemm_accumulate_"):
        monkeypatch.setattr(mixprec, name, partial(spoiled, getattr(mixprec, name)))
    assert "elements exceed the bound" in (case.make().check() or "")


# One case, judged


# The profile of a step


def test_kernels_and_gaps_of_a_trace() -> None:
    def event(kind: str, name: str, start: float, took: float, op: int) -> dict[str, Any]:
        more = {"args": {"External id": op}}
        return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": took, **more}

    trace = [
        event("cpu_op", "mixprec::linear_forward", 0, 100, 1),
        event("cpu_op", "aten::add", 200, 20, 3),
        event("kernel", "quantize", 60, 40, 1),
        event("kernel", "gemm", 90, 20, 1),  # on another stream
        event("kernel", "add", 210, 10, 3),
        event("gpu_memset", "Memset", 222, 5, 3),
        {"ph": "i", "name": "a mark"},
    ]
    found = profile_step.on_device(trace)
    assert (found["launches"], found["busy_us"], found["span_us"]) == (4, 65, 167)
    assert (found["idle_us"], found["gaps_ended_by"]) == (100, [["aten::add", 1, 100]])
    assert found["kernels"][0] == ["quantize", 1, 40]
    assert "saw no device" in profile_step.on_device(trace[:2])["why_no_kernels"]


def test_what_the_predicted_step_counts() -> None:
    """The FLOPs are torch's of the plain model, the bytes of a cast those of its benchmark."""
    size = profile_step.Size(2, 64, 16, 2)
    for recipe in ("bf16", "fp8"):
        parts = predicted_step.counted(recipe, False, size, as_measured=True)
        calls = [call for part in parts.values() for call in part]
        products = sum(call.of[0] for call in calls if call.op == "gemm")
        forward = 2 * sum(call.of for call in calls if call.op == "attention")  # without a mask
        assert products + 3 * forward == profile_step.flops(size)
    first = next(call for call in calls if call.op == "quantize")
    shape = size.tokens, size.width
    exact = quantize_bytes(shape, 2, "tensor", False, True)
    assert (first.of, first.launches) == ("current-transpose", 2)
    assert first.bytes == pytest.approx(exact, abs=16)  # scales


# Unattended


def test_a_job_that_hangs_ends_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others run, and what is known is written."""
    pid = tmp_path / "pid"
    hangs = ["sh", "-c", f"echo begins; sleep 60 & echo $! >{pid}; wait"]
    jobs = [
        unattended.Job("hangs", "a", hangs, 1.0),
        unattended.Job("fails", "a", ["sh", "-c", "echo why; exit 3"], 50),
        unattended.Job("lacks", "b", ["no-such-program"], 50),
        unattended.Job("works", "b", ["echo", "all is well"], 50),
    ]
    monkeypatch.setattr(unattended, "jobs", lambda *_: jobs)
    monkeypatch.setattr(sys, "argv", ["unattended.py", "--out", str(tmp_path)])
    assert unattended.main() == 1
    found = json.loads((tmp_path / "gpu.json").read_text())["jobs"]
    assert "no-such-program" in found.pop("lacks")["last"]
    assert [(j["status"], j["last"]) for j in found.values()] == [
        (None, "begins"), (3, "why"), (0, "all is well"),
    ]  # fmt: skip
    assert re.search("hangs +ENDED .*\nfails +FAILED .*why\nlacks +FAILED", capsys.readouterr().out)
    state = Path(f"/proc/{pid.read_text().strip()}/stat")  # gone, or a zombie nobody waited for
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_dry_run_from_start_to_file_and_never_into_the_pages(tmp_path: Path) -> None:
    out = tmp_path / "bench" / "results" / "somewhere" / "bench-overhead.json"
    command = [sys.executable, "-m", "mixprec.bench", "run", "cuda/overhead", "--device", "cuda"]
    command += ["--budget", "1", "--samples", "9", "--quick", "--out", str(out)]
    env = {**os.environ, "MIXPREC_BENCH_DEVICE": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    content = results.load(out)
    assert content["environment"]["dry_run"] is True
    assert {row["status"] for row in content["rows"]} == {"ok"}
    with pytest.raises(results.ResultError, match="is a dry run without a GPU"):
        report.gpu_results(tmp_path)


# The pages


def test_kernels_of_the_compiler_s_report() -> None:
    kernels = json.loads((ROOT / "bench" / "results" / "cuda_build.json").read_text())["kernels"]
    for kernel in kernels:
        assert kernel["spilled"] == 0, kernel
        assert any((ROOT / "csrc" / "cuda").rglob(kernel["source"])), kernel
