"""The first use of a kernel on a GPU: it is compared with its reference, or left out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import _disable_current_modes

from . import backends, self_check

if TYPE_CHECKING:
    from .op import Op

logger = logging.getLogger("mixprec")


def ready(op: Op, backend: str, index: int) -> Callable[..., Any] | None:
    """The torch op of a variant, compared once on GPU `index`; None if it is left out.

    A kernel that differs is reported once, as an error in the log, and the next variant takes its
    place; with MIXPREC_STRICT=1 it is a RuntimeError.
    """
    if (agreed := op.agreed.get((backend, index))) is not None:
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
    difference = _difference(op, backend, run, index)
    if difference is None:
        op.agreed[backend, index] = run
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


def _difference(op: Op, backend: str, run: Callable[..., Any], index: int) -> str | None:
    """None if `run` gives on the examples exactly what the reference gives; else how not."""

    def refused(args: tuple[Any, ...]) -> bool:
        return op.refusal(backend, op.Args(*args), index) is not None

    with _disable_current_modes():  # counters of FLOPs, policies of checkpointing, ...
        result = self_check.compare(op, run, f"cuda:{index}", refused)
    if result["ok"]:
        return None
    return result["reason"] or f"worst difference {result['worst']:.3g}"
