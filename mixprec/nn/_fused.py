"""Modules that run as one function: norm, linear layers, activation, linear; or one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from .._originals import CALL
from ..functional._derivatives import PLAIN, apply, is_plain, may_run_as_one
from ..functional._fused import Norm, run_fused
from ..functional._linear import check_input
from ..functional._one_pass import Activation, RowNorm
from ..functional._products import Product
from ..memory.compress_saved import ModuleHook
from ..ops._dispatch import autocast, checks
from ._replaced import Fused, has_other_forward
from .autocast import current_region, is_for_onnx, recipe_here, without_modes
from .known import NormSpec, Spec, spec_of
from .known_norms import as_input
from .linear import Conv1D, Linear, product_of

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LINEAR = (Linear.forward, Conv1D.forward)


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
        if has_other_forward(module) or module._compiled_call_impl is not None:
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
        is_plain(x)
        and x.dtype in checks.FLOATS
        and x.dim() > 0
        and x.shape[-1] == spec.size
        and all(t is None or (t.dtype in dtypes and t.device == x.device) for t in (weight, bias))
        and all(t is None or t.shape == (spec.size,) for t in (weight, bias))
        and (weight is None or bias is None or weight.dtype == bias.dtype)
    )


class FusedBlock:
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
        if not may_run_as_one(x, transforms=True):
            return False
        if self.norm is not None:
            spec = norm_of(self.norm)
            # In a region norms are FP32, and so is what the layers behind them return.
            if spec is None or not fits_norm(x, spec) or current_region() is not None:
                return False
        return recipe_here(self.first[0].recipe) is not None

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """The outputs; with a residual those of x + residual, and then this sum."""
        if residual is not None and not self.adds(x, residual):
            total = x + residual
            return (*self(total), total)
        if not self.is_fused(x):
            return self._one_by_one(x)
        with without_modes():
            return self.run(x, residual)

    def adds(self, x: Any, residual: Any) -> bool:
        """Whether it runs as one function here that adds this residual, too."""
        return (
            self.norm is not None
            and self.is_fused(x)
            and may_run_as_one(residual, transforms=True)
            and (residual.dtype, residual.shape) == (x.dtype, x.shape)
            and residual.device == x.device
        )

    def run(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """The outputs, where `is_fused`; with a residual, where it `adds`."""
        recipe = recipe_here(self.first[0].recipe)
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

    def _one_by_one(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = x if self.norm is None else self.norm(x)
        outputs = tuple(layer(z) for layer in self.first)
        if self.last is not None:
            assert self.act is not None
            a = self.act(outputs[0])
            outputs = (self.last(a if len(outputs) == 1 else a * outputs[1]),)
        return outputs


# On a CPU, 1,024 rows of 512 to 2,048, forward and backward: torch's RMSNorm takes 2.5 to 6 times
# our time and its gelu_tanh 2 to 3 times; LayerNorm, GELU and SiLU 0.5 to 1.15 times, and are one
# pass already.
_KINDS = ("gelu_tanh",)


class FusedNorm(Fused):
    """An RMSNorm in one pass."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        x = self.only_argument(args, kwargs)
        spec = norm_of(self.module)
        if spec is None or not fits_norm(x, spec) or not _is_one_pass(x):
            return self.original(*args, **kwargs)
        dtype = x.dtype
        if spec.promote and spec.weight is not None:
            dtype = torch.promote_types(dtype, spec.weight.dtype)
        with without_modes():
            settings = spec.weight, spec.bias, spec.eps, spec.subtract_mean
            return apply("norm", RowNorm, x, *settings, dtype)


class FusedActivation(Fused):
    """An activation in one pass."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        x = self.only_argument(args, kwargs)
        kind = activation_of(self.module)
        if kind not in _KINDS or not _is_one_pass(x):
            return self.original(*args, **kwargs)
        with without_modes():
            return apply("gelu", Activation, x, kind)


def one_pass_class(spec: Spec | None) -> type[Fused] | None:
    """The class for a module that computes `spec`; None if it is to stay as it is."""
    if isinstance(spec, NormSpec) and not spec.subtract_mean:
        return FusedNorm
    return FusedActivation if spec in _KINDS else None


def _is_one_pass(x: Any) -> bool:
    """Whether a module runs as one function of x here; else as its own class does."""
    return (
        may_run_as_one(x)
        and x.dtype in checks.FLOATS
        and x.dim() > 0
        # In a region norms and powers are FP32; in torch.autocast as well, but not on a CPU.
        and current_region() is None
        and not is_for_onnx()
        and (x.is_cpu or not autocast.is_on(x.device.type))
    )
