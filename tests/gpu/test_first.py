"""make gpu-first on a fake device: every job of it, tiny."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import unattended
from on_gpu import FAKE_DEVICE

import mixprec

JOBS = unattended.jobs(Path("OUT"), first=True)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_job_of_gpu_first(
    job: unattended.Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not FAKE_DEVICE:
        pytest.skip("for the fake device: make gpu-first runs the jobs on a GPU")
    monkeypatch.setenv("MIXPREC_BENCH_TINY", "1")
    monkeypatch.delenv("MIXPREC_STRICT", raising=False)  # the device has not all ops of torch
    if "pytest" in job.command:  # make cuda runs these tests, and a sanitizer needs a GPU
        command = [*job.command[job.command.index("pytest") - 2 :], "--collect-only"]
        found = subprocess.run(command, capture_output=True, text=True)
        for kernels in ("cuda", "triton") if job.kind == "self-test" else ("cuda",):
            assert f"test_self_test[{kernels}-quantize]" in found.stdout, found.stdout
        return
    command = [word.replace("OUT", str(tmp_path)) for word in job.command]
    if "--budget" in command:  # a slow machine may take its time
        command[command.index("--budget") + 1] = "490"
    result = unattended.run(job._replace(command=command, limit=500.0), tmp_path)
    said = (tmp_path / f"{job.name}.txt").read_text()
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert sum(sizes) < 2**20, "all jobs together stay far below 64 MiB"
    if job.kind == "env":
        assert result["status"] == 0, said
        return
    (path,) = tmp_path.glob("*.json")
    content = json.loads(path.read_text())
    assert content["environment"]["dry_run"] is True
    if not job.kind.startswith("profile"):
        assert {row["status"] for row in content["rows"]} <= {"ok", "not measured"}, said
        return
    assert path.stat().st_size < 200_000
    for row in content["rows"]:
        if "graphed" in row["way"] and not hasattr(mixprec, "graphed"):
            assert row["reason"] == "NotImplementedError: this mixprec has no mixprec.graphed"
            continue
        assert row["status"] == "ok", row
        assert row["profile"]["why_no_kernels"] == "the profiler saw no device"
        assert row.get("compiled_by") == ("aot_eager" if "compiled" in row["way"] else None)
