"""The torch library "mixprec", and the compiled libraries that hold its kernels."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

LIBRARY = torch.library.Library("mixprec", "DEF")

Capability = tuple[int, int]  # of a GPU: (9, 0)

INSTALL = "pip install -e ."

# Imported when a Triton kernel is first launched: `import mixprec` needs no Triton.
TRITON_PACKAGE = __name__.removesuffix(".ops._dispatch.library") + ".triton_kernels"


def _load() -> tuple[ModuleType | None, str | None]:
    """Import mixprec._C; on failure keep the error, which is raised when an op first needs it."""
    try:
        return importlib.import_module("mixprec._C"), None
    except ModuleNotFoundError:
        here = Path(__file__).resolve().parents[2]
        hint = (
            f"mixprec is imported from its source folder {here}, which holds no build; there, "
            if (here.parent / "setup.py").exists()
            else "this installation holds no compiled ops; in the source folder "
        )
        return None, f"mixprec._C is not built: {hint}run: {INSTALL}"
    except ImportError as error:
        return None, (
            f"mixprec._C was built but does not load ({error}); it needs torch >= 2.11 and the "
            f"Python it was built for. To rebuild it, in the source folder run: {INSTALL}"
        )


C, LOAD_ERROR = _load()


def _load_cuda() -> str | None:
    """Load and register the CUDA kernels; return None, or the reason if they cannot be loaded."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if C is None:
        return LOAD_ERROR
    files = sorted(Path(__file__).resolve().parents[2].glob("_C_cuda*.so"))
    if not files:
        reason = C.build_info()["no_cuda"] or "mixprec/_C_cuda.so is gone"
        return f"they were not built: {reason}; to build them, in the source folder run: {INSTALL}"
    # Built only if 9.0a, or 10.0 or 12.0, was among the target architectures.
    files += sorted(
        p for kind in ("sm90", "family") for p in files[0].parent.glob(f"_C_{kind}*.so")
    )
    for file in files:
        try:
            torch.ops.load_library(file)
        except OSError as error:
            return f"{file.name} was built but does not load ({error}); to rebuild it: {INSTALL}"
    return None


CUDA_ERROR = _load_cuda()
# The architectures of the CUDA kernels, as in TORCH_CUDA_ARCH_LIST; "" without kernels.
CUDA_ARCHS = C.build_info().get("cuda_archs", "") if C is not None else ""


def has_cpu_kernel(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"mixprec::{name}", "CPU")


def has_cuda_kernel(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"mixprec::{name}", "CUDA")


def _triton_error() -> str | None:
    """Why the Triton kernels cannot be imported, without importing them; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    if importlib.util.find_spec(TRITON_PACKAGE) is None:
        return f"{TRITON_PACKAGE} is not installed; in the source folder run: {INSTALL}"
    return None


TRITON_ERROR = _triton_error()


def capability(index: int) -> Capability | None:
    """The compute capability of GPU `index`; None where torch sees no GPU."""
    known = _capabilities.get(index)
    if known is None and torch.cuda.is_available():
        known = _capabilities[index] = torch.cuda.get_device_capability(index)
    return known


@cache
def driver() -> int:
    """The CUDA version of the GPU's driver: 12040 for 12.4; 0 without one."""
    version = ctypes.c_int(0)
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


_capabilities: dict[int, Capability] = {}
# Constant for the process: torch.compile need not trace into the driver query.
capability._dynamo_marked_constant = True  # type: ignore[attr-defined]


def define(name: str, schema: str, run: Callable[..., Any] | None, fake: Callable[..., Any]) -> Any:
    """An op that is no `Op`, because it has no backends to choose from. run: None if the compiled
    library has its CPU kernel."""
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"mixprec::{name}", fake, lib=LIBRARY)
    if run is not None:
        LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    return getattr(torch.ops.mixprec, name).default


# For compiled code: a copy to save for backward. A clone would be computed there anew, from what
# the program may have written in between.
saved_copy = define("saved_copy", "(Tensor x) -> Tensor", torch.clone, torch.empty_like)
