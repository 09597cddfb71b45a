"""SGD and Lion: unscale, clip, update and write-back in one pass, without a host sync."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from ..ops.step import lion_op, sgd_op
from . import _settings
from ._base import Optimizer


class SGD(Optimizer):
    """SGD with momentum and Nesterov momentum, for fp32, bf16, fp16 and fp64 params.

    The formula is that of `mixprec.ops.sgd_`; results agree with torch.optim.SGD within a few
    units in the last place. lr, momentum, dampening, weight_decay, nesterov and maximize may
    differ between param groups; with dampening, momentum must be on from the first step (or step()
    raises ValueError). state[param]: `momentum_buffer` where momentum is not 0, `step`, and
    `master` or `remainder`. Without masters, state dicts can be exchanged with torch.optim.SGD in
    both directions. Options, skipping and scaling as for `AdamW`. Source: On the importance of
    initialization and momentum in deep learning (Sutskever et al., 2013).
    """

    _optional: ClassVar[dict[str, Any]] = {"maximize": False, "nesterov": False}
    _op = sgd_op
    _moment_names = ("momentum_buffer",)
    _moments_required = False  # momentum may be switched on and off

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening}
        defaults |= {"weight_decay": weight_decay, "nesterov": nesterov, "maximize": maximize}
        _settings.check_off(type(self).__name__, "differentiable", differentiable)
        super().__init__(params, defaults, options)

    def _check_settings(self, group: dict[str, Any], who: str) -> None:
        super()._check_settings(group, who)
        _settings.check_number(who, "momentum", group["momentum"])
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                f"{who}: nesterov needs a momentum above 0 and no dampening, got momentum="
                f"{group['momentum']}, dampening={group['dampening']}"
            )

    def _moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        if group["momentum"] == 0:
            return ()
        states = (self.state[p] for p in group["params"] if p in self.state)
        if group["dampening"] != 0 and any(s and "momentum_buffer" not in s for s in states):
            raise ValueError(
                "SGD: momentum that is switched on after the first step needs dampening=0, got "
                f"dampening={group['dampening']}"
            )
        return self._moment_names


class Lion(Optimizer):
    """Lion: steps of the size lr in the direction of a sign, for fp32, bf16, fp16 and fp64 params.

    The formula is that of `mixprec.ops.lion_`. It keeps one moment, half of AdamW's state, and
    usually needs an lr three to ten times smaller than AdamW's and a weight_decay as much larger.
    lr, betas, weight_decay and maximize may differ between param groups. state[param]: `exp_avg`,
    `step`, and `master` or `remainder`. Options, skipping, scaling and errors as for `AdamW`.
    Source: Symbolic Discovery of Optimization Algorithms (Chen et al., 2023).
    """

    _op = lion_op
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
