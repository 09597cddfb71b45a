"""Valid settings and options of an optimizer; anything else is a ValueError."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from .._local_gradients import LOW_PRECISION
from ..ops._dispatch.checks import REALS, as_dtype

if TYPE_CHECKING:
    import torch.distributed as dist

# The options that have few values, and how an error names these.
_ALLOWED: dict[str, tuple[tuple[object, ...], str]] = {
    "master_weights": (
        ("auto", "fp32", "remainder16", "remainder8", None),
        '"auto", "fp32", "remainder16", "remainder8" or None',
    ),
    "state_dtype": (
        (torch.float32, torch.bfloat16, "int8"),
        'torch.float32 ("fp32"), torch.bfloat16 ("bf16") or "int8"',
    ),
    "grad_dtype": ((None, torch.float32), 'torch.float32 ("fp32") or None'),
}
NO_NORM = (
    "max_grad_norm must be None with release_gradients=True: gradients are applied before the norm "
    "of all of them is known; max_grad_value bounds their elements"
)


def check_number(who: str, name: str, value: Any, limit: float = math.inf) -> None:
    """A number in [0, limit)."""
    if not isinstance(value, Real) or not 0.0 <= float(value) < limit:
        meaning = "a finite number, 0 or more" if limit == math.inf else f"a number in [0, {limit})"
        got = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
        raise ValueError(f"{who}: {name} must be {meaning}, got {got}")


def check_lr(who: str, name: str, lr: Any) -> None:
    """A number, or a tensor of one element, which is not read, to avoid a host sync."""
    if isinstance(lr, torch.Tensor):
        if lr.numel() != 1 or lr.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{who}: lr must be a number or a tensor of one fp32 or fp64 element, got shape "
                f"{tuple(lr.shape)}, dtype {lr.dtype}"
            )
    else:
        check_number(who, name, lr)


def check_betas(who: str, name: str, betas: Any) -> None:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"{who}: {name} must be two numbers in [0, 1), got {betas!r}")
    for i, beta in enumerate(betas):
        check_number(who, f"{name}[{i}]", beta, limit=1)


def check_limit(who: str, name: str, limit: Any) -> None:
    if limit is not None and not (isinstance(limit, Real) and float(limit) > 0):
        raise ValueError(f"{who}: {name} must be positive, got {limit!r}")


def check_norm(who: str, limit: Any, release_gradients: bool) -> None:
    check_limit(who, "max_grad_norm", limit)
    if release_gradients and limit is not None:
        raise ValueError(f"{who}: {NO_NORM}")


def check_off(who: str, name: str, value: Any) -> None:
    """An option of torch's optimizers that these do not have."""
    if value:
        why = {
            "amsgrad": f"the largest exp_avg_sq is not kept; torch.optim.{who} keeps it",
            "differentiable": "an update in place has no derivative",
        }
        raise ValueError(f"{who}: {name} must be False, got {value!r}: {why[name]}")


# The settings of a group that mean the same in every optimizer.
CHECKS: dict[str, Callable[[str, str, Any], None]] = {
    "lr": check_lr,
    "betas": check_betas,
    **dict.fromkeys(("eps", "weight_decay", "dampening"), check_number),
}


def check_params(who: str, params: list[torch.Tensor], grad_dtype: torch.dtype | None) -> None:
    for p in params:
        wrong = None
        if p.dtype not in REALS:
            wrong = f"params must be fp32, bf16, fp16 or fp64, got {p.dtype}"
            if p.is_complex() and who in ("AdamW", "Adam", "SGD"):
                wrong += f"; torch.optim.{who} takes complex ones"
        elif p.layout != torch.strided:
            wrong = f"params must be dense, got layout {p.layout}"
        elif (
            grad_dtype is not None
            and p.dtype in LOW_PRECISION
            and p.grad is not None
            and p.grad.dtype != grad_dtype
        ):
            wrong = f"a param has a gradient in {p.grad.dtype} already, so grad_dtype cannot be "
            wrong += "set: call zero_grad() first"
        if wrong is not None:
            raise ValueError(f"{who}: {wrong}")
    if len(set(params)) < len(params):
        raise ValueError(
            f"{who}: params must hold each parameter once, got one twice; of tied weights pass "
            "one, as model.parameters() does"
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
    release_gradients: bool = False

    @classmethod
    def parse(cls, who: str, options: dict[str, Any]) -> Options:
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in options if name not in known]:
            raise TypeError(
                f"{who}: {', '.join(unknown)} is no argument; the options of every optimizer are "
                f"{', '.join(known)}"
            )
        dtypes = {name: as_dtype(v) for name, v in options.items() if name.endswith("_dtype")}
        given = cls(**{**options, **dtypes})
        given._check(who)
        return given

    def _check(self, who: str) -> None:
        masters, is_random, seed = self.master_weights, self.stochastic_rounding, self.seed
        for name, (allowed, meaning) in _ALLOWED.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{who}: {name} must be {meaning}, got {value!r}")
        for name in ("stochastic_rounding", "release_gradients"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{who}: {name} must be True or False, got {value!r}")
        if is_random and masters not in ("auto", None):
            raise ValueError(
                f"{who}: stochastic_rounding is for bf16 params without masters, got "
                f"master_weights={masters!r}; use one or the other"
            )
        if not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise ValueError(f"{who}: seed must be an int in [0, 2^63), got {seed!r}")
        check_norm(who, self.max_grad_norm, self.release_gradients)
        check_limit(who, "max_grad_value", self.max_grad_value)
        if self.max_grad_norm is not None and self.max_grad_value is not None:
            raise ValueError(f"{who}: give max_grad_norm or max_grad_value, not both")
        if self.release_gradients and self.process_group is not None:
            raise ValueError(f"{who}: release_gradients must be False with a process_group")


def check_group(who: str, names: set[str]) -> None:
    """Whether the settings of a group, without the optimizer's own, may differ between groups."""
    options = {field.name for field in fields(Options)} - {"max_grad_norm"}
    if refused := ", ".join(sorted(names & options)):
        raise ValueError(
            f"{who}: a group must not have {refused}: give it to the optimizer, for all groups"
        )


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
