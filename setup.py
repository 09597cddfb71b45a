"""The build: what is compiled, for which processors, and the reason if something is not.

MIXPREC_BUILD=auto|cpu|cuda  what to build (auto: everything that this machine can build)
TORCH_CUDA_ARCH_LIST=9.0a    for which GPUs (default: the one at hand, else every generation)
MIXPREC_WERROR=1             C++ warnings are errors (lint and CI only)
MIXPREC_WHEEL=1              what runs with every torch from 2.11 on: no allocator, no CUDA kernels
MAX_JOBS=N                   parallel compilations (default: cores, at most one per 4 GB of RAM)
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.errors import CompileError

sys.path.insert(0, str(Path(__file__).resolve().parent / ".ci"))

import build_checks as checks
import build_progress as progress

checks.before_setup()

try:
    import pybind11

    PYBIND11 = [pybind11.get_include()]
except ImportError:  # torch carries a copy of the headers, usable here from 2.12 on
    PYBIND11 = []

import torch  # noqa: E402
from torch.utils.cpp_extension import (  # noqa: E402
    CUDA_HOME,
    BuildExtension,
    include_paths,
    library_paths,
)

BUILD = os.environ.get("MIXPREC_BUILD", "auto")
WHEEL = os.environ.get("MIXPREC_WHEEL") == "1"
HAS_ALLOCATOR = sys.platform == "linux" and not WHEEL  # of mremap
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # loads with later versions of torch too
# All supported generations; the last one also as PTX for later GPUs.
GPUS = "8.0;8.6;8.9;9.0a;10.0;12.0+PTX"
# Built with the instructions of a whole family of GPUs (10.x, 12.x) that have some for FP4, which
# TORCH_CUDA_ARCH_LIST cannot name; nvcc knows families from 12.9 on.
FAMILY_SOURCES = {"quantize_mx.cu"}
FAMILIES = {"10.0": "100f", "12.0": "120f"}


def nvcc_version() -> tuple[int, int] | None:
    """The release of the CUDA toolkit; None if it has no nvcc."""
    nvcc = Path(CUDA_HOME or "") / "bin" / "nvcc"
    if CUDA_HOME is None or not nvcc.exists():
        return None
    words = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", words)
    return None if found is None else (int(found[1]), int(found[2]))


def why_no_cuda() -> str:
    """The reason that the CUDA kernels are not built; empty if they are."""
    if WHEEL:
        return "wheels have none"
    if BUILD == "cpu":
        return "MIXPREC_BUILD=cpu"
    if torch.version.cuda is None:
        return "the torch that mixprec was built with has no CUDA"
    version = nvcc_version()
    if version is None:
        return f"no nvcc for CUDA {torch.version.cuda} in CUDA_HOME or PATH"
    if str(version[0]) != torch.version.cuda.split(".")[0]:
        return (
            f"torch is built for CUDA {torch.version.cuda}, but the nvcc in {CUDA_HOME} is of "
            "another major version"
        )
    return ""


NO_CUDA = why_no_cuda()
if NO_CUDA and BUILD == "cuda":
    sys.exit(f"MIXPREC_BUILD=cuda: {NO_CUDA}")


def default_jobs() -> int:
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(os.cpu_count() or 1, int(memory_gb // 4)))


def cuda_archs() -> str:
    """The GPUs to build for; torch reads the same from TORCH_CUDA_ARCH_LIST."""
    if "TORCH_CUDA_ARCH_LIST" not in os.environ:
        gpus = GPUS
        if torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability()
            gpus = f"{major}.{minor}" + ("a" if major == 9 else "")
        os.environ["TORCH_CUDA_ARCH_LIST"] = gpus
    return os.environ["TORCH_CUDA_ARCH_LIST"]


def warnings() -> list[str]:
    """For the C++ compiler."""
    return ["-Wall", "-Wextra", "-Werror"] if os.environ.get("MIXPREC_WERROR") == "1" else []


def isystem(paths: list[str]) -> list[str]:
    return [word for path in paths for word in ("-isystem", path)]


def cpu_extension() -> Extension:
    """mixprec._C: the pybind11 module and the CPU ops, on libtorch's stable ABI (torch >= 2.11)."""
    flags = [
        "-std=c++20",
        "-O3",
        "-g0",
        "-fvisibility=hidden",
        "-ffp-contract=off",  # no fused multiply-add: rounding is as written
        "-fno-trapping-math",
        "-fno-math-errno",
        "-Wno-psabi",  # a note about GCC before 4.6, for each function that passes vectors
        f'-DMIXPREC_BUILT_WITH_TORCH="{torch.__version__}"',
        f'-DMIXPREC_NO_CUDA="{NO_CUDA}"',
        f'-DMIXPREC_CUDA_ARCHS="{"" if NO_CUDA else cuda_archs()}"',
        STABLE_ABI,
        *isystem([*PYBIND11, *include_paths()]),
        *warnings(),
    ]
    csrc = Path("csrc")
    return Extension(
        "mixprec._C",
        # The loops first: each takes as long as several of the others, which then run beside them.
        sources=[str(p) for p in sorted((csrc / "cpu" / "simd").glob("*.cpp"))]
        + [str(p) for p in sorted([*csrc.glob("*.cpp"), *(csrc / "cpu").glob("*.cpp")])],
        depends=[str(p) for p in sorted(csrc.rglob("*.h"))],
        include_dirs=[str(csrc.resolve())],
        library_dirs=library_paths(),
        libraries=["c10", "torch", "torch_cpu"],
        extra_compile_args={"cxx": flags},
        language="c++",
    )


def allocator_extension() -> Extension:
    """mixprec._C_allocator, for this version of torch: c10::Allocator has no stable ABI."""
    csrc = Path("csrc")
    flags = ["-std=c++20", "-O2", "-g0", "-fvisibility=hidden"]
    return Extension(
        "mixprec._C_allocator",
        sources=[str(p) for p in sorted((csrc / "allocator").glob("*.cpp"))],
        depends=[str(p) for p in sorted((csrc / "allocator").glob("*.h"))],
        include_dirs=[str(csrc.resolve())],
        library_dirs=library_paths(),
        libraries=["c10"],
        extra_compile_args={"cxx": flags + isystem([*PYBIND11, *include_paths()]) + warnings()},
        language="c++",
        optional=True,  # all else runs without it
    )


def gpu_library(name: str, sources: list[Path], flags: list[str]) -> Extension:
    """A shared library of CUDA ops that does not link to Python."""
    nvcc = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-DUSE_CUDA", STABLE_ABI, *flags]
    if os.environ.get("MIXPREC_WERROR") == "1":
        # ptxas warns, among others, where it serialises wgmma or ignores setmaxnreg.
        nvcc += ["-Werror", "all-warnings"]
        nvcc += ["-Xptxas", "--warning-as-error,--warn-on-spills,--warn-on-local-memory-usage"]
    csrc = Path("csrc")
    return Extension(
        name,
        sources=[str(p) for p in sorted(sources)],
        depends=[str(p) for p in sorted([*csrc.rglob("*.h"), *csrc.rglob("*.cuh")])],
        include_dirs=[str(csrc.resolve()), *include_paths("cuda")],
        library_dirs=library_paths(),
        libraries=["c10", "torch", "torch_cpu"],
        extra_compile_args={"cxx": ["-std=c++20", STABLE_ABI], "nvcc": nvcc},
        # torch_cuda also loads the CUDA runtime, which some toolkits do not provide for linking. No
        # symbol refers to it, so without the flag the linker would drop it.
        extra_link_args=["-Wl,--no-as-needed", "-ltorch_cuda"],
        language="c++",
    )


def family_flags() -> list[str]:
    """For nvcc: the same GPUs as cuda_archs(), but by family where there is one. A GPU then takes
    the code of its family from the library. Empty if no family is built for."""
    flags = []
    for arch in re.split(r"[;\s]+", cuda_archs()):
        found = re.fullmatch(r"(\d+\.\d)(a?)(\+PTX)?", arch)
        if found is None:  # a name such as Hopper, which torch resolves
            return []
        number = found[1].replace(".", "") + found[2]
        code = FAMILIES.get(arch.removesuffix("+PTX"), number)
        flags += ["-gencode", f"arch=compute_{code},code=sm_{code}"]
        if found[3]:
            flags += ["-gencode", f"arch=compute_{number},code=compute_{number}"]
    named = any(code in flag for flag in flags for code in FAMILIES.values())
    return flags if named and (nvcc_version() or (0, 0)) >= (12, 9) else []


def cuda_extensions() -> list[Extension]:
    """mixprec/_C_cuda.so: the CUDA ops for all GPUs; mixprec/_C_sm90.so: those for Hopper only,
    from the *_sm90*.cu files; mixprec/_C_family.so: FAMILY_SOURCES, for all GPUs too."""
    hopper = set(Path("csrc/cuda").rglob("*_sm90*.cu"))
    family = [p for p in Path("csrc/cuda").rglob("*.cu") if p.name in FAMILY_SOURCES]
    if not family_flags():
        family = []
    portable = set(Path("csrc/cuda").rglob("*.cu")) - hopper - set(family)
    libraries = [gpu_library("mixprec._C_cuda", [*portable], ["-fmad=false"])]
    if family:
        flags = ["-fmad=false", *family_flags()]
        libraries.append(gpu_library("mixprec._C_family", family, flags))
    if re.search(r"\b9\.0a", cuda_archs()):
        # If the flags name an architecture, torch adds no others.
        only = ["-gencode", "arch=compute_90a,code=sm_90a"]
        libraries.append(gpu_library("mixprec._C_sm90", [*hopper], only))
    return libraries


class Build(BuildExtension):  # type: ignore[misc]
    """Says what it compiles, and keeps what it compiled for an editable installation."""

    def run(self) -> None:
        if self.inplace or self.editable_mode:
            self.build_temp = "build/inplace"  # pip -e would have it in a folder for one build
        super().run()

    def build_extension(self, ext: Extension) -> None:
        jobs = os.environ["MAX_JOBS"] if self.use_ninja else "without ninja 1"
        plan = f"building {ext.name} from {len(ext.sources)} files, {jobs} at a time"
        if NO_CUDA:
            plan += f"; no CUDA kernels: {NO_CUDA}"
        try:
            with progress.shown(plan, ext.name):
                super().build_extension(ext)
        except RuntimeError as error:  # of torch, if ninja fails; a traceback tells no more
            if ext.optional:
                raise CompileError(f"{error}; mixprec runs without {ext.name}") from error
            sys.exit(f"mixprec: {error}; the lines above say why")


os.environ.setdefault("MAX_JOBS", str(default_jobs()))
if shutil.which("c++") is None:  # the compiler that torch takes
    os.environ.setdefault("CXX", checks.compiler())
# bench and triton_kernels are installed under mixprec: other projects use these package names.
packages = {}
for top in ("mixprec", "bench", "triton_kernels"):
    for init in Path(top).rglob("__init__.py"):
        name = ".".join(init.parent.parts)
        packages[name if top == "mixprec" else f"mixprec.{name}"] = str(init.parent)
setup(
    license="Apache-2.0",
    packages=list(packages),
    package_dir=packages,
    package_data={
        "mixprec": ["py.typed"],
        "mixprec.diagnostics.audit": ["page.html"],
        "mixprec.ops._dispatch": ["gemm_table.json"],
    },
    ext_modules=[
        cpu_extension(),
        *([allocator_extension()] if HAS_ALLOCATOR else []),
        *([] if NO_CUDA else cuda_extensions()),
    ],
    cmdclass={"build_ext": Build},
    options={"global": {"quiet": "1"}},  # what is said is progress, not each file that is copied
)
