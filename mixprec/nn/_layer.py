"""Base of the layers: a recipe, delayed scales, a weight that is cast once for several passes."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn.utils.parametrize import is_parametrized

from .. import scaling
from ..functional.operands import Delayed, Operand
from ..ops._dispatch import autocast
from ..recipes import Recipe
from . import _loss_scaling
from ._subclass import class_for, inject_parametrizations, names_of

CLIPPED = "clipped"  # the buffer, int64 []
Self = TypeVar("Self", bound="Layer")


class QuantizedWeight(NamedTuple):
    """The cast weight that `mixprec.reuse_weights` stores in a layer, of this state of it."""

    weight: torch.Tensor
    version: int
    address: int
    operand: Operand


class LayerState(NamedTuple):
    out_dtype: torch.dtype
    delayed: Delayed | None
    quantized_weight: Operand | None
    clipped: torch.Tensor | None


def _buffers_of(recipe: Recipe | None) -> set[str]:
    """The names of the buffers that a layer with this recipe has beside those of its module."""
    if recipe is None:
        return set()
    names = {*scaling.BUFFERS} if recipe.is_delayed else set()
    return names | {CLIPPED} if recipe.clip_activations else names


class _Name:
    """The path that convert gave to a layer, unless its class sets a `name` of its own."""

    def __get__(self, layer: Layer | None, owner: type) -> str:
        return "" if layer is None else layer._path


class Layer(torch.nn.Module):
    """What Linear and Conv2d share. Inherit from it before torch's module.

    A delayed recipe adds buffers, fp32 for parameters of any dtype, with an entry each for x and g:
    amax_history [2, L], scale [2] (0: not initialized) and the amax since the last update: amax []
    of x, grad_amax [] of g. The weight is always scaled by its own amax.
    clip_activations adds, not in state dicts, clipped (int64 []): the number of outputs saturated.
    """

    _is_transposed = False  # its weight is [K, N]
    _one_product = True  # y is one product of x and `weight`, which casts once or is repeated
    name = _Name()
    weight: torch.Tensor
    scale: torch.Tensor  # these three for a delayed recipe only
    amax: torch.Tensor
    grad_amax: torch.Tensor
    _recipe: Recipe
    _path = ""
    _is_override = False  # convert has its recipe from overrides
    _quantized_weight: QuantizedWeight | None = None

    @property
    def recipe(self) -> Recipe:
        """How operands are cast. Setting another recipe drops the state of the previous one."""
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: Recipe | str) -> None:
        recipe = Recipe.parse(recipe)
        if vars(self).get("_recipe") == recipe:
            return
        self._check_names(recipe)
        self._drop_state()
        self._recipe = recipe
        if recipe.is_delayed:
            scaling.reset(self, recipe)
        _loss_scaling.follow(self, recipe)
        if recipe.clip_activations:
            count = torch.zeros((), dtype=torch.int64, device=self.weight.device)
            self.register_buffer(CLIPPED, count, persistent=False)

    def _check_names(self, recipe: Recipe) -> None:
        """ValueError if a buffer of `recipe` would replace an attribute of the user's own class."""
        added = _buffers_of(recipe) - _buffers_of(vars(self).get("_recipe"))
        if taken := sorted(name for name in added if hasattr(self, name)):
            raise ValueError(
                f"convert: {self._path or type(self).__name__} has an attribute {taken[0]!r} of "
                f"its own, and recipe {recipe.name} needs that name: give it another in overrides"
            )

    def _drop_state(self) -> None:
        """Remove the recipe, if there is one, and its buffers."""
        for registry in ("_buffers", "_non_persistent_buffers_set"):  # a copy.copy shares them
            vars(self)[registry] = vars(self)[registry].copy()
        for name in _buffers_of(vars(self).pop("_recipe", None)):
            self._buffers.pop(name, None)
            self._non_persistent_buffers_set.discard(name)
        scaling.forget(self)
        _loss_scaling.follow(self, None)

    def _leave(self) -> None:
        """Remove all that torch's module does not have, before `unconvert` makes it one."""
        self._drop_state()
        for name in ("_path", "_is_override", "_quantized_weight", "_warned"):
            vars(self).pop(name, None)

    @classmethod
    def _of(cls: type[Self], module: torch.nn.Module, recipe: Recipe, name: str) -> Self:
        """`module`, made a layer of this class with the same parameters, hooks and attributes."""
        for attribute in ("forward", "_compiled_call_impl"):
            if vars(module).get(attribute) is not None:
                raise ValueError(
                    f"convert: {name or 'the model'} has its own {attribute}: convert it before it "
                    "is wrapped or compiled"
                )
        kind = class_for(cls, module)
        if taken := sorted(names_of(cls) & {*dir(module)}):
            raise ValueError(
                f"convert: {name or 'the model'} has an attribute {taken[0]!r} of its own, which a "
                "layer of mixprec.nn needs: leave it out by overrides"
            )
        module.__class__ = kind
        layer: Self = module  # type: ignore[assignment]
        inject_parametrizations(layer)
        layer._path = name
        layer.recipe = recipe
        return layer

    def _state(self, dtype: torch.dtype, device: torch.device, recipe: Recipe) -> LayerState:
        """The output dtype and state for a forward pass with `recipe`, of an input of this dtype
        and device."""
        kind, out_dtype = device.type, dtype
        if autocast.is_on(kind):
            out_dtype = torch.get_autocast_dtype(kind)
        if recipe is not self._recipe and recipe != self._recipe:
            return LayerState(out_dtype, None, None, None)  # that state belongs to its own recipe
        clipped = self._buffers.get(CLIPPED)
        return LayerState(out_dtype, self._delayed(), self._reused(), clipped)

    def _delayed(self) -> Delayed | None:
        if not self._recipe.is_delayed:
            return None
        return Delayed(self.scale, self.amax, self.grad_amax)

    def _reused(self) -> Operand | None:
        """The cast weight, unless torch.func.functional_call replaced the weight."""
        reused = self._quantized_weight
        if reused is None or reused.weight is not self.weight:
            return None
        weight, version, address, operand = reused
        eager = not torch.compiler.is_compiling()
        if eager and (weight._version, weight.data_ptr()) != (version, address):
            raise RuntimeError(
                f"reuse_weights: the weight of {self._path or 'a ' + type(self).__name__} was "
                "changed inside the block; end the block before the optimizer's step"
            )
        return operand

    def _quantize_weight(self) -> None:
        """Cast the weight now, for all forward passes until `_quantized_weight` is None again."""
        weight = self.weight
        if not self.recipe.is_scaled and weight.dtype == self.recipe.w.dtype:
            return  # nothing to cast
        with torch.no_grad():
            state = weight._version, weight.data_ptr()
            self._quantized_weight = QuantizedWeight(weight, *state, self._cast_weight())

    def _cast_weight(self) -> Operand:
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Initialize the parameters as torch's module does, and reset the scales."""
        super().reset_parameters()  # type: ignore[misc]
        if scaling.has_state(self):
            scaling.reset(self, self.recipe)

    def _apply(self: Self, fn: Any, recurse: bool = True) -> Self:
        before = {n: self._buffers[n] for n in scaling.BUFFERS} if scaling.has_state(self) else {}
        count = self._buffers.get(CLIPPED)
        super()._apply(fn, recurse)
        scaling.keep_fp32(self, before)  # type: ignore[arg-type]
        moved = self._buffers.get(CLIPPED)
        if count is not None and moved is not None and count.is_meta and not moved.is_meta:
            moved.zero_()  # to_empty() leaves memory uninitialized
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        errors = args[-1]
        state_dict = scaling.loadable(self, state_dict, prefix, errors)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        """With __setstate__, which the __deepcopy__ of parametrized classes leaves out."""
        if hasattr(super(), "__deepcopy__"):
            copied: Self = super().__deepcopy__(memo)  # type: ignore[misc]
            copied.__setstate__({})
            return copied
        reduced: Any = type(self).__new__, (type(self),), self.__dict__
        if not is_parametrized(self):  # whose class refuses it
            reduced = self.__reduce_ex__(4)
        make, of, state = reduced[:3]
        copied = memo[id(self)] = make(*of)
        copied.__setstate__(copy.deepcopy(state, memo))
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by copying and unpickling."""
        super().__setstate__({**state, "_quantized_weight": None})
        if self.recipe.is_delayed:
            scaling.follow(self)
        _loss_scaling.follow(self, self.recipe)
