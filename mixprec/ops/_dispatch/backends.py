"""Which variant of an op runs, and why the others do not."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import arch, library, self_check

logger = logging.getLogger("mixprec")

BACKENDS = ("cpp", "cuda", "triton", "vendor", "reference")
# The order of preference per device type; an op with a `Choice` has its own on a GPU. The
# reference is no silent stand-in for a missing build on the CPU: there the load error is raised.
# On a GPU every kernel has to agree with its reference before it is used for the first time.
_ORDER = {"cpu": ("cpp",), "cuda": ("cuda", "triton", "reference")}
_ANYWHERE = ("reference",)

Args = tuple[Any, ...]

_forced: str | None = None
_chosen: dict[tuple[str, str, int], Callable[..., Any]] = {}  # for every call of an op on a device
# For an op with a Choice, on a GPU: the backends that can do some of its calls.
_able: dict[tuple[str, int], tuple[str, ...]] = {}
_ready: dict[tuple[str, str, int], Callable[..., Any]] = {}  # GPU kernels that agreed on that GPU


def why_not(
    name: str, backend: str, device_type: str, index: int = 0, args: Args | None = None
) -> str | None:
    """The reason that `backend` cannot run op `name` on GPU `index`, or on `device_type`; None if
    it can. With `args`, a call's arguments, the reason may also be that it cannot do this call."""
    reason = _why_not(name, backend, device_type, index)
    if reason is None and args is not None and device_type == "cuda" and name in library.CHOICES:
        refuses = library.CHOICES[name].why_not.get(backend)
        reason = refuses(args, library.capability(index)) if refuses is not None else None
    return reason


def _why_not(name: str, backend: str, device_type: str, index: int) -> str | None:
    if backend not in BACKENDS:
        return f"unknown backend, expected one of {', '.join(BACKENDS)}"
    if backend == "reference":
        return None
    if backend == "cpp":
        if device_type != "cpu":
            return f"the C++ kernels run on cpu tensors, not {device_type}"
        return library.LOAD_ERROR
    if device_type != "cuda":
        kind = {"cuda": "CUDA", "triton": "Triton", "vendor": "vendor's"}[backend]
        return f"the {kind} kernels run on cuda tensors, not {device_type}"
    if backend == "triton":
        return library.TRITON_ERROR if name in library.TRITON else "it has no Triton kernel"
    if backend == "vendor":
        return None if library.has_vendor_kernel(name) else "torch has no kernel for the same job"
    if library.CUDA_ERROR is not None:
        return library.CUDA_ERROR
    if not library.has_cuda_kernel(name):
        return "it has no CUDA kernel"
    capability = library.capability(index)
    return None if capability is None else arch.why_not(library.CUDA_ARCHS, capability)


def order(
    device_type: str, name: str | None = None, index: int = 0, args: Args | None = None
) -> tuple[str, ...]:
    """The backends that are tried for tensors on `device_type`, best first.

    An op that is chosen call by call has an order of its own on a GPU, which depends on `args`.
    """
    if _forced:
        return (_forced,)
    if device_type == "cuda" and name in library.CHOICES:
        return library.CHOICES[name].order(args, library.capability(index))
    return _ORDER.get(device_type, _ANYWHERE)


def chosen_backend(name: str, device_type: str, index: int = 0, args: Args | None = None) -> str:
    """The first backend in order without an objection; RuntimeError listing them if none."""
    tried = order(device_type, name, index, args)
    for backend in tried:
        if why_not(name, backend, device_type, index, args) is None:
            return backend
    reasons = (f"{b}: {why_not(name, b, device_type, index, args)}" for b in tried)
    raise RuntimeError(f"{name}: no backend can run on {device_type}. " + "; ".join(reasons))


def choose(name: str, device_type: str, args: Args | None = None) -> Callable[..., Any]:
    """The torch op that runs op `name` on tensors of `device_type`, for a call with `args`."""
    index = library.device_index(args) if args and device_type == "cuda" else 0
    if device_type == "cuda" and args is not None and name in library.CHOICES:
        backend = _backend_of_call(name, index, args)
        run = _ready_op(name, backend, device_type, index)
        # Torch's own ops need no op of ours around them (8 us), unless they are to be traced.
        direct = backend == "vendor" and not torch.compiler.is_compiling()
        return library.DIRECT[name] if direct else run
    op = _chosen.get((name, device_type, index))
    if op is None:
        backend = chosen_backend(name, device_type, index)
        op = _ready_op(name, backend, device_type, index)
        if backend in ("cuda", "triton") and (name, backend, index) not in _ready:
            return op  # not remembered: the comparison is still to come
        _chosen[name, device_type, index] = op
    return op


def _backend_of_call(name: str, index: int, args: Args) -> str:
    """`chosen_backend` on a GPU, with the reasons that do not depend on the call kept."""
    able = _able_backends(name, index)
    refuses = library.CHOICES[name].why_not
    capability = library.capability(index)
    for backend in order("cuda", name, index, args):
        if backend in able:
            refused = refuses.get(backend)
            if refused is None or refused(args, capability) is None:
                return backend
    return chosen_backend(name, "cuda", index, args)  # raises, with the reasons


def _able_backends(name: str, index: int) -> tuple[str, ...]:
    """The backends that can run op `name` on GPU `index` for some arguments at least."""
    able = _able.get((name, index))
    if able is None:
        able = tuple(b for b in BACKENDS if _why_not(name, b, "cuda", index) is None)
        _able[name, index] = able
    return able


# The same for the life of the process: torch.compile takes it as it is, without a guard.
_able_backends._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _ready_op(name: str, backend: str, device_type: str, index: int) -> Callable[..., Any]:
    """The torch op of a variant; on a GPU compared with its reference before its first use."""
    known = _ready.get((name, backend, index)) if device_type == "cuda" else None
    if known is not None:
        return known
    compiled = backend in ("cpp", "cuda")
    op = library.op_handle(name if compiled else library.variant_name(name, backend))
    if device_type == "cuda" and backend != "reference":
        if not _can_compare():
            return op
        _compare(name, backend, op, f"{device_type}:{index}")
        _ready[name, backend, index] = op
    elif backend == "reference" and not _forced and not torch.compiler.is_compiling():
        _log_reference(name, device_type)
    return op


_logged: set[tuple[str, str]] = set()


def _log_reference(name: str, device_type: str) -> None:
    if (name, device_type) not in _logged:
        _logged.add((name, device_type))
        logger.warning(
            "%s runs as its plain torch reference on %s: no other variant can do it",
            name,
            device_type,
        )


def _can_compare() -> bool:
    """Whether values can be computed and looked at now: there is a GPU, and nobody is tracing."""
    return (
        torch.cuda.is_available()
        and not torch.compiler.is_compiling()
        and not torch.cuda.is_current_stream_capturing()
        and type(torch.empty(0)) is torch.Tensor  # not a fake one
    )


def _compare(name: str, backend: str, op: Callable[..., Any], device: str) -> None:
    """RuntimeError unless the op gives on small inputs exactly what its reference gives."""
    choice = library.CHOICES.get(name)
    refuses = choice.why_not.get(backend) if choice is not None else None
    capability = library.capability(int(device.split(":")[1]))
    skip = None if refuses is None else (lambda args: refuses(tuple(args), capability) is not None)
    result = self_check.compare(name, op, device, skip)
    if not result["ok"]:
        reason = result["reason"] or f"worst difference {result['worst']:.3g}"
        raise RuntimeError(
            f"{name}: the {backend} kernel does not agree with its reference on this GPU "
            f"({reason}); please report it. mixprec.use_backend('reference') does without it"
        )


def call(name: str, device_type: str, *args: Any) -> Any:
    """Run op `name` on its chosen variant, with the operands as they are, also where torch.autocast
    is on: the caller has cast them, as its recipe or the autocast dtype asks for."""
    joins = name in library.OPERANDS and device_type in library.AUTOCAST
    if joins and torch.is_autocast_enabled(device_type):
        with torch.autocast(device_type, enabled=False):
            return run(name, device_type, args)
    return run(name, device_type, args)


def run(name: str, device_type: str, args: Args) -> Any:
    """`call` for an op that torch.autocast leaves alone, or where it is off.

    A compiled kernel checks its arguments before it touches memory, faster than Python could;
    when it, or the choice of a variant, cannot use them, the op's own check is run to say which
    argument was wrong.
    """
    try:
        return choose(name, device_type, args)(*args)
    except Exception:
        library.OPS[name](*args)
        raise


@contextlib.contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Run every mixprec op inside the block on `backend`: "cpp", "cuda", "triton", "vendor" (what
    torch has for the same job) or "reference".

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
