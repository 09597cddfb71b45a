"""Lion: unscale, clip, update and write-back in one pass, without a host sync."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from ..ops import lion_
from ._base import Optimizer


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
        maximize: bool = False,
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, options)

    def _update(self, group: dict[str, Any], *tensors: Any, **options: Any) -> None:
        beta1, beta2 = group["betas"]
        lion_(*tensors, beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], **options)
