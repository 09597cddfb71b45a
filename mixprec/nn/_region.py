"""The recipe of the current `autocast` region."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

from .._modes import Block, Mode, follow_checkpoints, nor_below, not_compiled
from .._originals import functional
from ..recipes import Recipe

OWN = object()
_SDPA = functional.scaled_dot_product_attention
follow_checkpoints()


class SeesRegions(Mode):
    """A mode that has to know of regions that began after it, which torch hides from it."""

    region: Region | None = None  # the innermost of these, while it passes a function on

    @not_compiled
    def inside_of(self, region: Region, func: Any, *args: Any, **kwargs: Any) -> Any:
        self.region = region
        try:
            return func(*args, **kwargs)
        finally:
            self.region = None


class Region(Block):
    """inside: what layers use; OWN: their own recipe; None: they compute as torch's modules."""

    def __init__(self, inside: Recipe | object | None) -> None:
        super().__init__()
        self.inside = inside

    def in_backward(self) -> Region:
        return Region(self.inside)

    @not_compiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = traceable(func), kwargs or {}
        if func is _SDPA:
            for mode in reversed(_get_current_function_mode_stack()):
                if isinstance(mode, SeesRegions) and mode.region is None:
                    return mode.inside_of(self, func, *args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)


def is_for_onnx() -> bool:
    """Whether torch.onnx.export is running, whose format has none of our ops."""
    return torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()


@nor_below
def current_region() -> Region | None:
    """The innermost region of this thread."""
    modes = reversed(_get_current_function_mode_stack())
    return next((mode for mode in modes if isinstance(mode, Region)), None)


@nor_below
def recipe_here(own: Recipe, region: Region | None = None) -> Recipe | None:
    """The recipe of a module with recipe `own` in `region`, or else the current one; None: compute
    as torch's module."""
    if is_for_onnx():
        return None
    region = current_region() if region is None else region
    if region is None or region.inside is OWN:
        return own
    return region.inside  # type: ignore[return-value]


@nor_below
def traceable(func: Any) -> Any:
    """func; in compiled code torch.unflatten for Tensor.unflatten, at whose `super()` torch.compile
    stops inside of a mode. Eager code keeps it: subclasses and other modes see which one it is."""
    compiling = torch.compiler.is_compiling()
    return torch.unflatten if compiling and func is torch.Tensor.unflatten else func


def without_modes() -> AbstractContextManager[Any]:
    """For the code of a layer between the modules that it was called with: a torch function mode,
    such as that of `compress_saved`, sees each attribute of a tensor that is read.
    """
    return nullcontext() if torch.compiler.is_compiling() else torch._C.DisableTorchFunction()
