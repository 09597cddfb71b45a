"""A model's state dict in FP32, from the master weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .._local_gradients import LOW_PRECISION
from ..ops import export_master


def fp32_state_dict(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
) -> dict[str, Any]:
    """model.state_dict() with every 16-bit tensor in FP32: the master of a param if one of the
    optimizers has it, else the converted values. Tensors are copies, one of each tied param; other
    entries are unchanged.

    Loading it into this model restores exactly its params. To this end, a number kept as a
    remainder that is halfway between two BF16 neighbours is returned one FP32 unit further from 0.
    Raises ValueError where a param was written after the last step and is no longer its master
    rounded; a remainder fits every value.
    """
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    states = {id(p): state for o in optimizers for p, state in o.state.items()}
    result = model.state_dict(keep_vars=True)
    copies: dict[int, torch.Tensor] = {}
    for name, value in result.items():
        if not isinstance(value, torch.Tensor):
            continue
        if id(value) in copies:
            result[name] = copies[id(value)]
            continue
        tensor = value.detach()
        if value.dtype in LOW_PRECISION:
            state = states.get(id(value), {})
            if "master" in state and not _same(tensor, state["master"]).all():
                raise ValueError(
                    f"fp32_state_dict: {name} was written after the last step and is no longer its "
                    "master rounded; do a step first, or save model.state_dict()"
                )
            tensor = master_of(tensor, state)
        result[name] = copies[id(value)] = tensor.clone()
    return result


def master_of(param: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    """The FP32 values of a 16-bit param: its master, or where that no longer rounds to the param,
    or there is none, its own."""
    if "remainder" in state:
        return export_master(param, state["remainder"])
    if "master" not in state:
        return param.float()
    return torch.where(_same(param, state["master"]), state["master"], param.float())


def _same(param: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    rounded = master.to(param.dtype)
    return (rounded == param) | (rounded.isnan() & param.isnan())
