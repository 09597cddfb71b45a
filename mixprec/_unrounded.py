"""The FP32 values of parameters that were cast to 16 bits, until an optimizer takes them."""

from __future__ import annotations

import torch

_NAME = "_mixprec_unrounded"


def keep(param: torch.Tensor, values: torch.Tensor) -> None:
    """Remember the values that `param` had before it was rounded to what it holds now."""
    vars(param)[_NAME] = values.float(), param._version


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
