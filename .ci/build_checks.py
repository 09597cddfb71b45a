"""What a build needs: each check returns the one sentence that says what is missing, or "".

setup.py asks before it does anything else, so that the sentence is all that pip prints. make asks
before there is an environment, and then for venv too: python .ci/build_checks.py venv.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

VERSION = "{}.{}".format(*sys.version_info[:2])
# What csrc is written in: C++20, and code for several processors in one program, as GCC has it.
PROGRAM = """#include <cstdint>
constinit std::uint32_t one = 1;
template <class T> requires(sizeof(T) == 4) T same(T x) { return x; }
#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC target("avx512f,avx512bf16")
void twice(float* x) { _mm512_storeu_ps(x, _mm512_add_ps(_mm512_loadu_ps(x), _mm512_loadu_ps(x))); }
#endif
"""
TORCH = (2, 11)


def compiler() -> str:
    """The C++ compiler: CXX, else the first that is there; "" if none is."""
    asked = os.environ.get("CXX", "").split()
    return next(filter(None, map(shutil.which, asked[:1] or ("c++", "g++"))), "")


def why_no_python() -> str:
    """This interpreter is too old."""
    if tuple(sys.version_info[:2]) >= (3, 10):
        return ""
    packages = "python3.12 python3.12-venv python3.12-dev"
    return (
        f"mixprec needs Python 3.10 or newer, and {sys.executable} is Python {VERSION}: "
        f"sudo apt-get install {packages}, then make PYTHON3=python3.12"
    )


def why_no_system(venv: bool = False) -> str:
    """What only the system's package manager can bring, all of it at once."""
    python = f"python{VERSION}"
    lack = {}
    if venv and None in (find_spec("ensurepip"), find_spec("venv")):
        lack[f"{python}-venv"] = f"the module venv of {sys.executable}"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        lack[f"{python}-dev"] = f"Python.h of {sys.executable}"
    if not compiler():
        asked = os.environ.get("CXX")
        names = f"CXX={asked} is not a program" if asked else "c++ or g++ in PATH, or CXX"
        lack["g++"] = f"a C++ compiler ({names})"
    if not lack:
        return ""
    return (
        f"mixprec cannot be built without {' and '.join(lack.values())}; "
        f"on Debian and Ubuntu: sudo apt-get install {' '.join(lack)}"
    )


def why_no_gcc() -> str:
    """The compiler is too old, of another kind, or broken: it is asked to compile a few lines."""
    program = os.environ.get("CXX", "").split() or [compiler()]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "check.cpp")
        source.write_text(PROGRAM)
        command = [*program, "-std=c++20", "-S", "-o", os.devnull, str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    reason = next((line for line in said if "error" in line), said[0])
    return (
        f"mixprec is written in C++20 for GCC, which {' '.join(program)} does not compile "
        f"({reason}): install a newer g++, or name it, as in CXX=g++-12"
    )


def why_no_build() -> str:
    """MIXPREC_BUILD is misspelt."""
    build = os.environ.get("MIXPREC_BUILD", "auto")
    if build in ("auto", "cpu", "cuda"):
        return ""
    return f"MIXPREC_BUILD must be auto, cpu or cuda, got {build!r}"


def show_site_packages() -> None:
    """Where torch is not found, look where this interpreter has its packages: a build that pip
    isolates runs in the interpreter of the environment, but does not see what is installed there.
    Behind sys.path: what the build itself brings comes first."""
    if find_spec("torch") is None:
        folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        folders += site.getsitepackages()
        if sys.prefix == sys.base_prefix:  # not in a virtual environment
            folders.append(site.getusersitepackages())
        sys.path += [folder for folder in folders if folder not in sys.path]


def why_no_torch() -> str:
    """The environment has no torch, one that does not load, or an old one."""
    show_site_packages()
    if find_spec("torch") is None:
        settings = Path(sys.prefix, "pyvenv.cfg")
        if settings.exists() and "\nuv = " in f"\n{settings.read_text()}":
            return (
                "mixprec is built for the torch that will run it, which uv hides from a build: "
                "uv pip install torch setuptools wheel pybind11 ninja, then "
                "uv pip install --no-build-isolation ."
            )
        return (
            "mixprec is built for the torch that will run it, and there is none in "
            f"{sys.prefix}: pip install torch, then repeat the command"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about numpy: it would be the first line
            import torch
    except Exception as error:
        said = " ".join(str(error).split())
        return f"mixprec is built for the torch that will run it, which cannot be imported: {said}"
    if tuple(int(word) for word in torch.__version__.split(".")[:2]) < TORCH:
        least = ".".join(map(str, TORCH))
        return (
            f"mixprec needs torch {least} or newer, and {sys.prefix} has {torch.__version__}: "
            f"pip install 'torch>={least}', then repeat the command"
        )
    return ""


def stop_at_the_first(*checks: Callable[[], str]) -> None:
    for check in checks:
        sentence = check()
        if sentence:
            sys.exit(sentence)


def before_setup() -> None:
    """Stop if setup.py cannot build here; the fast checks come first."""
    stop_at_the_first(why_no_python, why_no_build, why_no_system, why_no_torch, why_no_gcc)


if __name__ == "__main__":
    system = partial(why_no_system, venv="venv" in sys.argv)
    stop_at_the_first(why_no_python, system, why_no_gcc)
