"""AveragedModel: a moving average of weights that 16 bits would round away."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim import swa_utils

from .._local_gradients import LOW_PRECISION
from ._fp32 import master_of


class AveragedModel(swa_utils.AveragedModel):
    """torch.optim.swa_utils.AveragedModel, in FP32 and from the masters of `optimizer`.

    average <- average + (master - average) / (n + 1), or what `avg_fn` or `multi_avg_fn` computes,
    such as swa_utils.get_ema_multi_avg_fn(0.999). In 16 bits most of these updates would be less
    than half a unit in the last place, and lost: an EMA of bf16 weights stands still.

    model: copied; its 16-bit params and buffers are FP32 in the copy, `module`. optimizer: of
    mixprec.optim, or several; a param that has no master in them counts with its own value. The
    other arguments are torch's. `update_parameters(model)` is called after optimizer.step(). To
    evaluate the average in the model's own dtypes, load `module.state_dict()` into a copy of the
    model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        device: int | torch.device | None = None,
        avg_fn: Callable[..., torch.Tensor] | None = None,
        multi_avg_fn: Callable[..., None] | None = None,
        use_buffers: bool = False,
    ) -> None:
        super().__init__(model, device, avg_fn, multi_avg_fn, use_buffers)
        single = isinstance(optimizer, torch.optim.Optimizer)
        self._optimizers = [optimizer] if single else list(optimizer)  # type: ignore[arg-type]
        self.module._apply(_wide)

    def update_parameters(self, model: torch.nn.Module) -> None:
        """Take the current weights into the average."""
        super().update_parameters(_Wide(model, self._optimizers))  # type: ignore[arg-type]


class _Wide:
    """The params and buffers of a model in FP32."""

    def __init__(self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self._model = model
        self._states = {id(p): state for o in optimizers for p, state in o.state.items()}

    def parameters(self) -> Iterator[torch.Tensor]:
        for p in self._model.parameters():
            state: dict[str, Any] = self._states.get(id(p), {})
            yield master_of(p.detach(), state) if p.dtype in LOW_PRECISION else p.detach()

    def buffers(self) -> Iterator[torch.Tensor]:
        return map(_wide, self._model.buffers())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in LOW_PRECISION else tensor
