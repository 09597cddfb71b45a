"""Whether a kernel agrees with its reference: compared bit for bit on the op's examples, before its
first use on a GPU."""

from __future__ import annotations

import logging
import math
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
    differences = (x - y).abs()[~same]
    worst = torch.where(differences.isnan(), torch.inf, differences).max()
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


# Numbers that choose random bits: no kernel is compiled for one of them.
_RANDOM = ("seed", "counter", "indices")

# Of a call, three tuples with an entry for each argument: see _kind.
Kind = tuple[tuple[Any, ...], ...]


def _size(n: int) -> int:
    """n for 0 and 1, 16 for a multiple of it, 2 for all others."""
    return n if n < 2 else 16 if n % 16 == 0 else 2


def _aligned(x: torch.Tensor) -> bool:
    return x.storage_offset() * x.itemsize % 16 == 0


def _of_argument(name: str, x: Any) -> tuple[Any, Any, Any]:
    """What an argument contributes to the three parts of a kind."""
    if name in _RANDOM and isinstance(x, (int, list, tuple)):
        return None, None, None
    if isinstance(x, torch.Tensor):
        columns = x.shape[-1] if x.dim() else 1
        rows = x.numel() // columns if columns else 0
        turned = x.dim() > 1 and x.stride(-2) == 1
        return (x.dtype, turned), _size(columns), (_size(rows), _aligned(x))
    if name == "shape":
        return None, _size(math.prod(x)), None
    if isinstance(x, (list, tuple)):
        if x and isinstance(x[0], torch.Tensor):
            each = frozenset((t.dtype, _aligned(t), _size(t.numel())) for t in x)
            return frozenset(dtype for dtype, *_ in each), each, None
        return tuple(n if n in (0, 1) else type(n) for n in x), None, None  # 0 and 1: flags
    if type(x) is int and x >= 16:  # below, it may be an option, as the bits of pack are
        return int, _size(x), None
    return (float if type(x) is float else x), None, None


def _kind(names: Sequence[str], args: Sequence[Any]) -> Kind:
    """What of a call decides which binary Triton makes: which kernel it is (dtypes, options,
    layouts, what is absent), then what that is specialised for: columns (and sizes of flat arrays)
    that are 1 or multiples of 16, then rows that are, and tensors that begin at multiples of 16
    bytes. A launcher takes the tensors of a list one by one: a list is a set of them.

    Each kind costs its user a comparison, and the time to compile what is compared, so nothing else
    counts: a model whose sizes are multiples of 16 has one kind for each combination of dtypes and
    options. Left out are the tile of a GEMM, which is another one for small examples, and integers
    of 64 bits.
    """
    parts = [_of_argument(name, x) for name, x in zip(names, args, strict=True)]
    return tuple(tuple(part[i] for part in parts) for i in range(3))


def _matches(call: tuple[Any, ...], example: tuple[Any, ...]) -> int:
    """How many arguments of the example are like those of the call; an equal one counts twice, a
    list that has everything that the call's has once."""

    def match(a: Any, b: Any) -> int:
        both_lists = isinstance(a, frozenset) and isinstance(b, frozenset)
        return 2 if a == b else int(both_lists and a <= b)

    return sum(map(match, call, example))


def most_like(op: Op, kind: Kind) -> set[Kind]:
    """Of the op's examples, those that a call of this kind is compared on: of the kernel that is
    most like its own, the ones with columns most like it and the ones with rows most like it. These
    are the same but for, say, an odd number of rows of 4096 elements, which no example has."""

    def best(kinds: set[Kind], part: int) -> set[Kind]:
        scores = {k: _matches(kind[part], k[part]) for k in kinds}
        return {k for k, score in scores.items() if score == max(scores.values())}

    kernels = best({_kind(op.arguments, example) for example in op.examples("cpu")}, 0)
    return best(kernels, 1) | best(kernels, 2)


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
    kind = _kind(op.arguments, args) if by_kind and args is not None else None
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

    def refused(example: tuple[Any, ...]) -> bool:
        another = kinds is not None and _kind(op.arguments, example) not in kinds
        return another or op.refusal(backend, op.Args(*example), index) is not None

    with _disable_current_modes():  # counters of FLOPs, policies of checkpointing, ...
        kinds = None if kind is None else most_like(op, kind)
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
