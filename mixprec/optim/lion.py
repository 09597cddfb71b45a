"""Lion: unscale, clip, update and write-back in one pass, without a host sync."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import ParamsT

from ..ops import lion_
from . import _settings
from ._base import Optimizer

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["Lion"]


class Lion(Optimizer):
    """Lion: steps of the size lr in the direction of a sign, for fp32, bf16, fp16 and fp64 params.

    The formula is that of `mixprec.ops.lion_`. It keeps one moment, half of AdamW's state, and
    usually needs an lr three to ten times smaller than AdamW's and a weight_decay as much larger.
    lr, betas, weight_decay and maximize may differ between param groups. state[param]: `exp_avg`,
    `step`, and `master` or `remainder`. Options, skipping, scaling and errors as for `AdamW`.
    Source: Symbolic Discovery of Optimization Algorithms (Chen et al., 2023).
    """

    _moment_names = ("exp_avg",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        master_weights: str | None = "auto",
        state_dtype: torch.dtype | str = torch.float32,
        stochastic_rounding: bool = False,
        seed: int = 0,
        grad_dtype: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        maximize: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(
            params,
            defaults,
            master_weights=master_weights,
            state_dtype=state_dtype,
            stochastic_rounding=stochastic_rounding,
            seed=seed,
            grad_dtype=grad_dtype,
            max_grad_norm=max_grad_norm,
            max_grad_value=max_grad_value,
            process_group=process_group,
            ignored={},
        )

    def _check_settings(self, group: dict[str, Any], who: str) -> None:
        _settings.check_lr(who, group["lr"])
        _settings.check_number(who, "weight_decay", group["weight_decay"])
        _settings.check_betas(who, group["betas"])

    def _moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self._moment_names

    def _update(
        self,
        group: dict[str, Any],
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        state: Callable[[str], list[torch.Tensor]],
        masters: list[torch.Tensor],
        steps: torch.Tensor,
        **shared: Any,
    ) -> None:
        beta1, beta2 = group["betas"]
        lion_(
            params,
            grads,
            state("exp_avg"),
            masters,
            steps,
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            **shared,
        )
