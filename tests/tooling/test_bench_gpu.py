"""mixprec.bench on a GPU, without one: the timer on a simulated queue, dry runs of the cases on the
CPU, jobs that hang, and the page of a made-up result."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from clock import SimulatedClock
from gpu import unattended

import mixprec
from mixprec._context import context
from mixprec.bench import device, report, results, table
from mixprec.bench.cases import registry, select
from mixprec.bench.cases.registry import Case, Workload
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


def test_jobs_cover_the_cases() -> None:
    covered = [f"cuda/{op}" for _, ops in unattended.BENCH.values() for op in ops.split()]
    assert {c.name for c in select(covered)} == {c.name for c in GPU_CASES}
    for full in (False, True):
        commands = [job.command for job in unattended.jobs(ROOT, full) if "bench" in job.kind]
        assert all(("--quick" not in command) == full for command in commands)


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


GEMMS = [case for kind, case in KINDS.items() if "/gemm" in kind]
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


def made_workload(**changes: Any) -> Workload:
    x = torch.ones(1000)
    baselines, check = {"torch": lambda x: x.abs().amax()}, lambda: None
    work = Workload(mixprec.amax, baselines, check, lambda i: x, ops=("amax",), bytes=4000.0)
    return replace(work, **changes)


def measured(work: Workload, **more: Any) -> dict[str, Any]:
    target = registry.times_faster(1.0)
    case = Case("cuda/made/up", "of this test", target, lambda: work, "cuda", **more)
    return run.measure(case, Budget(9, 0.0))


def test_a_wrong_variant_is_not_timed_and_the_other_is(dry_run: None) -> None:
    differ = lambda: "values differ" if context.backend == "reference" else None  # noqa: E731
    result = measured(made_workload(check=differ))
    wrong = result["variants"]["reference"]
    assert (wrong["status"], wrong["reason"]) == ("wrong", "values differ")
    assert "reference" not in result["samples"]
    assert (result["status"], result["default"]) == ("ok", "cpp")
    assert table.bad([result]) == 1
    assert table.lines(result)[1][table.HEADER.index("result")] == "WRONG"


def test_a_refusal_shows_its_reason(dry_run: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "BACKENDS", ("cpp", "triton", "reference"))

    def absent(_: torch.Tensor) -> None:
        raise RuntimeError("no such kernel\nmore")

    result = measured(made_workload(baselines={"torch": torch.sum, "absent": absent}))
    assert result["variants"]["triton"]["status"] == "refused"
    remarks = " ".join(table.remarks([result]))
    assert "triton refused: the Triton kernels run on cuda tensors" in remarks
    assert "absent did not run: RuntimeError: no such kernel" in remarks
    for kind, error in (
        ("refused", ValueError("gemm: a must be [M, K]")),
        ("refused", RuntimeError("gemm: no backend can run on cuda. vendor: K must be")),
        ("wrong", RuntimeError("amax: the cuda kernel does not agree with its reference on this")),
        ("failed", RuntimeError("CUDA error: misaligned address")),
    ):
        assert run.kind_of(error) == kind, error


def test_both_the_ratio_and_the_share_of_a_copy_are_needed(dry_run: None) -> None:
    slow = made_workload(baselines={"torch": lambda x: [x.abs().amax() for _ in range(50)]})
    assert measured(slow)["met"]
    result = measured(slow, share=1e9)
    assert result["figure"] > 1
    assert not result["met"]


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
        unattended.Job("works", "b", ["echo", "all is well"], 50),
    ]
    monkeypatch.setattr(unattended, "jobs", lambda out, full: jobs)
    monkeypatch.setattr(sys, "argv", ["unattended.py", "--out", str(tmp_path)])
    assert unattended.main() == 1
    found = json.loads((tmp_path / "gpu.json").read_text())["jobs"]
    assert [(j["status"], j["last"]) for j in found.values()] == [
        (None, "begins"), (3, "why"), (0, "all is well"),
    ]  # fmt: skip
    assert re.search("hangs +ENDED .*\nfails +FAILED .*why\nworks +ok", capsys.readouterr().out)
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
    names = [c.name for c in select(["cuda/overhead"], quick=True)]
    assert [r["name"] for r in content["rows"]] == names
    for row in content["rows"]:
        assert row["status"] == "ok", row
        assert len(row["samples"]["cpp"]) == len(row["calls"]["cpp"]) == 9
        assert row["took"] > 0
    assert "overhead/quantize" in done.stdout
    with pytest.raises(results.ResultError, match="is a dry run without a GPU"):
        report.gpu_results(tmp_path)


# The pages


def test_kernels_of_the_compiler_s_report() -> None:
    kernels = json.loads((ROOT / "bench" / "results" / "cuda_build.json").read_text())["kernels"]
    for kernel in kernels:
        assert kernel["spilled"] == 0, kernel
        assert any((ROOT / "csrc" / "cuda").rglob(kernel["source"])), kernel
