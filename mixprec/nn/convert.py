"""convert: run a model's layers in low precision; cast_parameters: cast its weights."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase

import torch
from torch import nn

from ..recipes import Recipe
from . import Conv2d, Layer, Linear

__all__ = ["ModuleFilter", "cast_parameters", "convert", "convert_to_float8_training"]

logger = logging.getLogger("mixprec")

ModuleFilter = Callable[[nn.Module, str], bool]

NORMS: tuple[type[nn.Module], ...] = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
# What convert replaces, and by what; our own layers only get another recipe.
_CONVERTIBLE: dict[type[nn.Module], Callable[..., nn.Module]] = {
    nn.Linear: Linear.from_linear,
    nn.Conv2d: Conv2d.from_conv,
    Linear: Linear.from_linear,
    Conv2d: Conv2d.from_conv,
}
_CASTABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _is_module(op: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{op}: model must be a torch.nn.Module, got {type(model).__name__}")


def _choose(
    layers: Mapping[str, nn.Module],
    recipe: Recipe,
    module_filter_fn: ModuleFilter | None,
    overrides: Mapping[str, Recipe | None],
) -> dict[str, Recipe]:
    """The recipe of each layer to convert, by name."""
    keep: Callable[..., bool] = module_filter_fn or (lambda module, fqn: True)
    takes_recipe = module_filter_fn is not None and "recipe" in _parameters(module_filter_fn)
    chosen, passed, matched = {}, [], set()
    for fqn, module in layers.items():
        own: Recipe | None = recipe
        matching = [pattern for pattern in overrides if fnmatchcase(fqn, pattern)]
        if matching:
            own = overrides[matching[-1]]
        options = {"recipe": own} if takes_recipe and own is not None else {}
        if keep(module, fqn, **options):
            passed.append(fqn)
            matched.update(matching)
            if own is not None:
                chosen[fqn] = own
    if unmatched := [pattern for pattern in overrides if pattern not in matched]:
        raise ValueError(
            f"convert: overrides must match layers that are to be converted, got {unmatched}; "
            f"there are: {', '.join(map(repr, passed)) or 'none'}"
        )
    return chosen


def _parameters(function: Callable[..., object]) -> Collection[str]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have none
        return ()


def convert(
    model: nn.Module,
    recipe: Recipe | str = "fp8",
    module_filter_fn: ModuleFilter | None = None,
    overrides: Mapping[str, Recipe | str | None] | None = None,
) -> nn.Module:
    """Replace every nn.Linear and nn.Conv2d in `model`, in place, by mixprec.nn's; return it.

    recipe: a name, such as "bf16", "fp8", "fp8-delayed", "fp8-rowwise", "fp8-block", another
    library's name that `Recipe.parse` accepts, or a Recipe. module_filter_fn(module, fqn) -> bool:
    convert only where it returns True; fqn is the module's path in the model ("" for the root). If
    it has a parameter `recipe`, it receives the layer's recipe. overrides: other recipes by path
    pattern, {"blocks.0.*": "bf16", "*.fc2": "fp8-rowwise"}, None to leave layers unchanged; the
    last matching pattern applies. If the model itself is such a layer, its replacement is returned.

    Parameters are shared, never copied or cast: optimizers that hold them keep working, tied
    weights stay tied, and models on the meta device stay there. Hooks, training mode and other
    attributes are kept. A module that occurs at several places is filtered once, by its first path,
    and stays one module. Layers of mixprec.nn get the new recipe; if they already have it, nothing
    changes, scales included. Subclasses of nn.Linear and nn.Conv2d are left unchanged: they may
    compute something else (the output projection of
    nn.MultiheadAttention is one, and is never called as a module). Where a module reads its
    linears' weights instead of calling them, as nn.TransformerEncoderLayer does in eval mode
    without gradients, it computes as before. One INFO line on the logger "mixprec" reports how many
    layers were converted, and to what. In FP8, convolutions that are not 1 x 1 save memory, not
    time: `mixprec.filters.worthwhile` leaves them out.

    Warns, listing the kinds of modules in the model, if there is no layer to convert. TypeError if
    `model` is not a module; ValueError for an unknown recipe, a pattern that matches no layer to
    convert (listing their names) or a layer whose forward was replaced, before anything is changed.
    """
    _is_module("convert", model)
    recipe = Recipe.parse(recipe)
    parsed = {p: None if r is None else Recipe.parse(r) for p, r in (overrides or {}).items()}
    layers = {fqn: module for fqn, module in model.named_modules() if type(module) in _CONVERTIBLE}
    if not layers:
        seen = Counter(type(m).__name__ for m in model.modules())
        listed = ", ".join(f"{count} {kind}" for kind, count in seen.most_common())
        warnings.warn(
            f"convert: there is no nn.Linear or nn.Conv2d to convert in: {listed}", stacklevel=2
        )
    chosen = _choose(layers, recipe, module_filter_fn, parsed)
    already = sum(getattr(layers[fqn], "recipe", None) == own for fqn, own in chosen.items())
    replacement: dict[nn.Module, nn.Module] = {
        layers[fqn]: _CONVERTIBLE[type(layers[fqn])](layers[fqn], own, name=fqn)
        for fqn, own in chosen.items()
        if not isinstance(layers[fqn], Layer)
    }
    for fqn, own in chosen.items():
        module = layers[fqn]
        if isinstance(module, Layer):
            module.recipe, module.name = own, fqn
    for parent in list(model.modules()):
        # _modules, not named_children(): that one leaves out a child's second name.
        for child_name, child in list(parent._modules.items()):
            if child in replacement:
                setattr(parent, child_name, replacement[child])
    used = Counter(str(own) for own in chosen.values()) or {str(recipe): 0}
    names = "; ".join(own if len(used) == 1 else f"{own} ({count})" for own, count in used.items())
    note = f" ({already} had it already)" if already else ""
    logger.info("convert: %d of %d layers set to %s%s", len(chosen), len(layers), names, note)
    return replacement.get(model, model)


def convert_to_float8_training(
    model: nn.Module,
    *,
    module_filter_fn: ModuleFilter | None = None,
    config: Recipe | str = "fp8",
) -> nn.Module:
    """`convert` with the name and argument order of torchao.

    config: a recipe name, torchao's "tensorwise" and "rowwise" among them, or a Recipe, not a
    torchao config object: ValueError says what is valid.
    """
    return convert(model, config, module_filter_fn)


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the floating-point parameters of `model` to `dtype`, in place; return the model.

    dtype: bf16, fp16 or fp32. The parameters of normalization layers (`mixprec.convert.NORMS` and
    their subclasses) become or stay FP32: they are few, and their updates are small next to their
    values. Buffers are left as they are, so running statistics keep their precision. Parameters
    keep their identity: optimizers, ties and requires_grad are unaffected; existing gradients are
    cast too. ValueError for another dtype, TypeError if `model` is not a module.

    A norm with FP32 parameters takes 16-bit input and returns 16-bit output on the CPU (torch
    computes in FP32 inside). On CUDA, torch's layer_norm raises RuntimeError for this combination:
    run the model under torch.autocast there. Custom norm classes are cast too, unless they derive
    from one in NORMS.
    """
    _is_module("cast_parameters", model)
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"cast_parameters: dtype must be bfloat16, float16 or float32, got {dtype}"
        )
    of_norms = {
        param
        for module in model.modules()
        if isinstance(module, NORMS)
        for param in module.parameters(recurse=False)
    }
    for param in model.parameters():
        target = torch.float32 if param in of_norms else dtype
        if param.dtype == target or param.dtype not in _CASTABLE:
            continue
        grad, param.grad = param.grad, None  # a gradient of another dtype cannot be attached
        param.data = param.data.to(target)
        if grad is not None:
            param.grad = grad.to(target)
    return model
