"""torch as it was when mixprec was imported: what is replaced later is not what mixprec knows, also
in its modules that are imported when they are first used."""

from __future__ import annotations

from types import CodeType, SimpleNamespace
from typing import Any

import torch
from torch import nn


def _copy(*owners: Any) -> Any:
    """The attributes of a module, or of a class and those it is derived from, these first."""
    return SimpleNamespace(**{name: x for owner in owners for name, x in vars(owner).items()})


def methods_of(kind: type[nn.Module]) -> dict[str, Any]:
    """Those that the class itself defines."""
    return {name: method for name, method in vars(kind).items() if callable(method)}


functional = _copy(nn.functional)
# Where a function of torch may stand under its name.
PLACES = (_copy(torch), _copy(torch._C.TensorBase, torch.Tensor), functional, _copy(torch.special))
LINALG, C_NN = _copy(torch.linalg), _copy(torch._C._nn)
GROUPED_MM = torch._grouped_mm  # which torch.nn.functional.grouped_mm calls
BACKWARD = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_KINDS: tuple[type[nn.Module], ...] = (nn.Sequential, nn.LayerNorm, nn.RMSNorm, nn.GELU, nn.SiLU)
METHODS = {kind: methods_of(kind) for kind in _KINDS}
CALL = nn.Module.__call__  # what torch.fx and others replace while they trace


class Codes:
    """Code objects by identity. What torch.compile makes of code may have no hash."""

    def __init__(self, *codes: CodeType) -> None:
        self._codes = {id(code): code for code in codes}

    def __contains__(self, code: CodeType) -> bool:
        return id(code) in self._codes


# The code of torch that calls the `forward` of `self`.
_CALL = nn.Module._call_impl.__code__
_INNER = (code for code in _CALL.co_consts if isinstance(code, CodeType))
CALLERS = Codes(_CALL, nn.Module._slow_forward.__code__, *_INNER)
