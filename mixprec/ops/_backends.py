"""Which variant of an op runs, and why the others do not."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import _library, _self_test

logger = logging.getLogger("mixprec")

BACKENDS = ("cpp", "cuda", "triton", "reference")
# The order of preference per device type. The reference is no silent stand-in for a missing
# build on the CPU: there the load error is raised. On a GPU every kernel has to agree with its
# reference before it is used for the first time.
_ORDER = {"cpu": ("cpp",), "cuda": ("cuda", "triton", "reference")}
_ANYWHERE = ("reference",)

_forced: str | None = None
_chosen: dict[tuple[str, str], Callable[..., Any]] = {}
_compared: set[tuple[str, str]] = set()  # GPU kernels that agreed with their reference


def why_not(name: str, backend: str, device_type: str) -> str | None:
    """The reason that `backend` cannot run op `name` on `device_type`, or None if it can."""
    if backend not in BACKENDS:
        return f"unknown backend, expected one of {', '.join(BACKENDS)}"
    if backend == "cpp":
        if device_type != "cpu":
            return f"the C++ kernels run on cpu tensors, not {device_type}"
        return _library.LOAD_ERROR
    if backend == "cuda":
        if device_type != "cuda":
            return f"the CUDA kernels run on cuda tensors, not {device_type}"
        if _library.CUDA_ERROR is not None:
            return _library.CUDA_ERROR
        return None if _library.has_cuda_kernel(name) else "it has no CUDA kernel"
    if backend == "triton":
        if device_type != "cuda":
            return f"the Triton kernels run on cuda tensors, not {device_type}"
        if name not in _library.TRITON:
            return "it has no Triton kernel"
        return _library.TRITON_ERROR
    return None


def order(device_type: str) -> tuple[str, ...]:
    """The backends that are tried for tensors on `device_type`, best first."""
    return (_forced,) if _forced else _ORDER.get(device_type, _ANYWHERE)


def chosen_backend(name: str, device_type: str) -> str:
    """The first backend in order without an objection; RuntimeError listing them if none."""
    reasons = []
    for backend in order(device_type):
        reason = why_not(name, backend, device_type)
        if reason is None:
            return backend
        reasons.append(f"{backend}: {reason}")
    raise RuntimeError(f"{name}: no backend can run on {device_type}. " + "; ".join(reasons))


def choose(name: str, device_type: str) -> Callable[..., Any]:
    """The torch op that runs op `name` on tensors of `device_type`."""
    op = _chosen.get((name, device_type))
    if op is None:
        backend = chosen_backend(name, device_type)
        compiled = backend in ("cpp", "cuda")
        op = _library.op_handle(name if compiled else _library.variant_name(name, backend))
        if backend in ("cuda", "triton") and (name, backend) not in _compared:
            if not _can_compare():
                return op  # not remembered: the comparison is still to come
            _compare(name, backend, op, device_type)
            _compared.add((name, backend))
        _chosen[name, device_type] = op
        if backend == "reference" and not _forced and not torch.compiler.is_compiling():
            logger.warning(
                "%s runs as its plain torch reference on %s: no kernel for it is installed",
                name,
                device_type,
            )
    return op


def _can_compare() -> bool:
    """Whether values can be computed and looked at now: there is a GPU, and nobody is tracing."""
    return (
        torch.cuda.is_available()
        and not torch.compiler.is_compiling()
        and not torch.cuda.is_current_stream_capturing()
        and type(torch.empty(0)) is torch.Tensor  # not a fake one
    )


def _compare(name: str, backend: str, op: Callable[..., Any], device_type: str) -> None:
    """RuntimeError unless the op gives on small inputs exactly what its reference gives."""
    result = _self_test.compare(name, op, device_type)
    if not result["ok"]:
        reason = result["reason"] or f"worst difference {result['worst']:.3g}"
        raise RuntimeError(
            f"{name}: the {backend} kernel does not agree with its reference on this GPU "
            f"({reason}); please report it. mixprec.use_backend('reference') does without it"
        )


def call(name: str, device_type: str, *args: Any) -> Any:
    """Run op `name` on its chosen variant.

    A compiled kernel checks its arguments before it touches memory, faster than Python could;
    when it refuses them, the op's own check is run to say which argument was wrong.
    """
    run = choose(name, device_type)
    try:
        return run(*args)
    except RuntimeError:
        _library.OPS[name](*args)
        raise


@contextlib.contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Run every mixprec op inside the block on `backend` ("cpp", "cuda", "triton" or
    "reference").

    An op that this backend cannot run raises RuntimeError with the reason. ValueError for an
    unknown backend. The setting is global to the process and restored when the block ends.
    """
    global _forced
    if backend not in BACKENDS:
        raise ValueError(f"use_backend: backend must be one of {BACKENDS}, got {backend!r}")
    before, saved = _forced, dict(_chosen)
    _forced = backend
    _chosen.clear()
    try:
        yield
    finally:
        _forced = before
        _chosen.clear()
        _chosen.update(saved)
