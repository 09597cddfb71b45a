"""Part: norm -> linear layers -> activation -> linear of a module's children as one function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from .._modes import is_watched
from .._originals import CALL
from ..functional._derivatives import is_twice_differentiable
from ..functional._fused import Norm, run_fused
from ..functional._linear import check_input
from ..functional._products import Product
from ..memory.compress_saved import ModuleHook
from ..ops._dispatch import checks
from . import _region
from ._fused_forward import own_forward
from .known import NormSpec, spec_of
from .known_norms import as_input
from .linear import Conv1D, Linear, product_of

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LINEAR = (Linear.forward, Conv1D.forward)
PLAIN = (torch.Tensor, nn.Parameter)


def norm_of(module: nn.Module) -> NormSpec | None:
    """What a known norm computes; None for anything else."""
    spec = spec_of(module)
    return spec if isinstance(spec, NormSpec) else None


def activation_of(module: nn.Module) -> str | None:
    """The name of a known activation in `act_quantize`; None for anything else."""
    spec = spec_of(module)
    return spec if isinstance(spec, str) else None


def why_not_fused(
    layers: Sequence[nn.Module],
    norm: nn.Module | None = None,
    act: nn.Module | None = None,
    around: Sequence[nn.Module] = (),
) -> str | None:
    """Why these modules have to be called one by one; None if they can run as one function.

    around: modules whose forward passes call the others.
    """
    for layer in layers:
        kind: Any = type(layer)
        if kind.forward not in _LINEAR or kind.__call__ is not CALL:
            return f"a layer of another kind ({kind.__name__})"
    if norm is not None and norm_of(norm) is None:
        return f"the norm {type(norm).__name__}"
    if act is not None and activation_of(act) is None:
        return f"the activation {type(act).__name__}"
    for module in (*layers, *around, *(m for m in (norm, act) if m is not None)):
        hooks = (hook for name in _HOOKS for hook in getattr(module, name).values())
        if any(hook is not as_input and type(hook) is not ModuleHook for hook in hooks):
            return "hooks on a layer, norm or activation"
        if own_forward(module) or module._compiled_call_impl is not None:
            return "a module with a forward pass of its own"
        if any(p is not None and type(p) not in PLAIN for p in module._parameters.values()):
            return "sharded or otherwise special parameters"
    recipes: list[Any] = [layer.recipe for layer in layers]
    if any(recipe != recipes[0] for recipe in recipes):
        return f"different recipes ({', '.join(dict.fromkeys(r.name for r in recipes))})"
    if recipes[0].has_outliers:
        return "outliers"
    return "clip_activations" if recipes[0].clip_activations else None


def fits_norm(x: Any, spec: NormSpec) -> bool:
    """Whether x is what torch's norms take; for anything else they raise the error."""
    weight, bias = spec.weight, spec.bias
    dtypes = (torch.float32, x.dtype) if type(x) in PLAIN else ()
    return (
        type(x) in PLAIN
        and x.layout is torch.strided
        and not x.is_nested
        and x.dtype in checks.FLOATS
        and x.dim() > 0
        and x.shape[-1] == spec.size
        and all(t is None or (t.dtype in dtypes and t.device == x.device) for t in (weight, bias))
        and all(t is None or t.shape == (spec.size,) for t in (weight, bias))
        and (weight is None or bias is None or weight.dtype == bias.dtype)
    )


class Part:
    """norm(x), if there is a norm, then the outputs of `first`, or last(act(h) [* up]) of them."""

    def __init__(
        self,
        first: Sequence[Any],
        *,
        norm: nn.Module | None = None,
        act: nn.Module | None = None,
        last: Any = None,
        around: Sequence[nn.Module] = (),
    ) -> None:
        self.first, self.norm, self.act, self.last = [*first], norm, act, last
        self.around = around

    @property
    def layers(self) -> list[Any]:
        return self.first if self.last is None else [*self.first, self.last]

    def why_not_fused(self) -> str | None:
        return why_not_fused(self.layers, self.norm, self.act, self.around)

    def is_fused(self, x: Any) -> bool:
        """Whether it runs as one function here; else its modules are to be called one by one."""
        if self.why_not_fused() is not None or _has_any_global_hook():
            return False
        if type(x) not in PLAIN or is_twice_differentiable() or is_watched():
            return False
        if self.norm is not None:
            spec = norm_of(self.norm)
            # In a region norms are FP32, and so is what the layers behind them return.
            if spec is None or not fits_norm(x, spec) or _region.current_region() is not None:
                return False
        return _region.recipe_here(self.first[0].recipe) is not None

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """The outputs; with a residual those of x + residual, and then this sum."""
        if not self.is_fused(x):
            return self._one_by_one(x, residual)
        with _region.without_modes():
            return self.run(x, residual)

    def run(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """The outputs, where `is_fused`."""
        recipe = _region.recipe_here(self.first[0].recipe)
        assert recipe is not None, "is_fused"
        settings: dict[str, Any] = {}
        dtype = x.dtype
        if self.norm is not None:
            spec = norm_of(self.norm)
            assert spec is not None, "is_fused"
            keeps = as_input in self.norm._forward_hooks.values()
            if spec.promote and spec.weight is not None and not keeps:
                dtype = torch.promote_types(dtype, spec.weight.dtype)
            settings["norm"] = Norm(spec.eps, spec.subtract_mean)
            settings |= {"norm_weight": spec.weight, "norm_bias": spec.bias}
        products: list[Product] = []
        tensors: list[Any] = []
        out_dtype = dtype
        for layer in self.layers:
            product, weight, out_dtype, _ = product_of(layer, layer.weight, dtype, recipe)
            products.append(product)
            tensors += [weight, layer.bias]
            if layer is not self.last:
                check_input(x, weight, name=layer._path)
        act = None if self.act is None else activation_of(self.act)
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
