"""What run.py needs, compiled by g++: the GPU itself, and mixprec's CUDA ops for it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.utils.cpp_extension import include_paths, library_paths

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from emulated.hopper import runner as hopper  # noqa: E402
from emulated.shim import runner  # noqa: E402

SITE = runner.ROOT / "build" / "emulated" / "site"
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # as in setup.py


def cuda_headers() -> list[str]:
    """The options by which nvcc finds CUDA's headers."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise RuntimeError("the GPU is compiled with the headers that come with nvcc: not in PATH")
    command = [nvcc, "-dryrun", "-x", "cu", "-c", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.search(r'INCLUDES="([^"]+)"', said)
    assert found is not None, f"nvcc -dryrun names no include folder: {said}"
    return [f"-isystem{word.removeprefix('-I')}" for word in found[1].split()]


def runtime() -> Path:
    """The GPU, under the name by which torch asks for the driver."""
    words = ["-O1", "-shared", "-Wl,-soname,libcuda.so.1", *cuda_headers()]
    return runner.compile_([*words, HERE / "cudart.cpp", HERE / "driver.cpp"], ".so")


def ops() -> Path:
    """csrc/cuda/*.cu, launchers and kernels, over the model of the GPU's instructions."""
    words = ["-O1", "-Wno-attributes", "-DUSE_CUDA", "-DCUDA_ON_CPU_GRAPHS", STABLE_ABI]
    words += [f"-I{hopper.HERE}", *(f"-isystem{path}" for path in include_paths())]

    def compiled(source: Path) -> Path:
        return runner.compile_([*words, "-x", "c++", "-c", source], ".o")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sorted((runner.CSRC / "cuda").rglob("*.cu"))))
    libraries = [f"-L{path}" for path in library_paths()] + ["-Wl,--no-as-needed", "-ltorch_cuda"]
    libraries += ["-ltorch_cpu", "-ltorch", "-lc10"]
    return runner.compile_(["-shared", *objects, *hopper.units(), *libraries], ".so")


def site(installed: Path) -> Path:
    """A folder with the package that is installed there, but for its CUDA libraries."""
    shutil.rmtree(SITE, ignore_errors=True)
    leave = shutil.ignore_patterns("_C_cuda*", "_C_sm90*", "_C_family*", "__pycache__")
    shutil.copytree(installed, SITE / "mixprec", ignore=leave)
    (SITE / "mixprec" / "_C_cuda.so").symlink_to(ops())
    return SITE


def environment(installed: Path) -> dict[str, str]:
    """With which a Python sees the GPU and runs mixprec on it."""
    found = [str(site(installed)), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "LD_PRELOAD": str(runtime()),
        "PYTHONPATH": os.pathsep.join(found),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
