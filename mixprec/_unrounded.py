"""The FP32 values of parameters that were cast to 16 bits, until an optimizer takes them."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ._local_gradients import LOW_PRECISION

_NAME = "_mixprec_unrounded"
_TORCHS = frozenset(kind for kind in vars(torch.optim).values() if isinstance(kind, type))
_watching = False


def keep(param: torch.Tensor, values: torch.Tensor) -> None:
    """Remember the values that `param` had before it was rounded to what it holds now."""
    global _watching
    vars(param)[_NAME] = values.float(), param._version
    if not _watching:
        _watching = True
        register_optimizer_step_pre_hook(_before_a_step)


def is_kept(param: torch.Tensor) -> bool:
    return _NAME in vars(param)


def take(param: torch.Tensor) -> torch.Tensor | None:
    """The FP32 values that round to `param`, on its device, and no longer kept.

    None if nothing was kept, or the param has been written since, as by load_state_dict; where it
    was written through `.data`, which does not tell, its own values.
    """
    values, version = vars(param).pop(_NAME, (None, 0))
    if values is None or version != param._version or values.is_meta or param.is_meta:
        return None
    values = values.to(param.device)
    return torch.where(values.to(param.dtype) == param.detach(), values, param.detach().float())


def _before_a_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """A hook of all optimizers: those of torch have no masters. It frees what they do not take."""
    if torch.compiler.is_compiling() or type(optimizer) not in _TORCHS:
        return
    kept = [p for group in optimizer.param_groups for p in group["params"] if is_kept(p)]
    for param in kept:
        del vars(param)[_NAME]
    kept = [p for p in kept if p.dtype in LOW_PRECISION]
    if kept:
        name, dtype = type(optimizer).__name__, str(kept[0].dtype).removeprefix("torch.")
        ours = f"mixprec.optim.{name}"
        if name not in ("AdamW", "Adam", "SGD", "Muon"):
            ours = f"mixprec.optim.Masters(torch.optim.{name}, params, ...)"
        warnings.warn(
            f"torch.optim.{name} updates {len(kept)} parameters that cast_parameters made "
            f"{dtype}: updates of less than half a unit of {dtype} are lost. {ours} keeps FP32 "
            "masters; if this is meant, cast_parameters(..., keep_masters=False) says so",
            stacklevel=3,
        )
