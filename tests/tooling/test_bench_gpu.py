"""mixprec.bench on a GPU, without one: the timer on a simulated queue, every row rehearsed on the
CPU, stages whose processes die, tables and pictures from a made-up result."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mixprec
from mixprec.bench import __main__ as cli
from mixprec.bench import (
    gpu,
    gpu_plot,
    gpu_run,
    gpu_stages,
    gpu_table,
    gpu_timer,
    registry,
    report,
    results,
    run,
    sources,
)
from mixprec.bench.gpu_timer import Candidate
from mixprec.bench.registry import Row
from mixprec.bench.rows import ROWS

ROOT = Path(__file__).resolve().parents[2]
CUDA_ROWS = [r for r in ROWS.values() if r.device == "cuda"]


@pytest.fixture
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What MIXPREC_BENCH_DEVICE=cpu does."""
    monkeypatch.setattr(gpu, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(gpu, "ON_CPU", True)
    monkeypatch.setattr(gpu, "REHEARSAL", True)
    monkeypatch.setattr(gpu, "BACKENDS", ("cpp", "reference"))
    gpu_run.clock.cache_clear()


# The timer


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


def test_the_timer_sees_the_kernel_and_not_what_python_takes_to_queue_it() -> None:
    clock = SimulatedClock()
    candidates = {
        "short": Candidate(lambda _: clock.work(host=30e-6, kernel=10e-6)),
        "long": Candidate(lambda _: clock.work(host=30e-6, kernel=900e-6)),
    }
    times = gpu_timer.interleave(candidates, sets=3, clock=clock)
    assert gpu_timer.medians(times) == pytest.approx({"short": 10e-6, "long": 900e-6}, rel=0.05)
    assert gpu_timer.medians(times, host=True) == pytest.approx({"short": 30e-6, "long": 30e-6})
    assert not any(t.waits for t in times.values())
    assert (times["short"].calls, times["long"].calls) == (64, 1)
    assert len(times["short"].kernel) == gpu_timer.SAMPLES


def test_without_the_delay_the_short_kernel_would_seem_as_slow_as_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimulatedClock()
    monkeypatch.setattr(clock, "delay", lambda seconds: None)
    times = gpu_timer.interleave(
        {"short": Candidate(lambda _: clock.work(host=30e-6, kernel=10e-6))}, sets=1, clock=clock
    )
    assert gpu_timer.medians(times)["short"] > 25e-6
    assert times["short"].waits


def test_a_call_that_waits_for_the_device_is_named() -> None:
    clock = SimulatedClock()

    def syncs(_: int) -> None:
        clock.work(host=5e-6, kernel=10e-6)
        clock.synchronize()
        clock.work(host=50e-6, kernel=10e-6)

    times = gpu_timer.interleave({"syncs": Candidate(syncs)}, sets=1, clock=clock)
    assert times["syncs"].waits


def test_turns_sets_and_time_limit() -> None:
    clock = SimulatedClock()
    order: list[tuple[str, int]] = []
    candidates = {
        name: Candidate(lambda i, name=name: (order.append((name, i)), clock.work(1e-6, 1e-3)))
        for name in "ab"
    }
    times = gpu_timer.interleave(candidates, sets=3, clock=clock, seconds=0.0)
    assert [len(t.kernel) for t in times.values()] == [gpu_timer.MIN_SAMPLES] * 2
    turns = order[-2 * gpu_timer.MIN_SAMPLES :]
    assert [times[name].calls for name in "ab"] == [1, 1]
    assert [name for name, _ in turns[:6]] == ["a", "b", "b", "a", "a", "b"]
    for name in "ab":
        used = [i for n, i in turns if n == name]
        assert all((x + 1) % 3 == y for x, y in itertools.pairwise(used))


# Rows


def test_rows_cover_the_targets() -> None:
    """Every line of the table of GPU targets has rows, with that target."""
    expected = {
        "cuda/quantize/bf16/given-transpose": (">= 1.4x", 0.9),
        "cuda/quantize/bf16/current-transpose": (">= 1.4x", 0.9),
        "cuda/unscale_": (">= 1.2x", 0.9),
        "cuda/adamw_/bf16-masters/1e9": (">= 1.9x", 0.88),
        "cuda/gemm/bf16/nt/2047x3073x8192": (">= 3x", None),
        "cuda/gemm/fp16/tn/4096x4096x4096": (">= 0.97x", None),
        "cuda/gemm/fp8/tensor/4096x4096x4096": (">= 1x", None),
        "cuda/overhead": ("<= 5 us", None),
    }
    for word, (target, share) in expected.items():
        rows = registry.select([word])
        assert {(str(r.target), r.share) for r in rows} == {(target, share)}, word
    stages = [f"cuda/{op}" for ops, _ in gpu_stages.STAGES.values() for op in ops]
    assert {r.name for r in registry.select(stages)} == {r.name for r in CUDA_ROWS}
    assert 0.99 < sum(share for _, share in gpu_stages.STAGES.values()) < 1.01


def test_the_shapes_of_the_products() -> None:
    from mixprec.bench.rows_cuda_gemm import CORE, suite

    shapes = suite()
    assert len(shapes) == len(set(shapes)) > 75
    assert set(CORE) <= set(shapes)
    for shape in ((512,) * 3, (16384,) * 3, (1, 128256, 4096), (128, 7168, 16384),
                  (12288, 4096, 15872), (8193, 2501, 5008)):  # fmt: skip
        assert shape in shapes


def test_a_billion_parameters() -> None:
    from mixprec.bench.rows_cuda_step import BILLION
    from mixprec.bench.steps import elements, gpt_shapes

    assert 1.0e9 < elements(gpt_shapes(*BILLION)) < 1.02e9
    (row,) = registry.select(["cuda/adamw_/bf16-masters/1e9"])
    assert row.bytes == 30 * elements(gpt_shapes(*BILLION))


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("transpose", [True, False])
def test_bytes_of_quantize_are_those_of_its_tensors(given: bool, transpose: bool) -> None:
    from mixprec.bench.rows_cuda_memory import quantize_bytes

    x = torch.randn(256, 384).bfloat16()
    scale = torch.tensor(2.0) if given else None
    q = mixprec.quantize(x, mixprec.E4M3, scale, transpose)
    tensors = [x, q.data, *([] if given else [x]), *([q.data_t] if transpose else [])]
    moved = sum(t.numel() * t.element_size() for t in tensors)
    assert quantize_bytes((256, 384), 2, "tensor", given, transpose) == moved


REHEARSED = [r for r in CUDA_ROWS if r.quick and "/gemm/" not in r.name] + [
    r for r in CUDA_ROWS if "/gemm/" in r.name and ("/4096x4096x4096" in r.name
                                                    or "/2047x3073x8192" in r.name)
]  # fmt: skip


@pytest.mark.parametrize("row", REHEARSED, ids=lambda r: r.name)
def test_a_row_runs(row: Row, rehearsal: None) -> None:
    """Tiny, on the CPU: ours is right, and is timed beside its rivals."""
    result = run.measure(row, samples=gpu_timer.MIN_SAMPLES, seconds=0.0)
    for variant in result.get("variants", {}).values():
        assert variant["status"] in ("ok", "refused"), variant
    if result["status"] == "not measured":
        pytest.skip(f"not measured here: {result['reason'][:200]}")
    assert result["status"] == "ok", result
    rivals = {n for n in result["median"] if n not in ("ours", registry.FLOOR)}
    if row.target is not None and row.target.unit == "x":
        assert rivals, result["rivals_refused"]
        assert result["figure"] > 0
    assert (row.share is None) or result["variants"]["cpp"]["share"] > 0
    assert gpu_table.lines(result)
    json.dumps(result)


# One row, judged


def made_case(**changes: Any) -> gpu_run.GpuCase:
    x = torch.ones(1000)
    arguments: dict[str, Any] = {
        "ops": ("amax",),
        "inputs": lambda i: x,
        "ours": mixprec.amax,
        "rivals": {"torch": lambda x: x.abs().amax()},
        "check": lambda: None,
        "bytes": 4000.0,
    }
    return gpu_run.GpuCase(**{**arguments, **changes})


def measured(case: gpu_run.GpuCase, **row: Any) -> dict[str, Any]:
    made = Row("cuda/made/up", "of this test", registry.times_faster(1.0), lambda: case, "cuda",
               **row)  # fmt: skip
    return run.measure(made, samples=7, seconds=0.0)


def forced() -> str | None:
    from mixprec.ops._dispatch import backends

    return backends.order("cpu")[0]


def test_a_wrong_variant_is_not_timed_and_the_other_is(rehearsal: None) -> None:
    case = made_case(check=lambda: "values differ" if forced() == "reference" else None)
    result = measured(case)
    wrong = result["variants"]["reference"]
    assert (wrong["status"], wrong["reason"]) == ("wrong", "values differ")
    assert "reference" not in result["samples"]
    assert result["status"] == "ok"
    assert result["default"] == "cpp"
    assert gpu_table.bad([result]) == 1
    assert [line[8] for line in gpu_table.lines(result)][1] == "WRONG"
    every = measured(made_case(check=lambda: "values differ"))
    assert every["status"] == "wrong"
    assert "samples" not in every


def test_a_refusal_shows_its_reason(rehearsal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "BACKENDS", ("cpp", "triton", "reference"))

    def absent(_: torch.Tensor) -> None:
        raise RuntimeError("no such kernel\nmore")

    result = measured(made_case(rivals={"torch": torch.sum, "absent": absent}))
    refused = result["variants"]["triton"]
    assert refused["status"] == "refused"
    assert "Triton kernels run on cuda tensors" in refused["reason"]
    assert result["rivals_refused"] == {"absent": "RuntimeError: no such kernel"}
    remarks = " ".join(gpu_table.remarks([result]))
    assert "triton refused" in remarks
    assert "absent did not run: RuntimeError: no such kernel" in remarks
    alone = measured(made_case(rivals={"absent": absent}))
    assert (alone["figure"], alone["met"]) == (None, False)


def test_what_an_exception_of_a_variant_means() -> None:
    kinds = {
        "refused": [ValueError("gemm: a must be [M, K]"),
                    RuntimeError("gemm: no backend can run on cuda. vendor: K must be")],
        "wrong": [RuntimeError("amax: the cuda kernel does not agree with its reference on this")],
        "failed": [RuntimeError("CUDA error: misaligned address"), MemoryError("no room")],
    }  # fmt: skip
    for kind, errors in kinds.items():
        assert {gpu_run._kind_of(error) for error in errors} == {kind}


def test_both_the_ratio_and_the_share_of_a_copy_are_needed(rehearsal: None) -> None:
    slow = {"torch": lambda x: [x.abs().amax() for _ in range(50)]}
    assert measured(made_case(rivals=slow))["met"]
    result = measured(made_case(rivals=slow), share=1e9)
    assert result["figure"] > 1
    assert not result["met"]
    assert "(>= " in gpu_table.lines(result)[0][5]


def test_sets_of_buffers_are_twice_the_cache(
    rehearsal: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "l2_bytes", lambda: 1000)
    assert [gpu_run._sets(n) for n in (1.0, 100.0, 300.0, 5000.0)] == [64, 20, 7, 1]
    monkeypatch.setattr(gpu, "free_bytes", lambda: 3000)
    assert gpu_run._sets(300.0) == 2


# What is noted beside a figure


def test_sources_of_a_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = {str(p.relative_to(ROOT)) for p in sources.files("quantize", "cuda")}
    assert {
        "csrc/cuda/quantize/quantize.cu",
        "csrc/cuda/common/vec.cuh",
        "csrc/math/convert.h",
    } <= names
    assert "csrc/math/adamw.h" not in names
    names = {p.name for p in sources.files("quantize", "triton")}
    assert {"quantize.py", "tiles.py"} <= names
    assert "adamw.py" not in names
    assert sources.digest(("amax",), "vendor") is None

    names = {p.name for p in sources.files("gemm", "cuda")}
    assert {"gemm_sm90.cuh", "wgmma_sm90.cuh", "gemm_sm90_e4m3_e5m2_scaled.cu"} <= names

    for folder in ("csrc", "triton_kernels"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    ops = ("adamw_", "grad_stats_")
    before = {b: sources.digest(ops, b) for b in ("cuda", "triton")}
    monkeypatch.setattr(sources, "root", lambda: tmp_path)
    assert before == {b: sources.digest(ops, b) for b in ("cuda", "triton")}
    with (tmp_path / "csrc" / "math" / "adamw.h").open("a") as file:
        file.write("// changed\n")
    assert sources.digest(ops, "cuda") != before["cuda"]
    assert sources.digest(ops, "triton") == before["triton"]


def test_every_gpu_kernel_has_sources() -> None:
    from mixprec.ops._dispatch import library

    written = any((ROOT / "csrc" / "cuda").rglob("gemm*.cu"))
    for op in library.TRITON:
        assert sources.files(op, "triton"), op
        assert sources.files(op, "cuda") or (op.startswith("gemm") and not written), op


def test_clocks_are_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\ncase \"$*\" in\n*-lms*) while :; do echo '1700, 2600, 650.5, 61';"
        " sleep 0.05; done;;\n*) echo 'NVIDIA H200, 570.1, 1980, 700.00, 345, 2600, 80.1, 31';;\n"
        "esac\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    now = gpu.snapshot()
    assert now is not None
    assert (now["name"], now["driver_version"], now["temperature.gpu"]) == (
        "NVIDIA H200", "570.1", "31",
    )  # fmt: skip
    watch = gpu.Watch()
    deadline = time.monotonic() + 20
    noted: dict[str, list[float]] = {}
    while not noted and time.monotonic() < deadline:
        time.sleep(0.05)
        noted = watch.since_last()
    watch.close()
    assert set(noted["clocks.sm"]) == {1700.0}
    assert set(noted["power.draw"]) == {650.5}


def test_names_of_folders_and_ceilings() -> None:
    assert gpu.folder_name("NVIDIA H200") == "nvidia-h200"
    assert gpu.folder_name(None) == "no-gpu"
    peak = gpu.ceiling("NVIDIA H200")
    assert peak is not None
    assert peak.bytes == 4.8e12
    assert gpu.ceiling("NVIDIA L4") is None


# Stages


def rehearse(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-m", "mixprec.bench", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "MIXPREC_BENCH_DEVICE": "cpu"},
        check=False,
    )


def test_a_run_from_start_to_picture_and_never_into_the_tables(tmp_path: Path) -> None:
    out = tmp_path / "bench" / "results" / "somewhere"
    done = rehearse(
        *("gpu", "--stages", "overhead", "--budget", "1", "--samples", "7", "--out", str(out)),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [p.name for p in out.iterdir()] == ["bench-overhead.json"]
    content = results.load(out / "bench-overhead.json")
    assert content["environment"]["rehearsal"] is True
    names = [r.name for r in gpu_stages.rows_of("overhead", full=False)]
    assert [r["name"] for r in content["rows"]] == names
    for row in content["rows"]:
        assert row["status"] == "ok", row
        assert len(row["calls"]["cpp"]) >= 7
        assert row["took"] > 0
    assert "overhead/quantize" in done.stdout
    assert done.stdout.splitlines()[-1] == f"written: {out}"
    with pytest.raises(results.ResultError, match="is a rehearsal without a GPU"):
        report.gpu_results(tmp_path)


def test_without_a_gpu_there_is_no_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "REHEARSAL", False)
    monkeypatch.setattr(gpu, "name", lambda: None)
    assert cli.main(["gpu", "--out", str(tmp_path / "x")]) == 2
    assert "no GPU that torch can use" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["gpu", "--stages", "memory,nothing"])
    assert "must be among memory, step, gemm, layer, overhead" in capsys.readouterr().err


def stage(path: Path, *, resume: bool = False) -> int:
    return gpu_stages.run_stage("overhead", path, seconds=0.0, samples=7, full=False, resume=resume)


def fake_measure(row: Row, **_: Any) -> dict[str, Any]:
    return run.heading(row) | {"status": "not measured", "reason": "made up"}


def test_a_lost_device_ends_the_process_and_the_next_goes_on(
    rehearsal: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Lost while the variants are timed: nobody knows by which, and the row has failed."""
    path = tmp_path / "bench-overhead.json"
    names = [r.name for r in gpu_stages.rows_of("overhead", full=False)]

    def loses(row: Row, **more: Any) -> dict[str, Any]:
        if row.name == names[1]:
            raise gpu_run.DeviceLost("AcceleratorError: an illegal memory access")
        return fake_measure(row, **more)

    monkeypatch.setattr(gpu_stages, "measure", loses)
    assert stage(path) == gpu_stages.LOST
    assert [r["status"] for r in results.load(path)["rows"]] == ["not measured", "failed"]
    assert stage(path, resume=True) == 0
    rows = results.load(path)["rows"]
    assert [r["name"] for r in rows] == names
    assert rows[1]["reason"] == "AcceleratorError: an illegal memory access"


def test_a_variant_that_kills_the_process_is_left_out(
    rehearsal: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In its row; after a second death in every row of its op. The other variants are measured."""
    starts: list[bool] = []
    rows = [r for r in CUDA_ROWS if r.name.startswith("cuda/amax/")]
    rows += [Row("cuda/amax/third", "of this test", None, lambda: made_case(rivals={}), "cuda")]
    monkeypatch.setattr(gpu_stages, "rows_of", lambda stage, full: rows)
    right = gpu_run.on

    def kills(backend: str, ops: tuple[str, ...]) -> Any:
        if backend == "reference":
            raise KeyboardInterrupt  # stands for the end of the process
        return right(backend, ops)

    def watched(command: list[str], path: Path, last: float) -> int:
        starts.append("--resume" in command)
        try:
            return stage(path, resume=starts[-1])
        except KeyboardInterrupt:
            return -9

    monkeypatch.setattr(gpu_run, "on", kills)
    monkeypatch.setattr(gpu_stages, "watched", watched)
    found = gpu_stages.run_all(["overhead"], tmp_path, budget=60, samples=7, full=False)
    content = found["overhead"]
    assert starts == [False, True, True]
    assert [r["name"] for r in content["rows"]] == [r.name for r in rows]
    for row in content["rows"]:
        assert row["variants"]["cpp"]["status"] == "ok"
        assert row["variants"]["reference"]["status"] == "failed"
        assert gpu_stages.RUNNING in row["variants"]["reference"]["reason"]
    assert len(content["broken"]) == 2
    assert gpu_stages.show(found) == 1


def test_rows_that_were_never_reached_are_named(
    rehearsal: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bench-overhead.json").write_text("an old one")
    monkeypatch.setattr(gpu_stages, "watched", lambda *_, **__: 1)
    found = gpu_stages.run_all(["overhead"], tmp_path, budget=0.1, samples=7, full=False)
    rows = found["overhead"]["rows"]
    assert len(rows) == len(gpu_stages.rows_of("overhead", full=False))
    assert {r["reason"] for r in rows} == {"the program did not start"}


def test_a_process_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_stages, "SILENT", 0.8)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    start = time.monotonic()
    assert gpu_stages.watched(command, tmp_path / "none", last=start + 50) == -9
    assert time.monotonic() - start < 20
    assert gpu_stages.watched([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, 1e9) == 3


# Tables and pictures


def a_variant(seconds: float, rival: float, op: str, backend: str) -> dict[str, Any]:
    figure = rival / seconds
    return {
        "status": "ok", "reason": "", "sources": sources.digest((op,), backend),
        "seconds": seconds, "call": 9e-6, "figure": figure, "share": 0.91, "met": figure >= 1.0,
    }  # fmt: skip


def a_gpu_result(names: list[str], gpu_name: str = "NVIDIA H200") -> dict[str, Any]:
    """A result file as a GPU would leave it; times are of the floor, so figures are plausible."""
    rows = []
    for i, name in enumerate(names):
        row = ROWS[name]
        floor = max(row.bytes / 4.8e12, row.flops / 8e14)
        rival = floor * (1.1 + 0.1 * (i % 5))
        variants = {
            "cuda": a_variant(floor * 1.15, rival, row.op, "cuda"),
            "triton": a_variant(floor * 1.3, rival, row.op, "triton"),
        }
        rows.append(
            run.heading(row)
            | {
                "variants": variants, "default": "cuda", "ops": [row.op], "rivals_refused": {},
                "waits": [], "median": {"ours": floor * 1.15, "torch": rival}, "host": False,
                "best_rival": "torch", "figure": 1.0, "met": True, "flops": row.flops,
                "bytes": row.bytes,
            }
        )  # fmt: skip
    where = {"gpu_name": gpu_name, "rehearsal": False, "torch": "2.11.0", "commit": "abc"}
    rows.append(run.heading(ROWS["cuda/layer/fp8/torchao"]) | {"status": "not measured", "reason":
                "torchao is not installed"})  # fmt: skip
    return {"environment": where, "rows": rows}


MEMORY = [r.name for r in CUDA_ROWS if r.op in ("quantize", "unscale_", "adamw_")]
PRODUCTS = [r.name for r in CUDA_ROWS if r.quick and r.op == "gemm" and "/bf16/" in r.name]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """README, docs and results, to be written to."""
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "bench" / "results" / "cpu", tmp_path / "bench" / "results" / "cpu")
    shutil.copy(ROOT / "bench" / "results" / "cuda_build.json", tmp_path / "bench" / "results")
    report.write(tmp_path)
    return tmp_path


def put(tree: Path, content: dict[str, Any], stage: str) -> None:
    path = tree / "bench" / "results" / "nvidia-h200" / f"bench-{stage}.json"
    results.save(path, content["environment"], content["rows"])


def test_tables_follow_from_the_results(tree: Path) -> None:
    before = (tree / "docs" / "kernels.md").read_text()
    put(tree, a_gpu_result(MEMORY), "memory")
    put(tree, a_gpu_result(PRODUCTS), "gemm")
    folder = tree / "bench" / "results" / "nvidia-h200"
    assert report.write(tree) == [
        tree / "README.md",
        *(tree / "docs" / name for name in ("kernels.md", "gpu.md", "claims.md")),
        *(folder / f"bench-{kind}.png" for kind in ("roofline", "ratio")),
    ]
    kernels = (tree / "docs" / "kernels.md").read_text()
    line = next(x for x in kernels.splitlines() if x.startswith("| quantize/bf16/given/8192x8192"))
    cells = [c.strip() for c in line.strip("|").split("|")]
    assert cells[1:7] == ["201 MB", "41.9 us", "cuda*, NVIDIA H200", "48.2 us", "4,174 GB/s",
                          "91% (>= 90%)"]  # fmt: skip
    assert "gemm/bf16/nt on NVIDIA H200 | cuda | torch |" in kernels
    assert kernels.count(report.NOT_YET) < before.count(report.NOT_YET)
    readme = (tree / "README.md").read_text()
    assert "| layer/fp8/torchao |  |  |  |  |  |  | NOT MEASURED | >= 1.05x |" in readme
    assert "quantize/bf16/given/8192x8192 | cuda* |" in readme
    assert "| triton" not in readme.split("<!-- gpu -->")[1].split("| family |")[0]
    assert report.write(tree) == []

    shutil.rmtree(folder)
    assert len(report.write(tree)) == 4
    assert (tree / "docs" / "kernels.md").read_text() == before


def test_a_figure_of_older_sources_says_so(tree: Path) -> None:
    content = a_gpu_result(["cuda/amax/bf16/8192x8192"])
    content["rows"][0]["variants"]["cuda"]["sources"] = "0" * 16
    put(tree, content, "memory")
    report.write(tree)
    lines = (tree / "docs" / "kernels.md").read_text().splitlines()
    amax = [x for x in lines if x.startswith("| amax/bf16/8192x8192")]
    assert [report.STALE in x for x in amax] == [True, False]
    assert report.STALE in (tree / "README.md").read_text()


def test_geometric_means_of_a_family() -> None:
    content = a_gpu_result(PRODUCTS)
    body = gpu_table.families(content["rows"])
    (line,) = [x for x in body if x[:2] == ("cuda/gemm/bf16/nn", "cuda")]
    ratios = [
        r["median"]["torch"] / r["variants"]["cuda"]["seconds"]
        for r in content["rows"]
        if r["name"].startswith("cuda/gemm/bf16/nn/")
    ]
    product = 1.0
    for ratio in ratios:
        product *= ratio
    assert line[2:6] == ("torch", "3", f"{product ** (1 / 3):.3g}x", f"{min(ratios):.3g}x")


def test_pictures_of_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for stage_name, names in (("memory", MEMORY), ("gemm", PRODUCTS)):
        content = a_gpu_result(names)
        path = tmp_path / "nvidia-h200" / f"bench-{stage_name}.json"
        results.save(path, content["environment"], content["rows"])
    assert (
        cli.main(["plot", str(tmp_path / "nvidia-h200"), "--out", str(tmp_path / "h200.png")]) == 0
    )
    for kind in ("roofline", "ratio"):
        png = tmp_path / f"h200-{kind}.png"
        assert png.read_bytes().startswith(b"\x89PNG")
        assert png.stat().st_size > 20_000
        assert png.name in capsys.readouterr().out or kind == "ratio"
    assert cli.main(["plot", str(tmp_path)]) == 2
    assert "holds no bench-*.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("low", "high"), [(0.005, 1.5), (0.95, 1.05), (0.5, 3.0), (0.9, 40.0), (0.2, 1.2)]
)
def test_ticks_of_ratios_have_room(low: float, high: float) -> None:
    ticks = gpu_plot._ticks(low, high)
    assert 1.0 in ticks
    assert len(ticks) >= 3
    width = math.log(max(high, 1.1) / min(low, 0.9))
    gaps = [math.log(b / a) / width for a, b in itertools.pairwise(ticks)]
    assert min(gaps) >= 0.05


def test_summary_of_the_compiler_s_report(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = json.loads((ROOT / "bench" / "results" / "cuda_build.json").read_text())
    for kernel in facts["kernels"]:
        assert kernel["spilled"] == 0, kernel
        assert any((ROOT / "csrc" / "cuda").rglob(kernel["source"])), kernel
        low, high = kernel["registers"]
        assert 0 < low <= high <= 255


def test_clock_of_a_gpu_is_what_the_timer_asks_for() -> None:
    """Without a GPU at least the names agree."""
    for name in ("host", "delay", "mark", "reached", "between", "synchronize"):
        for kind in (gpu_timer.CudaClock, gpu_timer.HostClock, SimulatedClock):
            found: Callable[..., Any] = getattr(kind, name)
            assert callable(found)
