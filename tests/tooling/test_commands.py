"""The commands a person types: what they would run, and what they say when something is missing.

Nothing is installed and nothing compiled here: `make -n`, and checks with a made-up PATH.
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
    """Run make as from a shell of its own: nothing of the make that may run these tests."""
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


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with what make reads, and nothing built."""
    root = tmp_path / "clone"
    root.mkdir()
    for name in ("Makefile", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    for name in ("csrc", "mixprec", "bench", "triton_kernels", "tests"):
        shutil.copytree(
            ROOT / name, root / name, ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
    return root


def tools(folder: Path, **scripts: str) -> str:
    """A PATH with the shell's own tools and what `scripts` name: "" is the real program."""
    folder.mkdir()
    for name in ("sh", "mkdir", "touch", "find", "cksum", "cut", "date", "rm"):
        (folder / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    for name, text in scripts.items():
        program = folder / name
        if text:
            program.write_text(f"#!/bin/sh\n{text}\n")
            program.chmod(0o755)
        else:
            program.symlink_to(shutil.which(name) or pytest.fail(f"{name} is not installed"))
    return str(folder)


def python3(*, without: str = "", version: tuple[int, int] = (3, 11)) -> str:
    """A shell script that plays python3: it runs the real one, less a module or a header."""
    hide = {
        "ensurepip": "import sys; sys.modules['ensurepip'] = None",
        "Python.h": "import sysconfig; sysconfig.get_path = lambda name: '/nowhere'",
        "": "pass",
    }[without]
    old = f"import sys; sys.version_info = {version}" if version != (3, 11) else "pass"
    return (
        f'case "$1" in -c) exec "{sys.executable}" -c "{hide}; {old}\n$2";;'
        f" -V) echo Python {version[0]}.{version[1]};; *) exit 77;; esac"
    )


def test_help_is_the_default_and_lists_every_command() -> None:
    shown = make()
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout == make("help").stdout
    text = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert targets is not None
    commands = [t for t in targets[1].split() if not t.startswith("needs-") and t != "help"]
    assert commands[:4] == ["demo", "test", "lint", "bench"]
    for command in commands:
        assert f"make {command} " in shown.stdout
    assert "PYTHON=/path/to/python" in shown.stdout
    assert "FULL=1" in shown.stdout


@pytest.mark.parametrize(
    ("scripts", "packages"),
    [
        ({"g++": ""}, "python3 python3-venv python3-dev"),
        ({"g++": "", "python3": python3(without="ensurepip")}, "python3-venv"),
        ({"g++": "", "python3": python3(without="Python.h")}, "python3-dev"),
        ({"python3": python3()}, "g++"),
        ({}, "python3 python3-venv python3-dev g++"),
    ],
    ids=["python3", "venv", "headers", "compiler", "everything"],
)
def test_what_the_system_lacks_is_named_in_one_line(
    scripts: dict[str, str], packages: str, clone: Path, tmp_path: Path
) -> None:
    done = make("test", folder=clone, PATH=tools(tmp_path / "bin", **scripts))
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert said == [f"missing: {packages}. Run: sudo apt-get install {packages}"]
    assert not (clone / ".venv").exists()


def test_an_old_python_is_named_in_one_line(clone: Path, tmp_path: Path) -> None:
    path = tools(tmp_path / "bin", **{"g++": "", "python3": python3(version=(3, 8))})
    done = make("demo", folder=clone, PATH=path)
    assert done.returncode != 0
    (said,) = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert said.startswith(
        "mixprec needs Python 3.10 or newer, python3 is Python 3.8: sudo apt-get"
    )


def test_a_first_run_installs_builds_and_runs(clone: Path) -> None:
    """In this order, from the packages that the variables name."""
    done = make("-n", "test", "TORCH=torch==2.12.0", "ARGS=-x", folder=clone)
    assert done.returncode == 0, done.stderr
    steps = [
        '"python3" -m venv .venv',
        "pip install -q --disable-pip-version-check torch==2.12.0",
        "pip install -q --disable-pip-version-check setuptools wheel pybind11 ninja",
        '--no-build-isolation -e ".[test,examples]"',
        '-m pytest -c ../../pyproject.toml --rootdir ../.. -n 2 --dist worksteal -m "not slow and',
        " -x ../../tests/ops ",
    ]
    places = [done.stdout.find(step) for step in steps]
    assert -1 not in places, done.stdout
    assert places == sorted(places)


def test_demo_passes_full_on(clone: Path) -> None:
    assert "train_gpt.py --out demo --full" in make("-n", "demo", "FULL=1", folder=clone).stdout
    for off in ("FULL=", "FULL=0"):
        done = make("-n", "demo", off, folder=clone).stdout
        assert "train_gpt.py --out demo" in done
        assert "--full" not in done


def built(folder: Path, *arguments: str) -> None:
    """Pretend that everything up to now was made: touch the stamps that make asks for, in order."""
    for stamp in re.findall(r"^touch (\S+)$", make("-n", *arguments, folder=folder).stdout, re.M):
        (folder / stamp).parent.mkdir(parents=True, exist_ok=True)
        (folder / stamp).touch()


@pytest.mark.parametrize("mode", [[], [f"PYTHON={sys.executable}"]], ids=["venv", "PYTHON"])
def test_a_second_run_only_runs_and_a_changed_source_rebuilds(mode: list[str], clone: Path) -> None:
    built(clone, "test", *mode)
    again = make("-n", "test", *mode, folder=clone).stdout
    assert "install" not in again
    assert "build_ext" not in again
    assert "-m pytest" in again

    later = 2e9  # in the year 2033
    os.utime(clone / "csrc" / "module.cpp", (later, later))
    changed = make("-n", "test", *mode, folder=clone).stdout
    if mode:
        assert "--no-build-isolation --upgrade --target build/ext/" in changed
    else:
        assert "setup.py -q build_ext --inplace" in changed
        assert "pip" not in changed, "one changed C++ source needs no new installation"
        os.utime(clone / "setup.py", (later + 1, later + 1))
        assert '-e ".[test,examples]"' in make("-n", "test", folder=clone).stdout


def test_another_torch_is_installed_over_the_first(clone: Path) -> None:
    built(clone, "test")
    other = make("-n", "test", "TORCH=torch==2.12.0", folder=clone).stdout
    assert "check torch==2.12.0" in " ".join(other.split())
    assert '-e ".[test,examples]"' in other


def test_lint_compiles_with_warnings_as_errors_apart_from_the_normal_build(clone: Path) -> None:
    built(clone, "test")
    shown = make("-n", "lint", folder=clone).stdout
    for step in ("ruff check .", "ruff format --check .", "-m mypy", "--dry-run -Werror csrc/"):
        assert step in shown, step
    assert re.search(r"MIXPREC_WERROR=1 .* build_ext \\\n +--build-temp build/werror/", shown)
    built(clone, "lint")
    assert "MIXPREC_WERROR" not in make("-n", "lint", folder=clone).stdout


# PYTHON=…: an environment that is only read


def test_python_mode_writes_only_below_build(clone: Path) -> None:
    shown = make("-n", "bench", f"PYTHON={sys.executable}", folder=clone).stdout
    assert "-m venv" not in shown
    assert not re.search(r"[ \"]\.venv", shown)
    assert str(clone / ".venv") not in shown
    (install,) = re.findall(r"-m pip install .*\\\n.*", shown)
    assert "--no-deps --no-build-isolation --upgrade --target build/ext/" in " ".join(
        install.split()
    )
    assert "PYTHONDONTWRITEBYTECODE=1" in shown
    site = re.search(r'PYTHONPATH="([^"$]*)', shown)
    assert site is not None
    assert site[1].startswith(str(clone / "build" / "ext"))
    assert "cd build/run && " in shown, "started in the source folder, it would import the source"


def test_two_pythons_get_two_folders(clone: Path, tmp_path: Path) -> None:
    """A second interpreter path is a second environment, though it is the same program."""
    other = tmp_path / "bin" / "python3"
    other.parent.mkdir()
    other.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = -c ] && exec "{sys.executable}" -c "import sys; sys.executable = \'$0\'\n$2"\n'
        "exit 77\n"
    )
    other.chmod(0o755)
    folders = set()
    for python in (sys.executable, str(other)):
        shown = make("-n", "test", f"PYTHON={python}", folder=clone).stdout
        folders |= set(re.findall(r"--target (build/ext/[0-9a-f]{12})/site", shown))
    assert len(folders) == 2, folders


def test_python_mode_takes_relative_paths_and_names(clone: Path) -> None:
    for python, path in (
        (os.path.relpath(sys.executable, clone), os.environ["PATH"]),
        (Path(sys.executable).name, f"{Path(sys.executable).parent}:{os.environ['PATH']}"),
    ):
        shown = make("-n", "test", f"PYTHON={python}", folder=clone, PATH=path).stdout
        (program,) = re.findall(r'"([^"]*)" -m pytest', shown)
        assert program.startswith("/"), program
        assert Path(program).samefile(sys.executable)
    done = make("test", "PYTHON=/nowhere/python", folder=clone)
    assert done.returncode != 0
    assert "PYTHON=/nowhere/python is not a program" in done.stderr


def test_a_package_that_is_missing_is_named_in_one_line(clone: Path, tmp_path: Path) -> None:
    """Hide two packages from the real interpreter; nothing is built before they are named."""
    python = tmp_path / "python"
    hide = "import importlib.util as u; find = u.find_spec; "
    hide += "u.find_spec = lambda n: None if n in ('hypothesis', 'rich') else find(n)"
    python.write_text(
        '#!/bin/sh\n[ "$1" = -c ] || exit 77\nprogram=$2; shift 2\n'
        f'exec "{sys.executable}" -c "{hide}\n$program" "$@"\n'
    )
    python.chmod(0o755)
    done = make("test", f"PYTHON={python}", folder=clone)
    assert done.returncode != 0
    (said,) = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert said == (
        "missing in this environment: hypothesis rich. "
        f"Run: {sys.executable} -m pip install hypothesis rich"
    )
    assert not (clone / "build").exists()


def test_the_packages_that_make_asks_for_are_the_extras() -> None:
    """The lists in the Makefile and in pyproject.toml name the same packages."""
    project = (ROOT / "pyproject.toml").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for extra in ("test", "demo", "lint"):
        declared = re.search(rf"^{extra} = \[(.*)\]$", project, re.MULTILINE)
        asked = re.search(rf"^needs-{extra}:\n\t\$\(call NEEDS,(.*)\)$", makefile, re.MULTILINE)
        assert declared is not None
        assert asked is not None
        # What only some systems get (Triton) is no need: its tests are skipped without it.
        words = [word for word in re.findall(r'"([^"]*)"', declared[1]) if ";" not in word]
        names = {re.split(r"[=<>]", word)[0] for word in words}
        assert {name.replace("_", "-") for name in asked[1].split()} == names, extra


def test_ci_runs_what_the_readme_says() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text()
    assert "set -euo pipefail" in text
    for command in ("make lint", "make test", '-m exhaustive"', "MIXPREC_ISA=$level"):
        assert command in text
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
