"""Valid settings and options of an optimizer; anything else is a ValueError."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import torch.distributed as dist

MASTER_WEIGHTS = ("auto", "fp32", "remainder16", None)
STATE_DTYPES = (torch.float32, torch.bfloat16, "int8")


def check_number(who: str, name: str, value: Any, limit: float = math.inf) -> None:
    """A number in [0, limit)."""
    if not isinstance(value, Real) or not 0.0 <= float(value) < limit:
        meaning = "a finite number, 0 or more" if limit == math.inf else f"a number in [0, {limit})"
        got = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
        raise ValueError(f"{who}: {name} must be {meaning}, got {got}")


def check_lr(who: str, lr: Any) -> None:
    """A number, or a tensor of one element, which is not read, to avoid a host sync."""
    if isinstance(lr, torch.Tensor):
        if lr.numel() != 1 or lr.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{who}: lr must be a number or a tensor of one fp32 or fp64 element, got shape "
                f"{tuple(lr.shape)}, dtype {lr.dtype}"
            )
    else:
        check_number(who, "lr", lr)


def check_betas(who: str, betas: Any) -> None:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"{who}: betas must be two numbers in [0, 1), got {betas!r}")
    for i, beta in enumerate(betas):
        check_number(who, f"betas[{i}]", beta, limit=1)


def check_limit(who: str, name: str, limit: Any) -> None:
    if limit is not None and not (isinstance(limit, Real) and float(limit) > 0):
        raise ValueError(f"{who}: {name} must be positive, got {limit!r}")


def check_amsgrad(who: str, amsgrad: Any) -> None:
    if amsgrad:
        raise ValueError(
            f"{who}: amsgrad must be False, got {amsgrad!r}: the largest exp_avg_sq is not kept; "
            f"torch.optim.{who} keeps it"
        )


def check_differentiable(who: str, differentiable: Any) -> None:
    if differentiable:
        raise ValueError(
            f"{who}: differentiable must be False: an update in place has no derivative"
        )


@dataclass(frozen=True)
class Options:
    """The options of every optimizer; `AdamW` documents them."""

    master_weights: str | None = "auto"
    state_dtype: torch.dtype | str = torch.float32
    stochastic_rounding: bool = False
    seed: int = 0
    grad_dtype: torch.dtype | None = None
    max_grad_norm: float | None = None
    max_grad_value: float | None = None
    process_group: dist.ProcessGroup | None = None

    @classmethod
    def parse(cls, who: str, options: dict[str, Any]) -> Options:
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in options if name not in known]:
            raise TypeError(
                f"{who}: {', '.join(unknown)} is no argument; the options of every optimizer are "
                f"{', '.join(known)}"
            )
        parsed = cls(**options)
        parsed._check(who)
        return parsed

    def _check(self, who: str) -> None:
        if self.master_weights not in MASTER_WEIGHTS:
            raise ValueError(
                f'{who}: master_weights must be "auto", "fp32", "remainder16" or None, '
                f"got {self.master_weights!r}"
            )
        if self.state_dtype not in STATE_DTYPES:
            raise ValueError(
                f'{who}: state_dtype must be torch.float32, torch.bfloat16 or "int8", '
                f"got {self.state_dtype!r}"
            )
        if not isinstance(self.stochastic_rounding, bool):
            raise ValueError(
                f"{who}: stochastic_rounding must be True or False, got "
                f"{self.stochastic_rounding!r}"
            )
        if self.stochastic_rounding and self.master_weights not in ("auto", None):
            raise ValueError(
                f"{who}: stochastic_rounding is for bf16 params without masters, got "
                f"master_weights={self.master_weights!r}; use one or the other"
            )
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ValueError(f"{who}: seed must be an int in [0, 2^63), got {self.seed!r}")
        if self.grad_dtype not in (None, torch.float32):
            raise ValueError(
                f"{who}: grad_dtype must be torch.float32 or None, got {self.grad_dtype!r}"
            )
        check_limit(who, "max_grad_norm", self.max_grad_norm)
        check_limit(who, "max_grad_value", self.max_grad_value)
        if self.max_grad_norm is not None and self.max_grad_value is not None:
            raise ValueError(f"{who}: give max_grad_norm or max_grad_value, not both")


def check_state_dict(who: str, state_dict: Any) -> None:
    """Check for the two keys of every optimizer's state dict and the types of their values."""
    wrong = None
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
        wrong = "be a dict with the keys state and param_groups"
    elif not isinstance(state_dict["param_groups"], list) or not all(
        isinstance(group, dict) and isinstance(group.get("params"), list)
        for group in state_dict["param_groups"]
    ):
        wrong = "hold a list of param groups, each with a list of params"
    elif not isinstance(state_dict["state"], dict) or not all(
        isinstance(state_dict["state"].get(index, {}), dict)
        for group in state_dict["param_groups"]
        for index in group["params"]
    ):
        wrong = "hold a dict per param in state"
    if wrong is not None:
        raise ValueError(f"{who}: state_dict must {wrong}: is it damaged?")
