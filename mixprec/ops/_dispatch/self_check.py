"""Whether a kernel agrees with its reference: compared bit for bit on the op's examples, before its
first use on a GPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from . import backends

if TYPE_CHECKING:
    from .op import Op

logger = logging.getLogger("mixprec")


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values.detach()
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)


def _difference(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """None for equal values: any two NaN are, zeros of two signs are not."""
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return f"{got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
    x, y = (t.double() for t in (got, want))
    same = ((x == y) & (x.signbit() == y.signbit())) | (x.isnan() & y.isnan())
    if same.all():
        return None
    apart = (x - y).abs()[~same]
    worst = torch.where(apart.isnan(), torch.inf, apart).max()
    return f"{int((~same).sum())} of {same.numel()} values differ, by {worst:.3g} at most"


def difference(
    op: Op,
    run: Callable[..., Any],
    device: str,
    skip: Callable[[tuple[Any, ...]], bool] | None = None,
) -> str | None:
    """How results and mutated arguments of `run` on `device` differ from those of the reference, or
    the error; None if they do not. skip: whether `run` cannot take these arguments."""
    reference = op.handle("reference")
    try:
        for arguments, same in zip(op.examples(device), op.examples(device), strict=True):
            if skip is not None and skip(tuple(arguments)):
                continue
            got = [*_tensors(run(*arguments)), *_tensors(arguments)]
            want = [*_tensors(reference(*same)), *_tensors(same)]
            if len(got) != len(want):
                return f"{len(got)} tensors came out, not {len(want)}"
            found = (_difference(g, w) for g, w in zip(got, want, strict=True))
            if (first := next((text for text in found if text is not None), None)) is not None:
                return first
    except Exception as error:
        if "out of memory" in str(error):  # which says nothing about the kernel
            raise
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return None


def _kind(args: Sequence[Any]) -> tuple[Any, ...]:
    """What of a call decides which kernel Triton compiles: dtypes, whether tensors begin and end on
    16 bytes, options, and what is absent."""

    def part(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.dtype, (x.storage_offset() * x.itemsize | x.numel() * x.itemsize) % 16 == 0
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
    by_kind = backend == "triton" and args is not None and not torch.compiler.is_compiling()
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

    def likeness(example: Sequence[Any]) -> int:
        return sum(a == b for a, b in zip(_kind(example), kind or (), strict=False))

    def refused(example: tuple[Any, ...]) -> bool:
        return likeness(example) < most or op.refusal(backend, op.Args(*example), index) is not None

    with _disable_current_modes():  # counters of FLOPs, policies of checkpointing, ...
        most = 0 if kind is None else max(map(likeness, op.examples("cpu")))
        found = difference(op, run, f"cuda:{index}", refused)
    if found is None:
        op.agreed[backend, index, kind] = run
        return run
    reason = f"the {backend} kernel does not agree with its reference on this GPU ({found})"
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
