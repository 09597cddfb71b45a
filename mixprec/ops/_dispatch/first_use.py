"""The first use of a kernel on a GPU: it is compared with its reference, or left out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from . import backends, self_check

if TYPE_CHECKING:
    from .op import Op

logger = logging.getLogger("mixprec")


def _kind(args: Sequence[Any]) -> tuple[Any, ...]:
    """What of a call decides which kernel Triton compiles: dtypes, options and what is absent."""

    def part(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.dtype
        if isinstance(x, (list, tuple)):
            return frozenset(map(part, x))
        return type(x) if type(x) in (int, float) else x

    return tuple(map(part, args))


def ready(
    op: Op, backend: str, index: int, args: tuple[Any, ...] | None
) -> Callable[..., Any] | None:
    """The torch op of a variant, compared once on GPU `index`; None if it is left out.

    A Triton kernel is compiled for each kind of call, so the examples most like the call's `args`
    are compared; None: all of them.

    A kernel that differs is reported once, as an error in the log, and the next variant takes its
    place; with MIXPREC_STRICT=1 it is a RuntimeError.
    """
    by_kind = backend == "triton" and not torch.compiler.is_compiling()
    kind = _kind(args) if by_kind and args is not None else None
    if (agreed := op.agreed.get((backend, index, kind))) is not None:
        return agreed
    run = op.handle(backend)
    if not backends.can_compare():
        if backends.is_capturing():
            raise RuntimeError(
                f"{op.name}: a graph is being captured and the {backend} kernel has not run yet; "
                "run a step before the capture, as torch.cuda.graph asks, so that the kernel is "
                "loaded and compared with its reference"
            )
        return run
    difference = _difference(op, backend, run, index, kind)
    if difference is None:
        op.agreed[backend, index, kind] = run
        return run
    reason = f"the {backend} kernel does not agree with its reference on this GPU ({difference})"
    if os.environ.get("MIXPREC_STRICT") == "1":
        raise RuntimeError(f"{op.name}: {reason}; please report it")
    op.leave_out(backend, index, reason)
    logger.error(
        "%s: %s. It is left out and the next variant runs; please report it. (MIXPREC_STRICT=1 "
        "makes this an error.)",
        op.name,
        reason,
    )
    return None


def _difference(
    op: Op, backend: str, run: Callable[..., Any], index: int, kind: tuple[Any, ...] | None
) -> str | None:
    """None if `run` gives on the examples exactly what the reference gives; else how not."""

    def likeness(args: Sequence[Any]) -> int:
        return sum(a == b for a, b in zip(_kind(args), kind or (), strict=False))

    def refused(args: tuple[Any, ...]) -> bool:
        return likeness(args) < most or op.refusal(backend, op.Args(*args), index) is not None

    with _disable_current_modes():  # counters of FLOPs, policies of checkpointing, ...
        most = 0 if kind is None else max(map(likeness, op.examples("cpu")))
        result = self_check.compare(op, run, f"cuda:{index}", refused)
    if result["ok"]:
        return None
    return result["reason"] or f"worst difference {result['worst']:.3g}"
