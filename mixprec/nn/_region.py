"""The recipe of the current `autocast` region.

A region is a torch function mode: torch keeps these per thread, hands those of the caller of
backward() to the threads that run it, and torch.compile guards on them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ..recipes import Recipe

OWN = object()
_BACKWARD = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


class Region(TorchFunctionMode):
    """inside: what layers use; OWN: their own recipe; None: they compute as torch's modules."""

    def __init__(self, inside: Recipe | object | None) -> None:
        super().__init__()
        self.inside = inside

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _BACKWARD:
            return func(*args, **kwargs)
        # torch runs func outside of this mode; layers that it runs again are to see the region.
        with self, torch._C.DisableTorchFunction():
            return func(*args, **kwargs)


def is_for_onnx() -> bool:
    """Whether torch.onnx.export is running, whose format has none of our ops."""
    return torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()


def recipe_here(own: Recipe) -> Recipe | None:
    """The current recipe of a module with recipe `own`; None: compute as torch's module."""
    if is_for_onnx():
        return None
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, Region):
            return own if mode.inside is OWN else mode.inside  # type: ignore[return-value]
    return own


def without_modes() -> AbstractContextManager[Any]:
    """For the code of a layer between the modules that it was called with: a torch function mode,
    such as that of FusedAttention, sees each attribute of a tensor that is read.
    """
    return nullcontext() if torch.compiler.is_compiling() else torch._C.DisableTorchFunction()
