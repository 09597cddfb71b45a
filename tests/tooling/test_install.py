"""What a build says if it cannot start: the reason, in one line.

Nothing is compiled here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

BACKEND = "from setuptools.build_meta import *; get_requires_for_build_wheel()"  # as pip begins
NO_TORCH = "import sys; sys.modules['torch'] = None"
# As pip isolates a build: the same interpreter, without what is installed for it.
ISOLATED = "import sys; sys.path = [p for p in sys.path if not p.endswith('-packages')]"
NO_HEADERS = "import sysconfig; sysconfig.get_path = lambda name: '/nowhere'"
COMPILER = "#!/bin/sh\necho 'cc: note' >&2; echo 'cc: error: -std=c++20 unknown' >&2; exit 1\n"


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    drop = ("CXX", "CI", "MIXPREC_BUILD", "PYTHONPATH")
    inherited = {name: value for name, value in os.environ.items() if name not in drop}
    env = {**inherited, **variables}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=env, check=False
    )


def modules(folder: Path, **sources: str) -> str:
    """A PYTHONPATH with these modules."""
    for name, source in sources.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return str(folder)


def sentence(**variables: str) -> str:
    """All that the build prints before it stops."""
    done = run("-c", BACKEND, **variables)
    assert done.returncode == 1
    (line,) = (done.stdout + done.stderr).splitlines()
    return line


def test_the_reason_is_the_one_line_that_a_build_prints(tmp_path: Path) -> None:
    wrong = "MIXPREC_BUILD must be auto, cpu or cuda, got 'gpu'"
    assert sentence(MIXPREC_BUILD="gpu") == wrong

    apt = "; on Debian and Ubuntu: sudo apt-get install"
    assert sentence(PATH=str(tmp_path)) == (
        f"mixprec cannot be built without a C++ compiler (c++ or g++ in PATH, or CXX){apt} g++"
    )
    assert sentence(CXX="g++-0") == (
        f"mixprec cannot be built without a C++ compiler (CXX=g++-0 is not a program){apt} g++"
    )
    path = modules(tmp_path / "headers", sitecustomize=NO_HEADERS)
    assert sentence(PYTHONPATH=path) == (
        f"mixprec cannot be built without Python.h of {os.path.abspath(sys.executable)}{apt} "
        "python{}.{}-dev".format(*sys.version_info[:2])
    )
    old = tmp_path / "c++"
    old.write_text(COMPILER)
    old.chmod(0o755)
    assert sentence(CXX=f"{old} -O1") == (
        f"mixprec is written in C++20 for GCC, which {old} -O1 does not compile "
        "(cc: error: -std=c++20 unknown): install a newer g++, or name it, as in CXX=g++-12"
    )


def test_a_torch_that_does_not_do_is_named(tmp_path: Path) -> None:
    path = modules(tmp_path / "none", sitecustomize=NO_TORCH)
    built_for = "mixprec is built for the torch that will run it, "
    assert sentence(PYTHONPATH=path) == (
        f"{built_for}and there is none in {sys.prefix}: pip install torch, then repeat the command"
    )
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\nuv = 0.9.0\n")
    path = modules(tmp_path / "uv", sitecustomize=f"{NO_TORCH}; sys.prefix = {str(tmp_path)!r}")
    assert sentence(PYTHONPATH=path) == (
        f"{built_for}which uv hides from a build: uv pip install torch setuptools wheel pybind11 "
        "ninja, then uv pip install --no-build-isolation ."
    )
    path = modules(tmp_path / "broken", torch="raise ImportError('libcudart.so.13:\\n gone')")
    assert sentence(PYTHONPATH=path) == (
        f"{built_for}which cannot be imported: libcudart.so.13: gone"
    )
    path = modules(tmp_path / "old", torch="__version__ = '2.9.1+cpu'")
    assert sentence(PYTHONPATH=path) == (
        f"mixprec needs torch 2.11 or newer, and {sys.prefix} has 2.9.1+cpu: "
        "pip install 'torch>=2.11', then repeat the command"
    )


def test_cuda_that_was_asked_for_needs_nvcc(tmp_path: Path) -> None:
    torch = {
        "torch/__init__": "__version__ = '2.13.0'\nfrom . import version",
        "torch/version": "cuda = '13.0'",
        "torch/utils/cpp_extension": (
            "CUDA_HOME = None\nBuildExtension = object\ninclude_paths = library_paths = None"
        ),
    }
    said = sentence(PYTHONPATH=modules(tmp_path, **torch), MIXPREC_BUILD="cuda")
    assert said == "MIXPREC_BUILD=cuda: no nvcc for CUDA 13.0 in CUDA_HOME or PATH"


def test_pip_shows_that_line_alone() -> None:
    pytest.importorskip("pip")
    install = ("-m", "pip", "install", "--no-build-isolation", "--no-deps", ".")
    done = run(*install, MIXPREC_BUILD="gpu")
    assert done.returncode == 1
    lines = [line.strip() for line in done.stderr.splitlines() + done.stdout.splitlines()]
    start = next(i for i, line in enumerate(lines) if "lines of output]" in line)
    assert "[1 lines of output]" in lines[start]
    assert lines[start + 1] == "MIXPREC_BUILD must be auto, cpu or cuda, got 'gpu'"


def test_an_isolated_build_finds_the_torch_of_the_environment(tmp_path: Path) -> None:
    path = modules(tmp_path, sitecustomize=ISOLATED)
    code = "import sys; sys.path.insert(0, '.ci'); import build_checks as checks\n"
    code += "from importlib.util import find_spec; "
    code += "print(find_spec('torch')); checks.show_site_packages(); print(find_spec('torch').name)"
    assert run("-c", code, PYTHONPATH=path).stdout.split() == ["None", "torch"]
