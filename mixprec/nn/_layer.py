"""Base of the layers: a recipe, delayed scales, a weight that is cast once for several passes."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn.utils.parametrize import is_parametrized

from .. import scaling
from .._local_gradients import local
from ..functional._arguments import watch_main_grad
from ..functional.operands import Delayed, Operand
from ..ops._dispatch.checks import NOT_TRACED
from ..recipes import Recipe
from ._subclass import class_for, inject_parametrizations, names_of
from .autocast import recipe_here

CLIPPED = "clipped"  # the buffer, int64 []
OUTLIERS = "outliers"  # the buffer [K], 1 for outliers and 0 for other features
Self = TypeVar("Self", bound="Layer")


class QuantizedWeight(NamedTuple):
    """The cast weight that `mixprec.reuse_weights` stores in a layer, of this state of it."""

    weight: torch.Tensor
    version: int
    address: int
    operand: Operand
    outliers: torch.Tensor | None
    outliers_version: int


class LayerState(NamedTuple):
    out_dtype: torch.dtype
    delayed: Delayed | None
    quantized_weight: Operand | None
    clipped: torch.Tensor | None


def buffers_of(recipe: Recipe | None) -> set[str]:
    """The names of the buffers that a layer with this recipe has beside those of its module."""
    if recipe is None:
        return set()
    names = {*scaling.BUFFERS} if recipe.is_delayed else set()
    names |= {OUTLIERS} if recipe.has_outliers else set()
    return names | {CLIPPED} if recipe.clip_activations else names


def _version(t: torch.Tensor | None) -> int:
    return 0 if t is None or t.is_inference() else t._version


def _written(weight: torch.Tensor) -> tuple[int, int]:
    """What changes when a weight is written: the sum of versions, also of the part of a DTensor,
    which optimizers write directly, and the address."""
    part = local(weight)
    return weight._version + part._version, part.data_ptr()


class _Name:
    """The path that convert gave to a layer, unless its class sets a `name` of its own."""

    def __get__(self, layer: Layer | None, owner: type) -> str:
        if layer is None:
            return ""
        registries = (layer._parameters, layer._buffers, layer._modules)
        return next((kept["name"] for kept in registries if "name" in kept), layer._path)  # type: ignore[return-value]


class Layer(torch.nn.Module):
    """What Linear and Conv2d share. Inherit from it before torch's module.

    A delayed recipe adds buffers, fp32 for parameters of any dtype, with an entry each for x and g:
    amax_history [2, L], scale [2] (0: not initialized) and the amax since the last update: amax []
    of x, grad_amax [] of g. The weight is always scaled by its own amax.
    clip_activations adds, not in state dicts, clipped (int64 []): the number of outputs saturated.
    A recipe with outliers adds outliers [K], 1 for these of the K input features and 0 for others,
    None until `mixprec.choose_outliers` or a state dict has set it.
    """

    _is_transposed = False  # its weight is [K, N]
    _reads_no_weight = True  # a parent that reads it would compute without the recipe
    _takes_outliers = False
    _outlier_count = 0  # torch.compile would make sizes of the recipe's float unknown
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
    _gathers: Any = None  # of gather_in_fp8, which its weight belongs to

    @property
    def __jit_ignored_attributes__(self) -> list[str]:
        """What torch.jit.script and torch.jit.trace read first."""
        if recipe_here(self._recipe) is None:
            return []
        raise RuntimeError(f"torch.jit: {type(self).__name__} is a layer of mixprec, {NOT_TRACED}")

    @property
    def _label(self) -> str:
        """The path, for audit. In compiled code "": the code of a block is that of all like it."""
        return "" if torch.compiler.is_compiling() else self._path

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
        scaling.check_loss_scaling(self, recipe)
        if recipe.has_outliers:
            self.register_buffer(OUTLIERS, None)
            self._outlier_count = recipe.outlier_count(self._features())
        if recipe.clip_activations:
            count = torch.zeros((), dtype=torch.int64, device=self._first_weight.device)
            self.register_buffer(CLIPPED, count, persistent=False)

    @property
    def _first_weight(self) -> torch.Tensor:
        """Any of those that are cast. (A module with several may have another `weight`.)"""
        return self.weight

    def _check_names(self, recipe: Recipe) -> None:
        """ValueError for outliers of a layer that cannot have them, and if a buffer of `recipe`
        would replace an attribute of the user's own class."""
        if recipe.has_outliers and not self._takes_outliers:
            raise ValueError(
                f"{type(self).__name__}: recipe must have no outliers, which only linear layers "
                f"have, got {recipe.name}"
            )
        added = buffers_of(recipe) - buffers_of(vars(self).get("_recipe"))
        if taken := sorted(name for name in added if hasattr(self, name)):
            raise ValueError(
                f"convert: {self._path or type(self).__name__} has an attribute {taken[0]!r} of "
                f"its own, and recipe {recipe.name} needs that name: give it another in overrides"
            )

    def _drop_state(self) -> None:
        """Remove the recipe, if there is one, and its buffers."""
        for registry in ("_buffers", "_non_persistent_buffers_set"):  # a copy.copy shares them
            vars(self)[registry] = vars(self)[registry].copy()
        for name in buffers_of(vars(self).pop("_recipe", None)):
            self._buffers.pop(name, None)
            self._non_persistent_buffers_set.discard(name)
        scaling.forget(self)
        scaling.check_loss_scaling(self, None)

    def _leave(self) -> None:
        """Remove all that torch's module does not have, before `unconvert` makes it one."""
        self._drop_state()
        for name in ("_path", "_is_override", "_quantized_weight", "_warned", "_outlier_count"):
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
        bias = self._parameters.get("bias")
        if "parametrizations" in self._modules or getattr(bias, "main_grad", None) is not None:
            self._watch_main_grads()
        kind, out_dtype = device.type, dtype
        if kind != "meta" and torch.is_autocast_enabled(kind):
            out_dtype = torch.get_autocast_dtype(kind)
        if recipe is not self._recipe and recipe != self._recipe:
            return LayerState(out_dtype, None, None, None)  # that state belongs to its own recipe
        clipped = self._buffers.get(CLIPPED) if recipe.clip_activations else None
        delayed = self._delayed() if recipe.is_delayed else None
        reused = None if self._quantized_weight is None else self._reused()
        return LayerState(out_dtype, delayed, reused, clipped)

    def _watch_main_grads(self) -> None:
        """See to it that gradients of the parameters that arrive elsewhere are added to main_grad:
        those of torch's products, and of what the module computes of its weights."""
        if not torch.compiler.is_compiling():
            for param in self.parameters():
                watch_main_grad(param)

    def _delayed(self) -> Delayed | None:
        if not self._recipe.is_delayed:
            return None
        state = Delayed(*map(self._buffers.get, ("scale", "amax", "grad_amax")))  # type: ignore[arg-type]
        if scaling.runs_on_no_data():
            return Delayed(*(t.clone() for t in state))
        return state

    def _outliers(self) -> torch.Tensor | None:
        """Their indices, int64 [k], where the recipe has outliers."""
        if not self._recipe.has_outliers:
            return None
        chosen, size = self._buffers[OUTLIERS], self._features()
        if chosen is None:
            raise RuntimeError(
                f"{self._path or type(self).__name__}: recipe {self._recipe.name} has outliers, "
                "which are not chosen yet: call mixprec.choose_outliers(model, batches) after "
                "convert, or load a state dict that has them"
            )
        if chosen.shape != (size,):
            raise RuntimeError(
                f"{self._path or type(self).__name__}: the buffer outliers must have a number for "
                f"each of the {size} input features, got shape {tuple(chosen.shape)}"
            )
        # The largest, so that they are different ones also where buffers were averaged.
        return chosen.topk(self._outlier_count).indices.sort().values

    def _choose(self, outliers: torch.Tensor) -> None:
        """Set the indices of the outliers."""
        with torch.inference_mode(False), torch.no_grad():
            chosen = torch.zeros(self._features(), device=self.weight.device)
            chosen.index_fill_(0, outliers.clone(), 1.0)
            buffer = self._buffers[OUTLIERS]
            if buffer is None or buffer.is_inference() or buffer.shape != chosen.shape:
                self._buffers[OUTLIERS] = chosen
            else:
                buffer.copy_(chosen)  # the object that DDP broadcasts

    def _reused(self) -> Operand | None:
        """The cast weight, unless torch.func.functional_call replaced the weight."""
        reused = self._quantized_weight
        if reused is None or reused.weight is not self.weight:
            return None
        weight, version, address, operand, outliers, outliers_version = reused
        eager = not torch.compiler.is_compiling()
        chosen = self._chosen_outliers()
        if chosen is not outliers or (eager and _version(chosen) != outliers_version):
            return None  # cast for others
        if eager and _written(weight) != (version, address):
            raise RuntimeError(
                f"reuse_weights: the weight of {self._path or 'a ' + type(self).__name__} was "
                "changed inside the block; end the block before the optimizer's step"
            )
        return operand

    def _quantize_weight(self, amax: torch.Tensor | None = None) -> None:
        """Cast the weight now, for all forward passes until `_quantized_weight` is None again.
        amax: of a weight that is sharded over ranks, that of all parts."""
        weight = self.weight
        if not self.recipe.is_scaled and weight.dtype == self.recipe.w.dtype:
            return  # nothing to cast
        with torch.no_grad():
            state = *_written(weight), self._cast_weight(amax)
            chosen = self._chosen_outliers()
            self._quantized_weight = QuantizedWeight(weight, *state, chosen, _version(chosen))

    def _chosen_outliers(self) -> torch.Tensor | None:
        return self._buffers.get(OUTLIERS) if self._recipe.has_outliers else None

    def _cast_weight(self, amax: torch.Tensor | None = None) -> Operand:
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Initialize the parameters as torch's module does, and reset the scales."""
        super().reset_parameters()  # type: ignore[misc]
        if scaling.has_state(self):
            scaling.reset(self, self.recipe)

    def _apply(self: Self, fn: Any, recurse: bool = True) -> Self:
        before = {n: self._buffers[n] for n in scaling.BUFFERS} if scaling.has_state(self) else {}
        count, chosen = self._buffers.get(CLIPPED), self._buffers.get(OUTLIERS)
        super()._apply(fn, recurse)
        scaling.keep_fp32(self, before)  # type: ignore[arg-type]
        moved = self._buffers.get(CLIPPED)
        if count is not None and moved is not None and count.is_meta and not moved.is_meta:
            moved.zero_()  # to_empty() leaves memory uninitialized
        new = self._buffers.get(OUTLIERS)
        if self._recipe.has_outliers and chosen is not None and new is not None:
            unset = chosen.is_meta and not new.is_meta
            self._buffers[OUTLIERS] = None if unset else chosen.to(new)
        if self._gathers is not None:
            self._gathers.mark(self)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        errors = args[-1]
        state_dict = scaling.loadable(self, state_dict, prefix, errors)
        self._load_outliers(state_dict, prefix + OUTLIERS, errors)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if self._gathers is not None:
            self._gathers.mark(self)

    def _load_outliers(self, state_dict: dict[str, Any], key: str, errors: list[str]) -> None:
        """Prepare to load the outliers of a state dict; without any there, or for another recipe,
        they stay as they are."""
        buffer, loaded = self._buffers.get(OUTLIERS), state_dict.get(key)
        if not self._recipe.has_outliers:
            if not hasattr(self, OUTLIERS):
                state_dict.pop(key, None)
        elif key not in state_dict:
            state_dict |= {} if buffer is None else {key: buffer}
        elif not isinstance(loaded, torch.Tensor) or loaded.shape != (self._features(),):
            got = tuple(loaded.shape) if isinstance(loaded, torch.Tensor) else type(loaded).__name__
            errors.append(f"{key} must have shape ({self._features()},), got {got}")
            state_dict.pop(key)
            state_dict |= {} if buffer is None else {key: buffer}
        elif buffer is None:
            device = loaded.device if self.weight.is_meta else self.weight.device
            with torch.inference_mode(False):
                self._buffers[OUTLIERS] = torch.zeros(loaded.shape, device=device)

    def _features(self) -> int:
        return self.weight.shape[0 if self._is_transposed else 1]

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
        super().__setstate__({**state, "_quantized_weight": None, "_gathers": None})
        if self.recipe.is_delayed:
            scaling.follow(self)
        scaling.check_loss_scaling(self, self.recipe)
