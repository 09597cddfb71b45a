"""A model's state dict in FP32, from the master weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .. import _masters
from .._local_gradients import LOW_PRECISION


def fp32_state_dict(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
) -> dict[str, Any]:
    """model.state_dict() with every 16-bit tensor in FP32: the FP32 values behind a param that
    `cast_parameters` or an optimizer keeps, else the converted values. Tensors are copies, one of
    each tied param; other entries are unchanged.

    Loading it into this model restores exactly its params. To this end, a number kept as a
    remainder that is halfway between two BF16 neighbours is returned one FP32 unit further from 0.
    Raises ValueError where a param was written after the last step and is no longer its master
    rounded; a remainder fits every value. optimizer: no longer needed, because masters belong to
    the params, and not read.
    """
    result = model.state_dict(keep_vars=True)
    copies: dict[int, torch.Tensor] = {}
    for name, value in result.items():
        if not isinstance(value, torch.Tensor):
            continue
        if id(value) in copies:
            result[name] = copies[id(value)]
            continue
        tensor = value.detach()
        if value.dtype in LOW_PRECISION or _masters.find(value):
            if not _masters.is_followed(value):
                raise ValueError(
                    f"fp32_state_dict: {name} was written after the last step and is no longer its "
                    "master rounded; do a step first, or save model.state_dict()"
                )
            tensor = _masters.values_of(value)
        result[name] = copies[id(value)] = tensor.clone()
    return result
