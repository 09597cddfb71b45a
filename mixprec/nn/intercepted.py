"""Layers of other libraries whose forward pass is their own and calls torch's products."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from ..recipes import Recipe
from . import _region
from ._layer import Layer
from ._own_products import OwnProducts


class Intercepted(Layer):
    """A layer in whose forward pass torch's products compute with `recipe`; all else in it runs as
    before.

    These are linear, the convolutions and grouped_mm of torch.nn.functional, and matrix products
    (`@`, matmul, mm, bmm, addmm, baddbmm) with a parameter of the module or a view of it, but not
    with a copy (an index, another dtype), with `out=`, by einsum or in an autograd.Function. Only
    `mixprec.convert` makes it, of subclasses of nn.Linear and of torch's convolutions that define
    forward, such as convolutions with standardized weights. Delayed scales are shared by all
    products of the layer; `mixprec.reuse_weights` does nothing here, because the weight may be
    computed anew in each pass. torch.compile leaves the layer out of its graph.
    """

    __module__ = "mixprec.nn"
    _one_product = False
    _warned = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        recipe = _region.recipe_here(self._recipe)
        if torch.compiler.is_dynamo_compiling() and recipe is not None:
            # Which shows to no mode grouped_mm, and whether an operand is a view of a weight.
            return _uncompiled(self, *args, **kwargs)
        self._watch_main_grads()
        if recipe is None:
            return super().forward(*args, **kwargs)
        products = OwnProducts(self, recipe, Intercepted.forward.__code__)
        with products:
            result = self._run(recipe, products, args, kwargs)
        if not (products.found or self._warned):
            self._warned = True
            warnings.warn(
                f"{self._path or 'a layer'} does not use the recipe {recipe.name}: its forward "
                "pass called no linear, convolution or grouped_mm of torch.nn.functional, and no "
                "matrix product with a parameter of its own",
                stacklevel=2,
            )
        return result

    def _run(self, recipe: Recipe, products: OwnProducts, args: Any, kwargs: Any) -> Any:
        """The forward pass of the module."""
        return super().forward(*args, **kwargs)

    def _leave(self) -> None:
        super()._leave()
        vars(self).pop("_warned", None)

    __repr__ = nn.Module.__repr__

    def extra_repr(self) -> str:
        own = super().extra_repr()
        return f"{own}, {self.recipe}" if own else str(self.recipe)


@_disable_dynamo
def _uncompiled(layer: Intercepted, *args: Any, **kwargs: Any) -> Any:
    return Intercepted.forward(layer, *args, **kwargs)
