"""Layers of other libraries whose forward pass is their own and calls torch's products."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from .. import _originals, functional
from ..recipes import Recipe
from . import _region
from ._layer import Layer

_PRODUCTS = frozenset({"linear", "conv2d", "grouped_mm"})


class Intercepted(Layer):
    """A layer in whose forward pass the calls of torch.nn.functional.linear, conv2d and grouped_mm
    compute with `recipe`; all else in it runs as before.

    Only `mixprec.convert` makes it: of subclasses of nn.Linear and nn.Conv2d that define forward,
    such as convolutions with standardized weights, and of the experts of a mixture, whose weights
    are stacked. Delayed scales are shared by all products of the layer; `mixprec.reuse_weights`
    does nothing here, because the weight may be computed anew in each pass.
    """

    __module__ = "mixprec.nn"
    _one_product = False
    _warned = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        recipe = _region.recipe_here(self._recipe)
        if recipe is None:
            return super().forward(*args, **kwargs)
        products = _Products(self, recipe)
        if torch.compiler.is_compiling():  # which takes one context here
            with products:
                return super().forward(*args, **kwargs)
        with _region.with_modes(), products:
            result = super().forward(*args, **kwargs)
        if not (products.found or self._warned):
            self._warned = True
            warnings.warn(
                f"{self._path or 'a layer'} does not use the recipe {recipe.name}: its forward "
                "pass called neither linear, conv2d nor grouped_mm of torch.nn.functional",
                stacklevel=2,
            )
        return result

    __repr__ = nn.Module.__repr__

    def extra_repr(self) -> str:
        own = super().extra_repr()
        return f"{own}, {self.recipe}" if own else str(self.recipe)


class Experts(Intercepted):
    """The experts of a mixture: parameters [E, N, K], one of which stands for `weight`."""

    __module__ = "mixprec.nn"

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        own: torch.Tensor | None = self._parameters.get("weight")
        if own is not None:
            return own
        return next(p for p in self.parameters(recurse=False) if p.dim() == 3)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Dynamo shows grouped_mm to no mode: torch's product would be compiled.
        is_traced = torch.compiler.is_dynamo_compiling()
        if is_traced and _region.recipe_here(self._recipe) is not None:
            return _uncompiled(self, *args, **kwargs)
        return super().forward(*args, **kwargs)


@_disable_dynamo
def _uncompiled(experts: Experts, *args: Any, **kwargs: Any) -> Any:
    return Intercepted.forward(experts, *args, **kwargs)


class _Products(TorchFunctionMode):
    """Runs torch's products of a layer by its recipe."""

    def __init__(self, layer: Layer, recipe: Recipe) -> None:
        super().__init__()
        self.layer, self.recipe, self.found = layer, recipe, False
        self.grad = torch.is_grad_enabled()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):  # of compiled code: a checkpoint, a branch
            self._refuse(str(func))
        run = _RUN.get(func)
        if run is None or (run is _grouped_mm and not _is_by_rows(*args, **kwargs)):
            return func(*args, **kwargs)
        if not torch.compiler.is_compiling():
            self.found = True
            if self.grad and not torch.is_grad_enabled():
                self._refuse_reentrant()

        def product(of: Callable[..., Any], x: torch.Tensor, *more: Any) -> torch.Tensor:
            state = self.layer._state(x.dtype, x.device, self.recipe)._asdict()
            del state["quantized_weight"]  # there is none of a weight that is computed anew
            y: torch.Tensor = of(x, *more, recipe=self.recipe, name=self.layer._path, **state)
            return y

        return run(product, *args, **kwargs)

    def _refuse_reentrant(self) -> None:
        """Backward runs a piece of a forward pass again outside of this mode. Where torch compares
        nothing (use_reentrant=True), its gradients would be those of torch's products."""
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_code is not Intercepted.forward.__code__:
            if frame.f_code is CheckpointFunction.forward.__code__:
                self._refuse("torch.utils.checkpoint")
            frame = frame.f_back

    def _refuse(self, function: str) -> None:
        raise RuntimeError(
            f"{self.layer._path or 'a layer'}: {function} inside of its forward pass would compute "
            f"without the recipe {self.recipe.name}: put it around the whole module instead"
        )


def _linear(product: Any, input: Any, weight: Any, bias: Any = None) -> torch.Tensor:
    return product(functional.linear, input, weight, bias)


def _conv2d(product: Any, input: Any, weight: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    names = ("bias", "stride", "padding", "dilation", "groups")
    options = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    options |= dict(zip(names, args, strict=False)) | kwargs
    return product(functional.conv2d, input, weight, *(options[name] for name in names))


def _grouped_mm(
    product: Any,
    input: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor,
    bias: None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """input [S, K], of which the rows up to offs[e] are those of expert e, and mat2 [E, K, N]."""
    y = product(functional.grouped_linear, input, _whole(mat2.transpose(1, 2)), offs)
    return y.to(out_dtype or input.dtype)


def _whole(weight: torch.Tensor) -> torch.Tensor:
    """The parameter that `weight` is a view of, if it shows all of it as it is: only the parameter
    has a main_grad."""
    base = None if torch.compiler.is_compiling() else weight._base
    if base is None or base.dtype != weight.dtype:
        return weight
    same = (base.shape, base.stride()) == (weight.shape, weight.stride())
    return base if same else weight


def _is_by_rows(
    input: torch.Tensor, mat2: torch.Tensor, offs: object = None, bias: object = None, **_: object
) -> bool:
    """Whether a grouped_mm is that of `_grouped_mm`; others stay torch's."""
    return input.dim() == 2 and mat2.dim() == 3 and offs is not None and bias is None


_RUN: dict[Any, Callable[..., torch.Tensor]] = {
    _originals.functional.linear: _linear,
    _originals.functional.conv2d: _conv2d,
    _originals.GROUPED_MM: _grouped_mm,
}


def layer_for(module: nn.Module) -> type[Intercepted] | None:
    """Intercepted or Experts, if the forward pass of `module` calls a product of torch by name, or
    that of the class it derives from, and no child of it has weights."""
    weights = [p for p in module.parameters(recurse=False) if p.dim() >= 2]
    inside = [p for p in module.parameters() if p.dim() >= 2]
    if not weights or len(weights) != len(inside):
        return None
    if not all(w.dtype.is_floating_point and w.dtype.itemsize > 1 for w in weights):
        return None
    names = set(inspect.unwrap(type(module).forward).__code__.co_names)
    if not names & _PRODUCTS and not {"super", "forward"} <= names:
        return None
    if isinstance(module, (nn.Linear, nn.Conv2d)):
        return Intercepted
    return Experts if all(w.dim() == 3 for w in weights) else None
