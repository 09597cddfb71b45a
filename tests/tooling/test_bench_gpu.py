"""mixprec.bench on a GPU, without one: the timer on a simulated queue, dry runs of the cases on the
CPU, stages whose processes die, and the page of a made-up result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from clock import SimulatedClock

from mixprec.bench import report, results, table
from mixprec.bench.cases import registry, select
from mixprec.bench.gpu import device, stages, supervisor
from mixprec.bench.timing import run, timer
from mixprec.bench.timing.timer import Candidate

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
    times = timer.interleave({"short": short, "long": long}, sets=3, clock=clock)
    assert timer.medians(times) == pytest.approx({"short": 10e-6, "long": 900e-6}, rel=0.05)
    assert timer.medians(times, host=True) == pytest.approx({"short": 30e-6, "long": 30e-6})
    assert not any(t.waits for t in times.values())
    assert timer.interleave({"syncs": Candidate(syncs)}, sets=1, clock=clock)["syncs"].waits

    clock.delay = lambda seconds: None  # without it the kernel seems as slow as Python
    times = timer.interleave({"short": short}, sets=1, clock=clock)
    assert timer.medians(times)["short"] > 25e-6
    assert times["short"].waits


# The cases


def test_stages_cover_the_cases() -> None:
    covered = [f"cuda/{op}" for ops, _ in stages.STAGES.values() for op in ops]
    assert {c.name for c in select(covered)} == {c.name for c in GPU_CASES}
    assert 0.99 < sum(share for _, share in stages.STAGES.values()) < 1.01


# One of every kind: the others differ in dtype and size alone.
KINDS = (
    *("copy", "quantize/bf16/given/", "quantize/fp32/current-transpose", "quantize/bf16/row-"),
    *("quantize/bf16/block1x128/", "quantize/bf16/block128x128-transpose", "amax/bf16"),
    *("dequantize/tensor-fp32", "dequantize/block", "unscale_/bf16", "grad_stats_/fp32"),
    *("inv_scale", "clip_coef", "scale_from_amax_", "update_delayed_scales_"),
    *("adamw_/bf16-masters/1000", "adamw_/fp32", "adamw_/remainder16", "adamw_/stochastic"),
    *("sgd_", "gemm/bf16/nt/2047x", "gemm/fp16/tn/4096x", "gemm/fp8/tensor/2047x"),
    *("gemm/fp8/row", "gemm/fp8/block", "gemm_accumulate_", "layer/bf16/eager"),
    *("layer/fp8/compiled", "layer/fp8/torchao", "overhead/quantize", "overhead/gemm"),
    *(
        "overhead/grad_stats_",
        "quantize_mx/mxfp8",
        "quantize_mx/nvfp4/bf16/t",
        "dequantize_mx/nvfp4",
    ),
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_case_runs(kind: str, dry_run: None) -> None:
    """Tiny, on the CPU: ours is right, and is timed beside its baselines."""
    case = next(c for c in GPU_CASES if c.name.startswith(f"cuda/{kind}"))
    result = run.measure(case, samples=timer.MIN_SAMPLES, seconds=0.0)
    for variant in result.get("variants", {}).values():
        assert variant["status"] in ("ok", "refused"), variant
    if result["status"] == "not measured":
        pytest.skip(f"not measured here: {result['reason'][:200]}")
    assert result["status"] == "ok", result
    if case.target is not None and case.target.unit == "x":
        assert registry.baselines(result["median"]), result["baselines_refused"]
        assert result["figure"] > 0
    assert case.share is None or result["variants"]["cpp"]["share"] > 0
    assert table.lines(result)
    json.dumps(result)


# One case, judged


# Stages and their processes


def test_a_child_that_hangs_ends_with_what_it_started(tmp_path: Path) -> None:
    """After 3 s without progress, or when its time is over; other statuses are handed on."""
    pid = tmp_path / "pid"
    hangs = ["sh", "-c", f"sleep 60 & echo $! >{pid}; wait"]
    status = supervisor.run(hangs, limit=50, progress=tmp_path / "progress", silent=3.0)
    assert status == -signal.SIGKILL
    assert supervisor.run(["sleep", "60"], limit=0.5) == -signal.SIGKILL
    assert supervisor.run(["sh", "-c", "exit 3"], limit=50) == 3
    state = Path(f"/proc/{pid.read_text().strip()}/stat")  # gone, or a zombie nobody waited for
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_dry_run_from_start_to_file_and_never_into_the_pages(tmp_path: Path) -> None:
    out = tmp_path / "bench" / "results" / "somewhere"
    command = [sys.executable, "-m", "mixprec.bench", "gpu", "--stages", "overhead"]
    command += ["--budget", "1", "--samples", "9", "--out", str(out)]
    env = {**os.environ, "MIXPREC_BENCH_DEVICE": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [p.name for p in out.iterdir()] == ["bench-overhead.json"]
    content = results.load(out / "bench-overhead.json")
    assert content["environment"]["dry_run"] is True
    assert {"gpu_before", "gpu_after", "stage", "broken"} <= set(content)
    names = [c.name for c in stages.cases_of("overhead", full=False)]
    assert [r["name"] for r in content["rows"]] == names
    for row in content["rows"]:
        assert row["status"] == "ok", row
        assert len(row["samples"]["cpp"]) == len(row["calls"]["cpp"]) == 9
        assert row["took"] > 0
    assert "overhead/quantize" in done.stdout
    assert done.stdout.splitlines()[-1] == f"written: {out}"
    with pytest.raises(results.ResultError, match="is a dry run without a GPU"):
        report.gpu_results(tmp_path)


# The pages


def test_kernels_of_the_compiler_s_report() -> None:
    kernels = json.loads((ROOT / "bench" / "results" / "cuda_build.json").read_text())["kernels"]
    for kernel in kernels:
        assert kernel["spilled"] == 0, kernel
        assert any((ROOT / "csrc" / "cuda").rglob(kernel["source"])), kernel
