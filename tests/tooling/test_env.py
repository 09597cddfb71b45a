"""mixprec.env: the report is complete, its self-tests can fail, and the exit code says so."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mixprec
from mixprec.diagnostics import env
from mixprec.ops._dispatch import backends, gemm_choice, gemm_rows, library, self_check


def run(*arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mixprec.env", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **variables},
        check=False,
    )


def test_json_of_a_process_of_its_own(tmp_path: Path) -> None:
    done = run("--json", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(done.stdout)
    assert facts["ok"] is True
    assert facts["versions"]["torch"] == str(torch.__version__)
    assert facts["versions"]["mixprec"] == mixprec.__version__
    assert facts["machine"]["threads"] >= 1
    assert facts["machine"]["cores"] >= 1
    assert facts["extension"]["isa"] in facts["extension"]["isa_available"]
    assert set(facts["ops"]["cpu"]) == set(library.OPS)
    for name, row in facts["ops"]["cpu"].items():
        assert row["uses"] == "cpp", name
        assert set(row["others"]) == set(backends.BACKENDS) - {"cpp"}, name
        assert all(row["others"].values()), f"{name}: a backend was left without a reason"
        assert facts["self_test"]["cpu"][name] == {"ok": True, "worst": 0.0, "reason": None}


def test_a_forced_level_is_reported(tmp_path: Path) -> None:
    done = run("--json", folder=tmp_path, MIXPREC_ISA="base")
    assert done.returncode == 0, done.stdout + done.stderr
    extension = json.loads(done.stdout)["extension"]
    assert (extension["isa"], extension["isa_forced"]) == ("base", "base")


def test_text_names_every_op_and_the_level() -> None:
    text = env.describe(env.report())
    for name in library.OPS:
        assert any(line.split()[:3] == [name, "cpp", "ok,"] for line in text.splitlines()), name
    assert library.C is not None
    assert f"level in use {library.C.isa()}" in text
    assert text.endswith("All is well.")


def test_without_the_extension(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not built: the reason is printed, no op claims to work, and the exit code is 1."""
    monkeypatch.setattr(library, "C", None)
    monkeypatch.setattr(library, "LOAD_ERROR", "mixprec._C is not built: run this")
    assert env.main([]) == 1
    text = capsys.readouterr().out
    assert "NOT LOADED   mixprec._C is not built: run this" in text
    assert "not tested: no backend can run it" in text
    assert "Something is wrong" in text
    assert env.main(["--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["ops"]["cpu"]["gemm"]["uses"] is None
    assert facts["extension"] == {"loaded": False, "reason": "mixprec._C is not built: run this"}


def test_every_op_has_a_self_test() -> None:
    assert set(self_check.INPUTS) == set(library.OPS)
    nobody = env.self_test("nobody", "cpu")
    assert not nobody["ok"]
    assert "no self-test" in nobody["reason"]


def first_tensor(values: object) -> torch.Tensor | None:
    """The first tensor in nested lists and tuples."""
    if isinstance(values, torch.Tensor):
        return values
    if isinstance(values, (list, tuple)):
        return next((t for v in values if (t := first_tensor(v)) is not None), None)
    return None


@pytest.mark.parametrize("name", self_check.INPUTS)
def test_self_test_sees_a_wrong_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose result, or whose first argument afterwards, is off by 1 fails the report."""
    right = backends.call

    def wrong(op: str, device: str, *arguments: object) -> object:
        result = right(op, device, *arguments)
        if op == name:
            target = first_tensor([result, arguments])
            assert target is not None
            target.copy_(target.float() + 1)
        return result

    monkeypatch.setattr(backends, "call", wrong)
    facts = env.report()
    outcome = facts["self_test"]["cpu"][name]
    assert not outcome["ok"]
    assert outcome["worst"] > 0
    said = env.describe(facts)
    assert re.search(rf"^  {name} +cpp +FAILED, worst difference", said, re.MULTILINE)
    assert not facts["ok"]
    assert [n for n, test in facts["self_test"]["cpu"].items() if not test["ok"]] == [name]


def test_self_test_reports_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> object:
        raise RuntimeError("no such luck\nsecond line")

    monkeypatch.setattr(backends, "call", broken)
    outcome = env.self_test("amax", "cpu")
    assert outcome == {"ok": False, "worst": math.inf, "reason": "RuntimeError: no such luck"}


@pytest.mark.parametrize(
    ("x", "y", "difference"),
    [
        (1.0, 1.0, 0.0),
        (1.0, 1.5, 0.5),
        (0.0, -0.0, math.inf),
        (math.nan, math.nan, 0.0),
        (math.nan, 1.0, math.inf),
        (math.inf, math.inf, 0.0),
        (math.inf, -math.inf, math.inf),
        (math.inf, 3e38, math.inf),
    ],
)
def test_difference(x: float, y: float, difference: float) -> None:
    assert self_check._difference(x, y) == difference


ROW = gemm_rows.Row("9.0", "bf16", "thin", "cuda", "NVIDIA H200", "2026-01-02", 1.25)


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> dict:
    """The report of this machine as if its CPU were a GPU of compute capability 9.0."""
    monkeypatch.setattr(library, "capability", lambda index: (9, 0))
    facts = env.report()
    ops = env.variants("cuda")
    tests = {name: facts["self_test"]["cpu"][name] for name in ops}
    return {**facts, "ops": {"cuda": ops}, "self_test": {"cuda": tests}}


def test_how_gemm_is_chosen_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    monkeypatch.setenv("MIXPREC_TUNED", str(path))
    try:
        gemm_choice.forget()
        facts = as_on_a_gpu(monkeypatch)
        row = facts["ops"]["cuda"]["gemm"]
        assert row["uses"] == "vendor"
        assert row["others"]["reference"] == "vendor comes first"
        text = env.describe(facts)
        assert "gemm uses, of vendor, cuda, triton, reference, the first that can do the" in text
        assert f"nothing is measured for compute capability 9.0: {TUNE}, and writes {path}" in text
        path.write_text(json.dumps([ROW._asdict(), ROW._replace(arch="8.0")._asdict()]))
        gemm_choice.forget()
        facts = as_on_a_gpu(monkeypatch)
        assert facts["gemm"]["rows"] == [ROW._asdict()]
        text = env.describe(facts)
        assert "bf16  thin       cuda     1.25x (NVIDIA H200, 2026-01-02)" in text
        assert "nothing is measured" not in text
        json.dumps(facts)
    finally:
        monkeypatch.delenv("MIXPREC_TUNED")
        gemm_choice.forget()


TUNE = "python -m mixprec.bench tune measures"
