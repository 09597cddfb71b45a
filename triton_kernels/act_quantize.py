"""act_quantize and act_backward: the casting kernels compute the values that they cast."""

from __future__ import annotations

from typing import Any

import torch

from .quantize import cast_from
from .source import source_of


def act_quantize(
    x: torch.Tensor, up: torch.Tensor | None, kind: str, cast: Any
) -> tuple[torch.Tensor, ...]:
    return cast_from(source_of(x, up=up, act=kind), cast)


def act_backward(
    g: torch.Tensor, x: torch.Tensor, up: torch.Tensor | None, kind: str, cast: Any
) -> tuple[torch.Tensor, ...]:
    results = cast_from(source_of(x, g=g, up=up, act=kind), cast)
    if up is not None:
        return results
    nothing = [x.new_empty(shape, dtype=cast.dtype) for shape in ((0,), (0, 0))]
    return *results, *nothing, *(x.new_empty((0,), dtype=torch.float32) for _ in range(3))
