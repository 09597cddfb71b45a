"""Part: norm -> linear layers -> activation -> linear of a module's children as one function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .._local_gradients import is_sharded
from ..functional._arguments import main_grad_of
from ..functional._derivatives import is_twice_differentiable
from ..functional._fused import Norm, run_fused
from ..functional._linear import check_input
from ..functional._products import Product
from . import _region
from ._layer import Layer
from ._norms import as_input, norm_of
from .conv1d import Conv1D
from .linear import Linear

__all__ = ["Part", "act_of", "why_separate"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ACTS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "ReLUSquaredActivation": "relu2",
    "_ReLUSquared": "relu2",
}


def act_of(module: nn.Module) -> str | None:
    """The name of an activation in `act_quantize`; None for anything else."""
    if type(module) is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return _ACTS.get(type(module).__name__)


def why_separate(
    layers: Sequence[nn.Module], norm: nn.Module | None = None, act: nn.Module | None = None
) -> str | None:
    """Why these modules have to be called one by one; None if they can run as one function."""
    for layer in layers:
        if not isinstance(layer, (Linear, Conv1D)):
            return f"a layer of another kind ({type(layer).__name__})"
    if norm is not None and norm_of(norm) is None:
        return f"the norm {type(norm).__name__}"
    if act is not None and act_of(act) is None:
        return f"the activation {type(act).__name__}"
    for module in (*layers, *(m for m in (norm, act) if m is not None)):
        if any(hook is not as_input for name in _HOOKS for hook in getattr(module, name).values()):
            return "hooks on a layer, norm or activation"
        if "forward" in vars(module):
            return "a module with a forward pass of its own"
        if any(is_sharded(p) for p in module.parameters(recurse=False)):
            return "sharded parameters"
    recipes: list[Any] = [layer.recipe for layer in layers]
    if any(recipe != recipes[0] for recipe in recipes):
        return f"different recipes ({', '.join(dict.fromkeys(r.name for r in recipes))})"
    return "clip_activations" if recipes[0].clip_activations else None


class Part:
    """norm(x), if there is a norm, then the outputs of `first`, or last(act(h) [* up]) of them."""

    def __init__(
        self,
        first: Sequence[Any],
        *,
        norm: nn.Module | None = None,
        act: nn.Module | None = None,
        last: Any = None,
    ) -> None:
        self.first, self.norm, self.act, self.last = [*first], norm, act, last

    @property
    def layers(self) -> list[Any]:
        return self.first if self.last is None else [*self.first, self.last]

    def together(self) -> bool:
        """Whether it runs as one function now; otherwise its modules are called one by one."""
        if why_separate(self.layers, self.norm, self.act) is not None:
            return False
        return not (_region.recipe_here(self.first[0].recipe) is None or is_twice_differentiable())

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """The outputs; with a residual those of x + residual, and then this sum."""
        if not self.together():
            return self._one_by_one(x, residual)
        recipe = _region.recipe_here(self.first[0].recipe)
        assert recipe is not None
        products: list[Product] = []
        tensors: list[Any] = []
        out_dtype = x.dtype
        for layer in self.layers:
            product, weight, out_dtype = _product(layer, x, recipe)
            products.append(product)
            tensors += [weight, layer.bias]
            if layer is not self.last:
                check_input(x, weight)
        settings: dict[str, Any] = {}
        if self.norm is not None:
            parts = norm_of(self.norm)
            assert parts is not None, "only norms that norm_of knows are fused"
            settings["norm"] = Norm(parts.eps, parts.subtract_mean)
            settings |= {"norm_weight": parts.weight, "norm_bias": parts.bias}
        act = None if self.act is None else act_of(self.act)
        op = "norm_linear" if act is None else "mlp"
        return run_fused(
            op, x, products, tensors, recipe, out_dtype, **settings, residual=residual, act=act
        )

    def _one_by_one(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        total = x if residual is None else x + residual
        z = total if self.norm is None else self.norm(total)
        outputs = tuple(layer(z) for layer in self.first)
        if self.last is not None:
            assert self.act is not None
            a = self.act(outputs[0])
            outputs = (self.last(a if len(outputs) == 1 else a * outputs[1]),)
        return outputs if residual is None else (*outputs, total)


def _product(
    layer: Layer, x: torch.Tensor, recipe: Any
) -> tuple[Product, torch.Tensor, torch.dtype]:
    """What a linear layer brings, its weight as [N, K], and the dtype of its output."""
    out_dtype, delayed, quantized_weight, _ = layer._state(x, recipe)
    main_grad, weight = main_grad_of("linear", layer.weight), layer.weight
    if isinstance(layer, Conv1D):
        weight = weight.t()
        main_grad = None if main_grad is None else main_grad.t()
    if not recipe.is_delayed:
        delayed = None
    return Product(main_grad, delayed, quantized_weight, layer._path), weight, out_dtype
