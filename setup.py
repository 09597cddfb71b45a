"""The whole build: what is compiled, for which processors, and why not, in one page.

MIXPREC_BUILD=auto|cpu  what to build (auto: everything that this machine can)
MIXPREC_WERROR=1             C++ warnings are errors (lint and CI only)
MAX_JOBS=N                   parallel compilations (default: cores, at most one per 4 GB of RAM)
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup

INSTALL = "pip install --no-build-isolation ."

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, include_paths, library_paths
except ImportError as error:
    sys.exit(
        f"mixprec is built against the torch that will run it, and this Python cannot import it "
        f"({error}): pip install torch setuptools wheel && {INSTALL}"
    )

try:
    import pybind11

    PYBIND11_INCLUDE = [pybind11.get_include()]
except ImportError:  # torch carries a copy of the headers
    PYBIND11_INCLUDE = []

BUILD = os.environ.get("MIXPREC_BUILD", "auto")
if BUILD not in ("auto", "cpu"):
    # _C_cuda, the CUDA library, takes its place in ext_modules below: its sources (csrc/cuda) run
    # on the CPU in tests/test_cuda_on_cpu.py, and are built once a GPU has run them.
    sys.exit(f"MIXPREC_BUILD must be auto or cpu (CUDA kernels are not built yet), got {BUILD!r}")


def default_jobs() -> int:
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(os.cpu_count() or 1, int(memory_gb // 4)))


def cpu_extension() -> Extension:
    """mixprec._C: the pybind11 module and the CPU ops, on libtorch's stable ABI (torch >= 2.11)."""
    flags = [
        "-std=c++20",
        "-O3",
        "-g0",
        "-fvisibility=hidden",
        "-ffp-contract=off",  # every rounding is where the source says
        "-fno-trapping-math",
        "-fno-math-errno",
        f'-DMIXPREC_BUILT_WITH_TORCH="{torch.__version__}"',
        "-DTORCH_TARGET_VERSION=0x020a000000000000",
        *[word for path in [*PYBIND11_INCLUDE, *include_paths()] for word in ("-isystem", path)],
    ]
    if os.environ.get("MIXPREC_WERROR") == "1":
        flags += ["-Wall", "-Wextra", "-Werror"]
    csrc = Path("csrc")
    return Extension(
        "mixprec._C",
        sources=[str(p) for p in sorted([*csrc.glob("*.cpp"), *(csrc / "cpu").glob("*.cpp")])],
        depends=[str(p) for p in sorted(csrc.rglob("*.h"))],
        include_dirs=[str(csrc.resolve())],
        library_dirs=library_paths(),
        libraries=["c10", "torch", "torch_cpu"],
        extra_compile_args={"cxx": flags},
        language="c++",
    )


os.environ.setdefault("MAX_JOBS", str(default_jobs()))
packages = {
    "mixprec": "mixprec",
    "mixprec.ops": "mixprec/ops",
    "mixprec.optim": "mixprec/optim",
    "mixprec.bench": "bench",
    "mixprec.triton_kernels": "triton_kernels",
}
setup(
    license="Apache-2.0",
    packages=list(packages),
    package_dir=packages,
    package_data={"mixprec": ["py.typed"]},
    ext_modules=[cpu_extension()],
    cmdclass={"build_ext": BuildExtension},
)
