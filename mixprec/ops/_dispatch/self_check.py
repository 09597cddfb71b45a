"""compare: one variant of an op on the op's examples against its reference, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .op import Op


def _numbers(values: Any) -> Iterator[float]:
    """Every element of every tensor in nested sequences, as Python numbers."""
    if isinstance(values, torch.Tensor):
        yield from values.detach().double().flatten().tolist()
    elif isinstance(values, Sequence) and not isinstance(values, str):
        for value in values:
            yield from _numbers(value)


def _difference(x: float, y: float) -> float:
    """|x - y|; 0 for equal infinities, two NaN and equal zeros of one sign; inf where one is not
    finite and the other is something else, or zeros differ in sign."""
    if math.isnan(x) and math.isnan(y):
        return 0.0
    if x == y:
        return 0.0 if math.copysign(1, x) == math.copysign(1, y) else math.inf
    return abs(x - y) if math.isfinite(x) and math.isfinite(y) else math.inf


def compare(
    op: Op,
    run: Callable[..., Any],
    device: str,
    skip: Callable[[tuple[Any, ...]], bool] | None = None,
) -> dict[str, Any]:
    """Run `op` on `device` by `run` and compare results and mutated arguments with those of the
    reference. skip: whether `run` cannot take these arguments.

    Returns ok, worst (the largest absolute difference; ok means that it is 0) and reason (why it
    failed without a comparison, or None).
    """
    reference = op.handle("reference")
    worst = 0.0
    try:
        for arguments, same in zip(op.examples(device), op.examples(device), strict=True):
            if skip is not None and skip(tuple(arguments)):
                continue
            got = [*_numbers(run(*arguments)), *_numbers(arguments)]
            expected = [*_numbers(reference(*same)), *_numbers(same)]
            if len(got) != len(expected):
                reason = f"{len(got)} numbers came out, not {len(expected)}"
                return {"ok": False, "worst": math.inf, "reason": reason}
            worst = max([worst, *map(_difference, got, expected)])
    except Exception as error:  # always return a report
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        return {"ok": False, "worst": math.inf, "reason": reason}
    return {"ok": worst == 0.0, "worst": worst, "reason": None}
