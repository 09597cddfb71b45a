"""Weights in FP32 from the masters: averages of them, and the state dict of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim import swa_utils

from .. import _masters
from .._local_gradients import LOW_PRECISION, set_data


class AveragedModel(swa_utils.AveragedModel):
    """torch.optim.swa_utils.AveragedModel, in FP32 and from the masters of the params.

    average <- average + (master - average) / (n + 1), or what `avg_fn` or `multi_avg_fn` computes,
    such as swa_utils.get_ema_multi_avg_fn(0.999). In 16 bits most of these updates would be less
    than half a unit in the last place, and lost: an EMA of bf16 weights stands still.

    model: copied; its 16-bit params and buffers are FP32 in the copy, `module`. A param that has no
    master counts with its own value. optimizer: no longer needed, because masters belong to the
    params, and not kept. The other arguments are torch's. `update_parameters(model)` is called
    after optimizer.step(). To evaluate the average in the model's own dtypes, load
    `module.state_dict()` into a copy of the model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        device: int | torch.device | None = None,
        avg_fn: Callable[..., torch.Tensor] | None = None,
        multi_avg_fn: Callable[..., None] | None = None,
        use_buffers: bool = False,
    ) -> None:
        super().__init__(model, device, avg_fn, multi_avg_fn, use_buffers)
        _masters.attach()
        for p in self.module.parameters():
            if p.dtype in LOW_PRECISION or _masters.known(p):
                set_data(p, _masters.values_of(p))
                _masters.forget(p)
        self.module._apply(_wide)  # its buffers

    def update_parameters(self, model: torch.nn.Module) -> None:
        """Take the current weights into the average."""
        _masters.attach()
        super().update_parameters(_Wide(model))  # type: ignore[arg-type]


class _Wide:
    """The params and buffers of a model in FP32."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def parameters(self) -> Iterator[torch.Tensor]:
        for p in self._model.parameters():
            low = p.dtype in LOW_PRECISION or _masters.has_values(p)
            yield _masters.values_of(p) if low else p.detach()

    def buffers(self) -> Iterator[torch.Tensor]:
        return map(_wide, self._model.buffers())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in LOW_PRECISION else tensor


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
    _masters.attach()
    result = model.state_dict(keep_vars=True)
    copies: dict[int, torch.Tensor] = {}
    for name, value in result.items():
        if not isinstance(value, torch.Tensor):
            continue
        if id(value) in copies:
            result[name] = copies[id(value)]
            continue
        tensor = value.detach()
        if value.dtype in LOW_PRECISION or _masters.known(value):
            if not _masters.is_followed(value):
                raise ValueError(
                    f"fp32_state_dict: {name} was written after the last step and is no longer its "
                    "master rounded; do a step first, or save model.state_dict()"
                )
            tensor = _masters.values_of(value)
        result[name] = copies[id(value)] = tensor.clone()
    return result
