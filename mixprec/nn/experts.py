"""Experts: the stacked weights of a mixture."""

from __future__ import annotations

import inspect
import sys
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from .._context import context
from ..functional._grouped_linear import mixture, run_grouped_linear
from ..ops._dispatch import checks
from ..recipes import Recipe
from ._content import content_of
from .conv import CONVOLUTIONS
from .intercepted import Intercepted, ProductMode, base_parameter

_MOE = "transformers.integrations.moe"
# The content of the forward pass that its use_experts_implementation gives to a class.
_DECORATED = "1d0d3ef1d63c6b65"
# torch's own modules with parameters of three dimensions that are no experts.
_OTHERS = (nn.Bilinear, parametrize.ParametrizationList)


class Experts(Intercepted):
    """The experts of a mixture: parameters [E, N, K], or [E, K, N], of a module whose forward pass
    is its own.

    Of classes that transformers' `use_experts_implementation` decorates, "grouped_mm" and
    "batched_mm" both run as one product for all experts, by the flags of the class: transposed,
    with biases, gates, a norm; the config chooses in each pass, as before. Its "eager", and all
    other modules, run their own forward pass with their products by the recipe, as `Intercepted`;
    another implementation that a program registers is not changed.
    """

    __module__ = "mixprec.nn"

    @property
    def _first_weight(self) -> torch.Tensor:
        return next(p for p in _own_parameters(self) if p.dim() == 3)

    def _run(self, recipe: Recipe, products: ProductMode, args: Any, kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get("hidden_states")
        dtypes = {self._first_weight.dtype, getattr(x, "dtype", None)}
        if dtypes <= {*checks.FLOATS} and is_decorated(type(self)) and _is_one_product(self):
            products.has_run = True
            return _grouped(self, products, *args, **kwargs)
        by_tensor = (
            getattr(its, f"{role}_granularity") == "tensor"
            for role in "xwg"
            for its in recipe.casts(role)
        )
        if context.over and recipe.is_scaled and any(by_tensor):
            raise ValueError(
                f"{self._path or 'experts'}: recipe must not scale whole tensors, of which each "
                f"rank has a part here, got {recipe.name}: set experts_implementation to "
                '"grouped_mm" or "batched_mm" for classes of transformers, or use another recipe'
            )
        return super()._run(recipe, products, args, kwargs)


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Those that are not of its children, and the originals of those that are parametrized."""
    lists: Any = module.parametrizations if parametrize.is_parametrized(module) else nn.ModuleDict()
    return [p for each in (module, *lists.values()) for p in each.parameters(recurse=False)]


def is_decorated(kind: Any) -> bool:
    """Whether transformers' use_experts_implementation made the forward pass of a class, with the
    implementations of transformers."""
    moe = sys.modules.get(_MOE)
    forward: Any = next((vars(k)["forward"] for k in kind.__mro__ if _own_forward(k)), None)
    if moe is None or not isinstance(forward, FunctionType):
        return False
    if content_of(forward).digest != _DECORATED:
        return False
    variables = inspect.getclosurevars(forward).nonlocals
    return variables["experts_interface"] is moe.ALL_EXPERTS_FUNCTIONS


def _own_forward(kind: type) -> bool:
    return "forward" in vars(kind) and not issubclass(kind, Intercepted)


def _is_one_product(experts: Any) -> bool:
    """Whether the implementation in use is one of the two that compute the same."""
    moe = sys.modules[_MOE]
    used = moe.ALL_EXPERTS_FUNCTIONS.get(experts.config._experts_implementation, None)
    return used in (moe.grouped_mm_experts_forward, moe.batched_mm_experts_forward)


def _grouped(
    experts: Any,
    products: ProductMode,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The sum over the chosen experts of weight * down(gate(up(x))), [T, H], with the arguments of
    the implementations of transformers."""

    def run(x: torch.Tensor, ends: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        def linear(x: torch.Tensor, name: str) -> torch.Tensor:
            weight = getattr(experts, name)
            if experts.is_transposed:
                weight = weight.transpose(1, 2)
            over = context.over.get(name)
            y = products.product(run_grouped_linear, x, base_parameter(weight), ends, over)
            assert y is not None, "its dtypes were checked"
            return y + getattr(experts, f"{name}_bias")[chosen] if experts.has_bias else y

        if experts.has_gate:
            y = experts._apply_gate(linear(x, "gate_up_proj"))
        else:
            y = experts.act_fn(linear(x, "up_proj"))
        y = linear(y, "down_proj")
        has_norm = getattr(experts, "has_post_expert_norm", False)
        return experts.post_expert_norm(y) if has_norm else y

    return mixture(hidden_states, top_k_index, top_k_weights, experts.num_experts, run)


def layer_for(module: nn.Module) -> type[Intercepted] | None:
    """Intercepted, if `module` derives from a layer of torch that multiplies with its weights, or
    Experts, if they are stacked, and no child of it has weights."""
    weights = [p for p in _own_parameters(module) if p.dim() >= 2]
    children = (c for name, c in module.named_children() if name != "parametrizations")
    if not weights or any(p.dim() >= 2 for child in children for p in child.parameters()):
        return None
    if not all(w.dtype.is_floating_point and w.dtype.itemsize > 1 for w in weights):
        return None
    if isinstance(module, (nn.Linear, *CONVOLUTIONS)):
        return Intercepted
    if is_decorated(type(module)):
        return Experts
    if isinstance(module, _OTHERS) or not all(w.dim() == 3 for w in weights):
        return None
    if parametrize.is_parametrized(module):  # whose products are with no parameter
        return None
    return Experts
