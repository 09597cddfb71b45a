"""convert: run a model's layers in low precision; unconvert: the inverse."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from .. import _said, scaling
from .._local_gradients import is_fully_sharded
from ..memory.compress_saved import Bits, check
from ..ops._dispatch import checks
from ..recipes import Recipe
from . import kinds
from ._layer import Layer
from ._replaced import Compressed, Wrapped, replace, replaced_of, unfuse, unwrap
from ._subclass import inject_parametrizations, original_class
from ._tensor_parallel import give_back, parallel_of, take_parallel
from .fuse import fuse as fuse_parts
from .invariant import Invariant, check_model

logger = logging.getLogger("mixprec")

ModuleFilter = Callable[[nn.Module, str], bool]


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
        layer_recipe: Recipe | None = recipe
        matching = [pattern for pattern in overrides if fnmatchcase(fqn, pattern)]
        if matching:
            layer_recipe = overrides[matching[-1]]
        options = {"recipe": layer_recipe} if takes_recipe and layer_recipe is not None else {}
        if keep(module, fqn, **options):
            passed.append(fqn)
            matched.update(matching)
            if layer_recipe is not None:
                chosen[fqn] = layer_recipe
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


_REGISTRIES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


@contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """Give the modules of `model` their classes, children and attributes back after an exception.

    The values of tensors are not copied."""
    before: list[tuple[nn.Module, type[nn.Module], dict[str, Any]]] = []
    for module in model.modules():
        state = dict(vars(module))
        state |= {name: state[name].copy() for name in _REGISTRIES}
        before.append((module, type(module), state))
    try:
        yield
    except BaseException:
        for module, kind, state in before:
            object.__setattr__(module, "__class__", kind)
            vars(module).clear()
            vars(module).update(state)
            if isinstance(module, Layer):
                (scaling.follow if module.recipe.is_delayed else scaling.forget)(module)
                scaling.check_loss_scaling(module, module.recipe)
        raise


def convert(
    model: nn.Module,
    recipe: Recipe | str | torch.dtype = "fp8",
    module_filter_fn: ModuleFilter | None = None,
    overrides: Mapping[str, Recipe | str | None] | None = None,
    *,
    saved: Bits | None = None,
    fuse: bool = False,
    invariant: bool = False,
) -> nn.Module:
    """Make linear layers, convolutions and attention in `model` those of mixprec.nn, in place;
    return the model.

    recipe: a name, such as "bf16", "fp8", "fp8-delayed", "fp8-rowwise", "fp8-block", another
    library's name that `Recipe.parse` accepts, torch.bfloat16 or torch.float16, or a Recipe.
    module_filter_fn(module, fqn) -> bool: convert only where it returns True; fqn is the module's
    path in the model ("" for the root). If
    it has a parameter `recipe`, it receives the layer's recipe. overrides: other recipes by path
    pattern, {"blocks.0.*": "bf16", "*.fc2": "fp8-rowwise"}, None to leave layers unchanged; the
    last matching pattern applies. Of a recipe with outliers, layers that are not linear get the
    rest, and linear ones need `mixprec.choose_outliers` before their first forward pass.
    saved: "int8", "int4" or a dict of patterns: every forward pass of the model runs inside
    `mixprec.compress_saved` with these bits; None removes that again, and leaves the layers as they
    save. fuse: run norm -> linear, linear -> activation -> linear and attention as one function
    each where the modules' classes say that they are that: torch's norms and activations, in
    nn.Sequential and wherever they stand, the norms and MLPs of Llama, Mistral, Qwen, Gemma, Phi
    and GPT-2 of transformers, classes given to `mixprec.nn.register_fusion`, and torch's
    scaled_dot_product_attention wherever it is called without a mask; and cast a tensor once that
    several layers of one module take, such as those of query, key and value. All else runs as it
    is. One INFO line lists what was fused, what not and why, and the classes that are not known.
    Names, parameters and state dicts stay the same; the roundings that change are those of
    `mixprec.functional.norm_linear`, `mlp` and `attention`. Hooks on a fused layer, or
    `autocast(enabled=False)`, make it run unfused.

    invariant: what the model computes for a token has the same bits in every batch, with and
    without padding, whole, in chunks or token by token with a cache, in sampling and in training,
    on a CPU (docs/same_bits.md). Parts run fused as with fuse=True; products,
    attention and activations that torch computes between the layers are ours. ValueError for
    recipes and layers that cannot be that (scales of whole tensors, delayed scales, convolutions,
    recurrent layers), and RuntimeError in the forward pass for functions that cannot, on GPUs, and
    where products are another library's; both with the name and the reason. The forward pass runs
    uncompiled.

    Modules keep their identity, as in `unconvert`, and so their parameters, which are never copied
    or cast, hooks, training mode and all other attributes; optimizers go on with the same
    parameters, tied weights stay tied, and models on the meta device stay there. A module that
    occurs at several places is filtered once, by its first path. Layers of mixprec.nn get the new
    recipe; if they already have it, nothing changes, scales included. `mixprec.unconvert` is the
    inverse.

    Convolutions are those of one, two and three dimensions, also transposed. Subclasses of
    nn.Linear and of convolutions are converted too and stay instances of their class; so are
    parametrized layers (weight norm, spectral norm), nn.MultiheadAttention (its projections), the
    Conv1D of transformers, and modules with stacked weights [E, N, K], the experts of a mixture. In
    a forward pass of their own, calls of linear, convolutions and grouped_mm of torch.nn.functional
    use the recipe, and so do matrix products with a parameter of the module. Recurrent layers stay
    torch's. The adapters of peft are left as they are, beside the layers that they adapt; layers of
    bitsandbytes in 4 bits stay, and the adapters on those are converted. torch's encoder layers
    that are converted as a whole no longer take their fast path, which reads weights; another
    parent that reads the weight of a layer instead of calling it, such as the Swin of torchvision,
    computes as before. Layers that transformers has split over ranks (tp_plan) are converted where
    they are, except by styles that are not known, for which ValueError names the layer. In FP8,
    convolutions that are not 1 x 1 save memory, not time: `mixprec.filters.worthwhile` leaves them
    out.

    One line reports the number of layers, the share of the model's weights that they hold, and what
    else has weights, with the reason why it was left. (For the share of its arithmetic, which
    depends on the input: mixprec.audit.) It goes to the logger "mixprec" at level INFO;
    where logging does not show that level, it is printed to stderr, once and on rank 0 only.
    `logging.getLogger("mixprec").setLevel("WARNING")` turns it off.

    Warns, with names and reasons, if more than 5% of the weights are of modules that cannot be
    converted, and, listing the kinds of modules in the model, if there is no layer to convert.
    TypeError if `model` is not a module, or fuse no bool; ValueError for an unknown recipe, a
    pattern that matches no layer to convert (listing their names), a layer whose forward was
    replaced or one with an attribute of its own under a name that a layer needs. After any
    exception the model is as it was.
    """
    checks.is_module("convert", model)
    for name, flag in (("fuse", fuse), ("invariant", invariant)):
        if not isinstance(flag, bool):
            raise TypeError(f"convert: {name} must be True or False, got {flag!r}")
    if saved is not None:
        check(saved, model)
    with unchanged_on_error(model):
        unwrap(model)
        unfuse(model)
        _convert(model, recipe, module_filter_fn, overrides)
        if invariant:
            check_model(model)
        if fuse or invariant:
            logger.info("convert: %s", fuse_parts(model))
        if invariant:
            replace(Invariant(model))
        if saved is not None:
            replace(Compressed(model, saved))
    return model


def _convert(
    model: nn.Module,
    recipe: Recipe | str | torch.dtype,
    module_filter_fn: ModuleFilter | None,
    overrides: Mapping[str, Recipe | str | None] | None,
) -> None:
    recipe = Recipe.parse(recipe)
    parsed = {p: None if r is None else Recipe.parse(r) for p, r in (overrides or {}).items()}
    added = kinds.adapters(model, of_4bit=False)
    layers = {
        fqn: module
        for fqn, module in model.named_modules()
        if module not in added and (isinstance(module, Layer) or kinds.layer_for(module))
    }
    if not layers:
        seen = Counter(type(m).__name__ for m in model.modules())
        listed = ", ".join(f"{count} {kind}" for kind, count in seen.most_common())
        warnings.warn(
            f"convert: there is no linear layer, convolution or attention to convert in: {listed}",
            stacklevel=3,
        )
    chosen = _choose(layers, recipe, module_filter_fn, parsed)
    chosen |= {
        fqn: layer_recipe.without_outliers
        for fqn, layer_recipe in chosen.items()
        if not kinds.takes_outliers(layers[fqn])
    }
    own = [fqn for fqn in chosen if "forward" in vars(layers[fqn])]
    taken = {fqn: take_parallel(layers[fqn], fqn) for fqn in own}
    for fqn in chosen:
        if is_fully_sharded(layers[fqn]) and not isinstance(layers[fqn], Layer):
            raise ValueError(
                f"convert: {fqn or 'the model'} must not be wrapped by fully_shard yet, whose "
                "class it would lose: convert before"
            )
        if isinstance(layers[fqn], Layer):
            if "forward" in vars(layers[fqn]) and parallel_of(layers[fqn]) is None:
                raise ValueError(
                    f"convert: {fqn or 'the model'} has its own forward, which would not use the "
                    "recipe: convert it before it is wrapped"
                )
            layers[fqn]._check_names(chosen[fqn])  # the others are checked when they are made
    already = sum(getattr(layers[fqn], "recipe", None) == new for fqn, new in chosen.items())
    for fqn, layer_recipe in chosen.items():
        module = layers[fqn]
        if isinstance(module, Layer):
            module.recipe, module._path = layer_recipe, fqn
        elif (kind := kinds.layer_for(module)) is not None:
            kind._of(module, layer_recipe, fqn)
        if (parallel := taken.get(fqn)) is not None:
            replace(parallel)
        if isinstance(module, Layer):
            module._is_override = layer_recipe not in (recipe, recipe.without_outliers)
    used = Counter(str(layer_recipe) for layer_recipe in chosen.values()) or {str(recipe): 0}
    names = "; ".join(name if len(used) == 1 else f"{name} ({n})" for name, n in used.items())
    note = f" ({already} had it already)" if already else ""
    kinds.leave_fast_paths(model)
    excluded = {m: "excluded" for fqn, m in layers.items() if fqn not in chosen}
    coverage = kinds.coverage(model, excluded)
    _said.say(f"convert: {len(chosen)} of {len(layers)} layers set to {names}{note}: {coverage}")
    if layers and coverage.is_low:
        warnings.warn(f"convert: {recipe.name} was asked for and reaches {coverage}", stacklevel=3)


def unconvert(model: nn.Module) -> nn.Module:
    """Make the layers of `model` those of torch again, or of the classes that `convert` found, in
    place; return the model.

    Modules keep their identity, and so their parameters, hooks, handles, names, training mode and
    all other attributes; optimizers go on with the same parameters. Recipes, the scales of delayed
    recipes and counters are dropped, so that the state dict is that of a model which was never
    converted; nothing is fused or runs inside `compress_saved` any more, and torch's encoder layers
    take their fast path again. Layers that were constructed as mixprec.nn's become torch's too. A
    model without such layers stays as it is. After delayed recipes wrap the model in
    DistributedDataParallel anew, which keeps a list of its buffers.

    What other functions changed stays: dtypes (`cast_parameters(model, torch.float32)` casts them
    back) and the weights that `freeze` stored in 8 or 4 bits. `mixprec.autocast(enabled=False)` has
    the effect for a region only.

    TypeError if `model` is not a module. ValueError, before anything is changed, for a layer whose
    forward was replaced, as by a wrapper that calls the one of `convert`, and for one whose class
    was derived from mixprec.nn's, as by a subclass or by fully_shard of the layer itself.
    """
    checks.is_module("unconvert", model)
    originals: dict[Layer, type[nn.Module]] = {}
    for fqn, module in model.named_modules():
        if not isinstance(module, Layer):
            continue
        where = fqn or "the model"
        is_own = parallel_of(module) is None and not isinstance(replaced_of(module), Wrapped)
        if "forward" in vars(module) and is_own:
            raise ValueError(
                f"unconvert: {where} has its own forward: remove what wraps it, then unconvert"
            )
        original = original_class(module)
        if original is None:
            raise ValueError(
                f"unconvert: {where} is a {type(module).__name__}, a class derived from a layer of "
                "mixprec.nn, and has no class to go back to; if fully_shard made it, unconvert "
                "before fully_shard"
            )
        originals[module] = original
    for module in model.modules():
        unwrap(module)
    unfuse(model)
    for module, original in originals.items():
        module._leave()
        module.__class__ = original  # type: ignore[assignment]
        inject_parametrizations(module)
        give_back(module)
    kinds.restore_fast_paths(model)
    logger.info("unconvert: %d layers", len(originals))
    return model


def convert_to_float8_training(
    model: nn.Module, *, module_filter_fn: ModuleFilter | None = None, config: Recipe | str = "fp8"
) -> nn.Module:
    """`convert` with the name and argument order of torchao.

    config: a recipe name, torchao's "tensorwise" and "rowwise" among them, or a Recipe, not a
    torchao config object: ValueError says what is valid.
    """
    return convert(model, config, module_filter_fn)
