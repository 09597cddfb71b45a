"""tests/gpu/stages.py recovers from tests that crash, hang or break CUDA, and names them."""

from __future__ import annotations

import json
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

GPU = Path(__file__).resolve().parents[1] / "gpu"
sys.path.append(str(GPU))

import pool  # noqa: E402
import sanitize  # noqa: E402
import stages  # noqa: E402
import summary  # noqa: E402


def run(folder: Path, tests: str, **options: Any) -> dict[str, Any]:
    """The result of a pool on a file with these tests."""
    (folder / "test_planted.py").write_text(textwrap.dedent(tests))
    settings = {"workers": 1, "limit": 60, "test_limit": 30, **options}
    planted = pool.Pool([str(folder / "test_planted.py")], folder / "pool", **settings)
    pool.run([planted], lambda: None)
    result = planted.result()
    result["tests"] = {t.split("::")[1]: words for t, words in result["tests"].items()}
    result["culprits"] = [t.split("::")[1] for t in result["culprits"]]
    return result


def test_what_ends_a_process_is_named_and_the_rest_runs(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        """
        import os, sys, time, types
        import pytest

        def test_hang():
            time.sleep(60)

        def test_abort():
            os.abort()

        def test_exit():
            os._exit(0)

        def test_wrong():
            assert 1 + 1 == 3, "that is not so"

        def test_fixture(nowhere):
            pass

        def test_skipped():
            print("left out: a reason")
            pytest.skip("no such thing here")

        def test_cuda_breaks(monkeypatch):
            def synchronize():
                raise RuntimeError("illegal access to memory")
            cuda = types.SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
            sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)

        def test_after_all_that():
            assert "torch" not in sys.modules
        """,
        workers=2,
        test_limit=3,
    )
    ended = "failure: its process was ended: "
    fixture = result["tests"].pop("test_fixture")
    assert fixture.startswith("error: file ")
    assert "fixture 'nowhere' not found" in fixture
    assert result["tests"] == {
        "test_hang": ended + "it took more than 3 s",
        "test_abort": ended + "SIGABRT",
        "test_exit": ended + "exit status 0",
        "test_wrong": "failure: AssertionError: that is not so; assert (1 + 1) == 3",
        "test_skipped": "skipped: no such thing here",
        "test_cuda_breaks": "failure: CUDA fails after it: illegal access to memory",
        "test_after_all_that": "passed",
    }
    assert result["culprits"] == ["test_abort", "test_cuda_breaks", "test_exit", "test_hang"]
    assert result["status"] == 1
    assert result["left_out"] == ["left out: a reason"]
    assert any("time.sleep(60)" in t or "in test_hang" in t for t in result["tails"]), "no stack"
    assert any("that is not so" in text for text in result["details"].values())


TOOL = """#!/bin/sh
# Takes the words of compute-sanitizer up to the command, and says what it would say.
while [ "$1" != "{python}" ]; do
  [ "$1" = --log-file ] && log=$(echo "$2" | sed "s/%p/$$/")
  shift
done
"$@"; status=$?
echo "========= ERROR SUMMARY: 2 errors" >"$log"
exit 9
"""


def test_the_third_death_of_a_kind_leaves_out_the_rest(tmp_path: Path) -> None:
    tests = "import os, pytest\n@pytest.mark.parametrize('i', range(5))\n"
    result = run(tmp_path, tests + "def test_abort(i): os.abort()\ndef test_other(): pass")
    outcomes = [outcome.split(":")[0] for outcome in result["tests"].values()]
    assert outcomes == ["failure"] * 3 + ["not run"] * 2 + ["passed"]
    assert (result["processes"], result["status"]) == (4, 1)


def test_a_pool_that_is_out_of_time(tmp_path: Path) -> None:
    tests = "import time\ndef test_a(): pass\ndef test_b(): time.sleep(60)\ndef test_c(): pass"
    result = run(tmp_path, tests, limit=8)
    a, b, c = result["tests"].values()
    assert (a, c, result["status"]) == ("passed", "not run", 124)
    assert b.startswith("not finished after")


def test_a_file_that_cannot_be_imported(tmp_path: Path) -> None:
    result = run(tmp_path, "import nothing_of_this_name")
    assert (result["status"], result["tests"]) == (2, {})
    assert "nothing_of_this_name" in result["tails"][0]
    text = summary.summary([summary.line("x", 1.0, result)] * 9, ["a failure"] * 99)
    assert len(text.splitlines()) <= summary.LINES
    assert "FAILED (2)" in text.splitlines()[-1]


def test_under_a_tool(tmp_path: Path) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(TOOL.format(python=sys.executable))
    program.chmod(0o755)
    log = tmp_path / "log"
    prefix = sanitize.command(str(program), "memcheck", log, "--launch-timeout arg")
    result = run(tmp_path, "def test_a(): pass", prefix=prefix)
    assert (result["tests"], result["processes"]) == ({"test_a": "passed"}, 1)
    assert sanitize.findings(log) == {"errors": 2, "log": "========= ERROR SUMMARY: 2 errors\n"}


def test_only_options_that_the_tool_knows(tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = sanitize.command("x", "racecheck", log, "--kernel-regex-exclude --print-limit")
    always = ["x", "--tool", "racecheck", "--log-file", f"{log}.%p", "--error-exitcode", "9"]
    assert words == [*always, "--print-limit", "50", "--kernel-regex-exclude", sanitize.TORCHS]
    assert sanitize.findings(log) == {"errors": None, "log": ""}
    hazards = "===== RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)\n"
    (tmp_path / "log.7").write_text("a" * 50_000 + hazards)
    found = sanitize.findings(log)
    assert found["errors"] == 3
    assert len(found["log"]) < 2 * sanitize.KEPT + 100


def test_a_stage_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(set(stages.FILES.values())) == len(stages.STAGES) <= 8
    monkeypatch.setenv("MIXPREC_TEST_DEVICE", "cpu")
    monkeypatch.setattr(stages, "DRY_RUN", True)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    command = ["stages.py", "--out", str(tmp_path), "--workers", "1", "--stages"]
    monkeypatch.setattr(sys, "argv", [*command, "all"])
    with pytest.raises(SystemExit):
        stages.main()
    assert "stages must be among env, self, cuda" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*command, "self", "--only", "inv_scale and cpp"])
    assert stages.main() == 0
    assert "1 passed, 0 failed" in capsys.readouterr().out
    report = json.loads((tmp_path / "gpu-test-self.json").read_text())
    assert report["tests"] == {"test_values.py::test_self_test[cpp-inv_scale]": "passed"}
    assert (report["stage"], report["status"], report["running"]) == ("self", 0, False)
    assert {"commit", "seconds", "gpu_before", "dry_run"} <= set(report)
    monkeypatch.setattr(stages, "DRY_RUN", False)
    monkeypatch.setattr(stages.device, "name", lambda: None)
    monkeypatch.setattr(sys, "argv", [*command, "self,large"])
    assert stages.main() == 1
    assert "large            not run: torch finds no GPU" in capsys.readouterr().out
