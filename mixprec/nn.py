"""Modules that compute in low precision: torch.nn's own, with a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import _loss_scaling, _region, functional, operands, scaling
from .operands import Delayed, Operand
from .recipes import Recipe


class QuantizedWeight(NamedTuple):
    """What `mixprec.reuse_weights` leaves in a layer: its weight, cast when it was at `version`."""

    weight: torch.Tensor
    version: int
    operand: Operand


class Linear(torch.nn.Linear):
    """y = x @ weight^T + bias with the operands of all three GEMMs cast as `recipe` says.

    A torch.nn.Linear in everything else: parameters, initialisation, state_dict keys. Parameters
    may be fp32, bf16 or fp16 and are never changed. The output has the input's dtype; under
    torch.autocast, the autocast dtype. recipe: a name, such as "bf16", "fp8" or "fp8-delayed", or
    a Recipe; inside `mixprec.autocast`, that region's. name: what `mixprec.functional.observed`
    reports; `mixprec.convert` sets it to the module's path. See `mixprec.functional.linear` for
    the formulas and what is raised.

    With a delayed recipe there are buffers, fp32 whatever the parameters' dtype, with a row for
    each of x and g: amax_history [2, L], scale [2] (0: none yet) and, in no state dict, what was
    seen since their last change: amax [] of x, grad_amax [] of g. `mixprec.update_scales` says when
    that is. The weight is always scaled by its own amax. State dicts of nn.Linear load, and the
    scales start anew;
    `mixprec.scaling.plain_state_dict` makes one for nn.Linear.
    """

    name: str
    scale: torch.Tensor  # these three with a delayed recipe only
    amax: torch.Tensor
    grad_amax: torch.Tensor
    _recipe: Recipe
    _quantized_weight: QuantizedWeight | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | str = "fp8",
        name: str = "",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = Recipe.parse(recipe)
        self.name = name

    @property
    def recipe(self) -> Recipe:
        """How operands are cast. Setting another one drops the scales of the one before."""
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: Recipe | str) -> None:
        recipe = Recipe.parse(recipe)
        if getattr(self, "_recipe", None) != recipe:
            self._recipe = recipe
            scaling.reset(self, recipe)
            _loss_scaling.follow(self, recipe)

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, recipe: Recipe | str = "fp8", name: str = ""
    ) -> Linear:
        """A Linear that shares `linear`'s parameters, hooks and every other attribute.

        Handles of hooks that were registered on `linear` keep working. ValueError if `linear`
        carries a forward of its own (put there by a wrapper or by .compile()), which would be
        lost: convert first, then wrap or compile.
        """
        if not isinstance(linear, torch.nn.Linear):
            got = type(linear).__name__
            raise TypeError(f"from_linear: linear must be a torch.nn.Linear, got {got}")
        recipe = Recipe.parse(recipe)
        state: dict[str, Any] = dict(linear.__dict__)
        for attribute in ("forward", "_compiled_call_impl"):
            if state.get(attribute) is not None:
                raise ValueError(
                    f"from_linear: linear must be a plain torch.nn.Linear, but {name or 'it'} has "
                    f"its own {attribute}: convert it before it is wrapped or compiled"
                )
        # The registries are copied, so that a parameter added to one module does not appear in
        # the other; hook dictionaries stay shared, because their handles point into them.
        for registry in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            state[registry] = state[registry].copy()
        converted = cls.__new__(cls)
        converted.__dict__ = state
        converted.recipe = recipe
        converted.name = name
        return converted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        recipe = _region.recipe_here(self.recipe)
        if recipe is None:
            return super().forward(x)
        device = x.device.type
        out_dtype = None
        if device != "meta" and torch.is_autocast_enabled(device):  # it knows no meta device
            out_dtype = torch.get_autocast_dtype(device)
        own = recipe == self.recipe  # scales and cast weights belong to that one
        return functional.linear(
            *(x, self.weight, self.bias),
            recipe=recipe,
            out_dtype=out_dtype,
            name=self.name,
            delayed=self._delayed() if own else None,
            quantized_weight=self._reused() if own else None,
        )

    def _delayed(self) -> Delayed | None:
        if not self.recipe.is_delayed:
            return None
        return Delayed(self.scale, self.amax, self.grad_amax)

    def _reused(self) -> Operand | None:
        """The cast weight, unless another one stands in for it (torch.func.functional_call)."""
        reused = self._quantized_weight
        if reused is None or reused.weight is not self.weight:
            return None
        if not torch.compiler.is_compiling() and self.weight._version != reused.version:
            raise RuntimeError(
                f"reuse_weights: the weight of {self.name or 'a Linear'} was changed inside the "
                "block; end the block before the optimizer's step"
            )
        return reused.operand

    def quantize_weight(self) -> None:
        """Cast the weight now, for all forward passes until `_quantized_weight` is None again."""
        weight = self.weight
        if not self.recipe.is_fp8 and weight.dtype == self.recipe.w.dtype:
            return  # nothing to cast
        with torch.no_grad():
            operand = operands.cast(weight, "w", self.recipe, self._delayed(), use_t=True)
        self._quantized_weight = QuantizedWeight(weight, weight._version, operand)

    def reset_parameters(self) -> None:
        """Initialise the parameters as torch.nn.Linear does, and drop what scales there are."""
        super().reset_parameters()
        if scaling.has_state(self):
            scaling.reset(self, self.recipe)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Linear:
        before = {n: self._buffers[n] for n in scaling.BUFFERS} if scaling.has_state(self) else {}
        super()._apply(fn, recurse)
        scaling.keep_fp32(self, before)  # type: ignore[arg-type]
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        errors = args[-1]
        state_dict = scaling.loadable(self, state_dict, prefix, errors)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        scaling.after_load(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by copying and unpickling."""
        super().__setstate__({**state, "_quantized_weight": None})
        if self.recipe.is_delayed:
            scaling.follow(self)
        _loss_scaling.follow(self, self.recipe)

    def extra_repr(self) -> str:
        bias = "" if self.bias is not None else ", bias=False"
        return f"in={self.in_features}, out={self.out_features}{bias}, {self.recipe}"
