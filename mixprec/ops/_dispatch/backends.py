"""The backends of an op, their order, and why one cannot be used."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

import torch

from ..._context import replaced
from . import library

_ARCH = re.compile(r"(\d+)\.(\d)([af]?)(\+PTX)?")


def _covers(arch: str, capability: tuple[int, int]) -> bool:
    found = _ARCH.fullmatch(arch)
    if found is None:
        return True  # a name such as Hopper, which torch resolves
    built, kind = (int(found[1]), int(found[2])), found[3]
    if kind == "a":  # instructions of this architecture only
        return capability == built
    same_family = capability[0] == built[0] and capability[1] >= built[1]
    return same_family or (found[4] is not None and kind == "" and capability >= built)


def why_not_built(archs: str, capability: tuple[int, int]) -> str | None:
    """None if code built for `archs` ("8.0;9.0a;12.0+PTX") runs on a GPU of `capability`.

    Code for X.Y runs on X.Z with Z >= Y; "a" only on X.Y itself; "+PTX" on X.Y and all later ones.
    None if `archs` is empty (not recorded).
    """
    names = re.split(r"[;\s]+", archs.strip())
    if names == [""] or any(_covers(name, capability) for name in names):
        return None
    gpu = ".".join(map(str, capability))
    return (
        f"the CUDA kernels were built for {', '.join(names)}, and this GPU is {gpu}; to build them "
        f"for it, set TORCH_CUDA_ARCH_LIST={gpu}"
    )


BACKENDS = ("cpp", "cuda", "triton", "vendor", "reference")
# The order of preference per device type; an op may have an order of its own on a GPU. On the CPU
# the reference runs ops that have no C++ kernel, but does not replace a missing build: there the
# load error is raised. On a GPU every kernel has to agree with its reference before it is used.
ORDER = {"cpu": ("cpp",), "cuda": ("cuda", "triton", "reference")}
ANYWHERE = ("reference",)
_OPTIONAL = ("cuda", "triton", "vendor")  # what MIXPREC_DISABLE can leave out


@contextlib.contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Run every mixprec op inside the block on `backend`: "cpp", "cuda", "triton", "vendor" (the
    equivalent in torch) or "reference".

    An op that this backend cannot run raises RuntimeError with the reason. ValueError for an
    unknown backend. The block holds for the thread that entered it; blocks nest, and leaving one,
    also by an exception, restores the one before. A backward pass runs on the backend of its
    forward pass, inside or outside of the block and on any thread; what torch.utils.checkpoint
    computes again, on that of the block in which backward is called.
    """
    if backend not in BACKENDS:
        raise ValueError(f"use_backend: backend must be one of {BACKENDS}, got {backend!r}")
    with replaced("backend", backend):
        yield


def why_not(backend: str, device: str) -> str | None:
    """Why `backend` cannot run any op on `device`; None if it can."""
    if backend not in BACKENDS:
        return f"unknown backend, expected one of {', '.join(BACKENDS)}"
    if backend == "reference":
        return None
    if backend == "cpp":
        if device != "cpu":
            return f"the C++ kernels run on cpu tensors, not {device}"
        return library.LOAD_ERROR
    if device != "cuda":
        kind = {"cuda": "CUDA", "triton": "Triton", "vendor": "vendor's"}[backend]
        return f"the {kind} kernels run on cuda tensors, not {device}"
    return {"triton": library.TRITON_ERROR, "cuda": library.CUDA_ERROR}.get(backend)


def disabled(backend: str, op: str) -> str | None:
    """The reason if the environment leaves `backend` out, for all ops or for `op`."""
    names = os.environ.get("MIXPREC_DISABLE", "").replace(" ", "").split(",")
    for name in filter(None, names):
        if name.split(":")[0] not in _OPTIONAL:
            raise ValueError(
                f"MIXPREC_DISABLE must list {', '.join(_OPTIONAL)}, each alone or as BACKEND:OP, "
                f"got {name!r}"
            )
    out = backend in names or f"{backend}:{op}" in names
    return "MIXPREC_DISABLE leaves it out" if out else None


def not_built_for(index: int) -> str | None:
    """Why the CUDA kernels do not support GPU `index`; None if they do."""
    capability = library.capability(index)
    if capability is None:
        return None
    if 0 < (driver := library.driver()) < 12010:
        return (
            "a launch takes up to 32 KB of arguments, which needs a driver for CUDA 12.1 (530) or "
            f"later, and this one is for CUDA {driver // 1000}.{driver % 1000 // 10}"
        )
    return why_not_built(library.CUDA_ARCHS, capability)


def can_compare() -> bool:
    """Whether values can be computed and read now: there is a GPU, and nothing is traced."""
    return (
        not torch.compiler.is_compiling()
        and torch.cuda.is_available()
        and not is_capturing()
        and type(torch.empty(0, device="cpu")) is torch.Tensor  # not a FakeTensor
    )


def is_fake() -> bool:
    """Whether tensors have no values: FakeTensorMode is on."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_capturing() -> bool:
    """Whether the launches of this thread go into a CUDA graph."""
    return (
        not torch.compiler.is_compiling()
        and torch.cuda.is_available()
        and torch.cuda.is_current_stream_capturing()
    )
