"""mixprec.bench: values before speed, figures that follow from samples, no file half written."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mixprec
from mixprec.bench import __main__ as cli
from mixprec.bench import device, results
from mixprec.bench.cases import gpt, models, select
from mixprec.bench.cases.registry import Case, NotMeasured

# Larger ones compute as smaller ones do, activations in int8 as in int4.
LEFT_OUT = "/1024$|/4x512/|/llama|gpt2-head|saved/int8"


@pytest.mark.parametrize(
    "case",
    [c for c in select([], device="cpu") if not re.search(LEFT_OUT, c.name)],
    ids=lambda c: c.name,
)
def test_values_of_a_case_agree(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With models of one layer: more of them compute as one does."""
    monkeypatch.setattr(models, "LAYERS", 1)
    monkeypatch.setattr(gpt, "SIZES", {"3x256": (1, 256, 128), "4x512": (1, 512, 256)})
    try:
        work = case.make()
    except NotMeasured as reason:
        pytest.skip(str(reason))
    assert work.check() is None
    assert "ours" not in work.baselines


# The command line


def test_quick_run_from_start_to_file(tmp_path: Path) -> None:
    """As typed: measure two cases, look at the file, compare it with itself."""
    out = tmp_path / "new folder" / "result.json"
    command = [sys.executable, "-m", "mixprec.bench", "run", "overhead/amax", "overhead/gemm"]
    command += ["--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(out.read_text())
    assert [r["name"] for r in content["rows"]] == ["overhead/amax", "overhead/gemm"]
    met = sum(r["met"] for r in content["rows"])
    assert done.stdout.splitlines()[-1] == f"{met} of 2 targets met"
    assert "[2/2] overhead/gemm" in done.stderr
    for row in content["rows"]:
        assert len(row["samples"]["ours"]) >= 9
        assert row["figure"] == pytest.approx(statistics.median(row["samples"]["ours"]) * 1e6)
    where = {"processor", "cores", "threads", "isa", "torch", "commit", "date"}
    assert where < content["environment"].keys()
    assert content["environment"]["quick"] is True
    assert [p.name for p in out.parent.iterdir()] == ["result.json"]

    assert cli.main(["compare", str(out), str(out), "--fail-over", "0%"]) == 0


def test_list_bad_arguments_and_a_wrong_case(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[torch.Tensor] = []
    monkeypatch.setattr(mixprec, "amax", lambda x: calls.append(x) or torch.zeros(()))
    out = str(tmp_path / "r.json")
    assert cli.main(["run", "overhead/amax", "--quick", "--out", out]) == 1
    text = capsys.readouterr().out
    assert "WRONG" in text
    assert text.splitlines()[-1] == "0 of 1 targets met, 1 wrong or failed"
    assert len(calls) == 1, "a wrong kernel is not timed"
    assert cli.main(["list", "gemm/fp16"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    monkeypatch.setattr(device, "DRY_RUN", False)
    monkeypatch.setattr(device, "name", lambda: None)
    for arguments, message in (
        (["run", "nothing", "--out", out], "op must be one of training, attention, "),
        (["run", "overhead/amax", "--quick", "--out", f"{out}/r"], f"cannot write {out}"),
        (["run", "overhead/amax", "--samples", "8"], "--samples: must be 9 or more, got '8'"),
        (["compare", "a", "b", "--fail-over", "5"], "must be a percentage such as 5%"),
    ):
        try:
            status = cli.main(arguments)
        except SystemExit as stopped:
            status = stopped.code
        assert status == 2, arguments
        assert message in capsys.readouterr().err


# Result files


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Relative to the baseline of the same run: everything twice as slow is no change of ours."""
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    target = {"value": 1.0, "unit": "x", "at_least": True}
    where = {"processor": "P", "threads": 2, "isa": "avx2", "gpu": None}
    for path, ours, torchs, threads, status, message in (
        (old, 0.5, 1.0, 2, 0, "none of 1 cases slower"),
        (new, 0.54, 1.0, 2, 1, "1 of 1 cases slower by more than 5 %: a\n"),
        (new, 1.0, 2.0, 2, 0, "+0.0 % time, relative to torch"),
        (new, 0.5, 1.0, 64, 2, "threads is 2 in OLD and 64 in NEW"),
    ):
        row = {"name": "a", "median": {"ours": ours, "torch": torchs}, "figure": 1 / ours,
               "status": "ok", "reason": "", "target": target, "met": True}  # fmt: skip
        results.save(path, where | {"threads": threads}, [row])
        assert cli.main(["compare", str(old), str(path), "--fail-over", "5%"]) == status, message
        assert message in "".join(capsys.readouterr())
