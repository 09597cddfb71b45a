"""The make commands: what they would run, and what they print when something is missing.

Nothing is installed or compiled here: `make -n`, and checks with a PATH made for the test.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(
    *arguments: str, folder: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run make without the variables of the make that may run these tests."""
    drop = ("PYTHON", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "TESTS", "ARGS")
    inherited = {k: v for k, v in os.environ.items() if k not in drop}
    return subprocess.run(
        [shutil.which("make") or "make", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**inherited, **variables},
        check=False,
    )


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that make reads, and nothing built. Tests do not change it."""
    root = tmp_path_factory.mktemp("make") / "clone"
    root.mkdir()
    for name in ("Makefile", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    for name in (".ci", "csrc", "mixprec", "bench", "triton_kernels", "tests"):
        shutil.copytree(
            ROOT / name, root / name, ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
    return root


@pytest.fixture
def clone(sources: Path, tmp_path: Path) -> Path:
    """A copy of `sources` for tests that touch build stamps or sources."""
    return shutil.copytree(sources, tmp_path / "clone")


def tools(folder: Path, *real: str, python: str = "") -> str:
    """A PATH with basic tools, the `real` programs, and python3 as this shell script."""
    folder.mkdir()
    for name in ("sh", "mkdir", "touch", "find", "cksum", "cut", "date", "rm", *real):
        (folder / name).symlink_to(shutil.which(name) or pytest.fail(f"{name} is not installed"))
    if python:
        write_program(folder / "python3", python)
    return str(folder)


def write_program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def interpreter(first: str) -> str:
    """The real interpreter as a shell script, which runs this code before any other."""
    by_path = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], {}, '__main__')"
    return (
        f'case "$1" in -c) exec "{sys.executable}" -c "{first}\n$2";; '
        f'*.py) exec "{sys.executable}" -c "{first}\n{by_path}" "$@";; *) exit 77;; esac'
    )


def test_help_is_the_default_and_lists_every_command(sources: Path) -> None:
    shown = make()
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout == make("help").stdout
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets is not None
    commands = set(targets[1].split()) - {"help"}
    assert {"demo", "test", "lint", "bench"} < commands
    for text in (*(f"make {c} " for c in commands), "PYTHON=/path/to/python", "FULL=1"):
        assert text in shown.stdout
    assert "--out demo --full" in make("-n", "demo", "FULL=1", folder=sources).stdout
    assert "train_gpt.py --out demo" in make("-n", "demo", folder=sources).stdout


def message(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that a failing make prints beside its own."""
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    return line


def test_missing_system_packages_are_named_in_one_line(sources: Path, tmp_path: Path) -> None:
    no_venv = interpreter("import sys; sys.modules['ensurepip'] = None")
    no_header = interpreter("import sysconfig; sysconfig.get_path = lambda name: '/nowhere'")
    python = "python{}.{}".format(*sys.version_info[:2])
    for i, (real, script, packages) in enumerate(
        (
            (["g++"], "", "python3 python3-venv python3-dev g++"),
            (["g++"], no_venv, f"{python}-venv"),
            (["g++"], no_header, f"{python}-dev"),
            ([], interpreter("pass"), "g++"),
            ([], no_header, f"{python}-dev g++"),
        )
    ):
        path = tools(tmp_path / f"{i}", *real, python=script)
        said = message(make("test", folder=sources, PATH=path, CXX=""))
        assert said.endswith(f"on Debian and Ubuntu: sudo apt-get install {packages}")
        assert not (sources / ".venv").exists()
    script = interpreter("import sys; sys.version_info = (3, 8)")
    old = make("demo", folder=sources, PATH=tools(tmp_path / "old", "g++", python=script))
    said = message(old)
    assert said.startswith("mixprec needs Python 3.10 or newer, and ")
    assert " is Python 3.8: sudo apt-get install python3.12 " in said


def built(folder: Path, *arguments: str) -> None:
    """Mark everything as built: touch the stamps that make would touch, in order."""
    for stamp in re.findall(r"^touch (\S+)$", make("-n", *arguments, folder=folder).stdout, re.M):
        (folder / stamp).parent.mkdir(parents=True, exist_ok=True)
        (folder / stamp).touch()


def test_a_second_run_only_runs_and_a_changed_source_rebuilds(clone: Path) -> None:
    python = f"PYTHON={sys.executable}"
    for mode in ([], [python]):
        built(clone, "test", *mode)
        again = make("-n", "test", *mode, folder=clone).stdout
        assert "install" not in again
        assert "build_ext" not in again
        assert "-m pytest" in again
    other = make("-n", "test", "TORCH=torch==2.12.0", folder=clone).stdout
    assert "check torch==2.12.0" in " ".join(other.split())
    assert "-e ." in other
    assert "extra test" in other

    later = 2e9  # in the year 2033
    os.utime(clone / "csrc" / "module.cpp", (later, later))
    changed = make("-n", "test", python, folder=clone).stdout
    assert "--no-build-isolation --upgrade --target build/ext/" in changed
    changed = make("-n", "test", folder=clone).stdout
    assert "setup.py build_ext --inplace" in changed
    assert "pip" not in changed, "one changed C++ source needs no new installation"
    os.utime(clone / "setup.py", (later + 1, later + 1))
    renewed = make("-n", "test", folder=clone).stdout
    assert "-e ." in renewed
    assert "extra test" in renewed


# PYTHON=...: an environment that is not written to


def test_python_mode_writes_only_below_build(sources: Path) -> None:
    shown = make("-n", "bench", f"PYTHON={sys.executable}", folder=sources).stdout
    assert "-m venv" not in shown
    assert not re.search(r"[ \"]\.venv", shown)
    assert str(sources / ".venv") not in shown
    words = " ".join(shown.split())
    assert "--no-deps --no-build-isolation --upgrade --target build/ext/" in words
    assert "PYTHONDONTWRITEBYTECODE=1" in shown
    assert f'PYTHONPATH="{sources}/build/ext' in shown
    assert "cd build/run && " in shown, "started in the source folder, it would import the source"


def test_the_packages_that_make_asks_for_are_the_extras() -> None:
    """The lists of make and of pyproject.toml name the same packages."""
    project, listed = (
        (ROOT / "pyproject.toml").read_text(),
        (ROOT / ".ci/environment.mk").read_text(),
    )
    for extra in ("test", "demo", "docs", "lint"):
        (declared,) = re.findall(rf"^{extra} = \[(.*)\]$", project, re.MULTILINE)
        (asked,) = re.findall(rf"^PACKAGES_{extra} := (.*)$", listed, re.MULTILINE)
        # Packages for some systems only (Triton) are optional: their tests are skipped.
        words = [word for word in re.findall(r'"([^"]*)"', declared) if ";" not in word]
        names = {re.split(r"[=<>]", word)[0] for word in words}
        assert {name.replace("_", "-") for name in asked.split()} == names, extra
