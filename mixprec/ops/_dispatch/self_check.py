"""Whether a kernel agrees with its reference: compared bit for bit on examples, before its first
use on a GPU."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch

from . import backends, example_inputs, example_products

logger = logging.getLogger("mixprec")


def _no_examples(device: str) -> Iterator[list[Any]]:
    raise RuntimeError(
        "it has no example inputs to be compared on: give examples= to Op, or write a function of "
        "its name in example_inputs"
    )
    yield []  # a generator: the error is one of the comparison


def examples(op: str) -> Callable[[str], Iterator[list[Any]]]:
    """The small inputs, on a device, of the op of that name."""
    name = op.removesuffix("_")
    default = getattr(example_products, name, _no_examples)
    return getattr(example_inputs, name, default)


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
    run: Callable[..., Any], reference: Callable[..., Any], examples: Iterable[tuple[Any, Any]]
) -> str | None:
    """How results and mutated arguments of `run` differ from those of `reference`, or the error;
    None if they do not. examples: the arguments twice, because they may be changed."""
    try:
        for arguments, same in examples:
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


def is_possible(op: str, what: str, purpose: str) -> bool:
    """Whether values can be computed and read now; RuntimeError while a CUDA graph is captured."""
    if not backends.can_compare() and backends.is_capturing():
        raise RuntimeError(
            f"{op}: a graph is being captured and {what} has not run yet; run a step before the "
            f"capture, as torch.cuda.graph asks, so that {purpose}"
        )
    return backends.can_compare()


def report(op: str, reason: str, instead: str) -> None:
    """Log why a kernel is not used, and what happens instead; an error with MIXPREC_STRICT=1."""
    if os.environ.get("MIXPREC_STRICT") == "1":
        raise RuntimeError(f"{op}: {reason}; please report it")
    message = "%s: %s. %s; please report it. (MIXPREC_STRICT=1 makes this an error.)"
    logger.error(message, op, reason, instead)


# Numbers that choose random bits: no kernel is compiled for one of them.
_RANDOM = ("seed", "counter", "indices")

# Of a call, three tuples with an entry for each argument: see kind.
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


def kind(names: Sequence[str], args: Sequence[Any]) -> Kind:
    """What of a call decides which binary Triton makes: which kernel it is (dtypes, options,
    layouts, what is absent), then what that is specialised for: columns (and sizes of flat arrays)
    that are 1 or multiples of 16, then rows that are, and tensors that begin at multiples of 16
    bytes. A launcher takes the tensors of a list one by one: a list is a set of them.

    Each kind costs its user a comparison, and the time to compile what is compared, so nothing else
    counts: a model whose sizes are multiples of 16 has one kind for each combination of dtypes and
    options. Left out are the tile of a GEMM, which is another one for small examples, and integers
    of 64 bits.
    """
    parts = [_of_argument(name, x) for name, x in zip_longest(names, args)]
    return tuple(tuple(part[i] for part in parts) for i in range(3))


def _matches(call: tuple[Any, ...], example: tuple[Any, ...]) -> int:
    """How many arguments of the example are like those of the call; an equal one counts twice, a
    list that has everything that the call's has once."""

    def match(a: Any, b: Any) -> int:
        both_lists = isinstance(a, frozenset) and isinstance(b, frozenset)
        return 2 if a == b else int(both_lists and a <= b)

    return sum(map(match, call, example))


def most_like(call: Kind, examples: Iterable[Kind]) -> set[Kind]:
    """Of the kinds of an op's examples, those that a call is compared on: of the kernel that is
    most like its own, the ones with columns most like it and the ones with rows most like it. These
    are the same but for, say, an odd number of rows of 4096 elements, which no example has."""

    def best(kinds: set[Kind], part: int) -> set[Kind]:
        scores = {k: _matches(call[part], k[part]) for k in kinds}
        return {k for k, score in scores.items() if score == max(scores.values())}

    kernels = best(set(examples), 0)
    return best(kernels, 1) | best(kernels, 2)
