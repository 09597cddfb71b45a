"""Delayed scaling: buffers with the scales of each layer, and their update after a step.

And a check that recipes which need loss scaling are trained with it."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch._compile import _disable_dynamo

from ._local_gradients import local
from ._steps import after_steps, before_steps
from .ops._dispatch.checks import MAX_SCALE, MIN_SCALE, is_group, is_module
from .ops.delayed_scales import UNUSED, update_delayed_scales_
from .recipes import DELAYED_ROLES, Recipe

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["BUFFERS", "after_step", "follow", "forget", "has_state", "keep_fp32", "loadable"]
__all__ += ["plain_state_dict", "reset", "runs_on_no_data", "set_automatic_updates"]
__all__ += ["updates_automatically"]
__all__ += ["update_scales"]

# Buffers of a layer with a delayed recipe, with an entry for each of x and g: the amax of earlier
# steps, newest first [2, L], and the scale for the next cast [2], 0 where there is none yet.
# Weights use current scaling. Their amax costs one read; and where they start at zero, as output
# projections often do, an optimizer like Adam doubles them in each of the first steps: with the
# scale of the previous step most of their elements saturated, which raised the loss of a small GPT
# by 1 to 4 %.
# And the largest amax of x [] and of g [] since the last update. They are saved because there
# is no update after a step that torch's GradScaler skips. They are two buffers because a compiled
# backward pass writes back a whole buffer as it was at the end of its own forward pass.
BUFFERS = ("amax_history", "scale", "amax", "grad_amax")

_layers: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # layers with delayed scales
_automatic = True
_WAYS = ("forward", "backward")
_agreed: weakref.WeakKeyDictionary[torch.nn.Module, object] = weakref.WeakKeyDictionary()


def has_state(layer: torch.nn.Module) -> bool:
    return layer in _layers and layer._buffers.get("amax") is not None


def _fresh(recipe: Recipe, device: torch.device) -> dict[str, torch.Tensor]:
    """The buffers before the first step."""
    assert recipe.history is not None, "a delayed recipe has one"
    shapes = {"amax_history": (len(DELAYED_ROLES), recipe.history), "scale": (len(DELAYED_ROLES),)}
    state = {name: torch.zeros(s, device=device, dtype=torch.float32) for name, s in shapes.items()}
    unused = torch.full((), UNUSED, device=device, dtype=torch.float32)
    return {**state, "amax": unused, "grad_amax": unused.clone()}


def _amaxes(layer: torch.nn.Module) -> list[torch.Tensor]:
    return [local(layer.amax), local(layer.grad_amax)]  # type: ignore[arg-type]


def reset(layer: torch.nn.Module, recipe: Recipe) -> None:
    """Give `layer` the initial buffers of a delayed recipe."""
    state = _fresh(recipe, layer._first_weight.device)  # type: ignore[arg-type]
    for name in BUFFERS:
        layer.register_buffer(name, state[name])
    follow(layer)


def follow(layer: torch.nn.Module) -> None:
    """Include a layer with delayed scales in the automatic updates."""
    _layers.add(layer)
    after_steps(after_step)


def forget(layer: torch.nn.Module) -> None:
    """Leave a layer, which no longer has delayed scales, out of the automatic updates."""
    _layers.discard(layer)


def runs_on_no_data() -> bool:
    """Whether this is the pass with which a PipelineStage of torch finds out, in its first step,
    what shapes its stage returns: on memory that nothing has been written to, in grad mode, and
    backward, where a checkpoint runs the forward pass again."""
    if torch.compiler.is_compiling():
        return False
    stage: Any = sys.modules.get("torch.distributed.pipelining.stage")
    kind = getattr(stage, "PipelineStage", None)
    # Older ones: without grad mode.
    infers: Any = (getattr(kind, f"_{way}_metadata_inference", None) for way in _WAYS)
    codes = {infer.__code__ for infer in infers if infer is not None}
    if not codes:
        return False
    in_backward = torch._C._current_graph_task_id() != -1  # on a GPU: on another thread
    frames: Any = sys._current_frames().values() if in_backward else [sys._getframe()]
    for frame in frames:
        while frame is not None:
            if frame.f_code in codes:
                return True
            frame = frame.f_back
    return False


def updates_automatically() -> bool:
    """What `set_automatic_updates` was last told."""
    return _automatic


def set_automatic_updates(enabled: bool) -> None:
    """Set whether scales are updated after each optimizer step; if not, call `update_scales`."""
    global _automatic
    _automatic = enabled


def after_step(*_: object) -> None:
    """Update the scales of all layers in this process that were used since their last update."""
    if not _automatic or torch.compiler.is_compiling():
        return
    # No FakeTensors: a model that was only traced has no values, and would take the others with it.
    layers = [m for m in _layers if has_state(m) and type(_amaxes(m)[0]) is torch.Tensor]
    try:
        _update(layers)
    except (TypeError, ValueError):  # a leftover of another model must not end this one's training
        for layer in layers:
            try:
                _update([layer])
            except (TypeError, ValueError) as error:
                _layers.discard(layer)
                warnings.warn(
                    f"the scales of {getattr(layer, 'name', '') or 'a layer'} cannot be updated "
                    f"and stay as they are: {error}",
                    stacklevel=3,
                )


@_disable_dynamo
def update_scales(model: torch.nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
    """End a step of delayed scaling: record the amax of each tensor, and compute the next scales.

        scale = fmt.max / max(amax of the last L steps) * 2^-margin     (`ops.delayed_scales`)

    It is called automatically after each step of any torch optimizer, for all delayed layers in the
    process, unless `mixprec.scaling.set_automatic_updates(False)` was called; a second update
    without a forward pass in between does nothing. Call it yourself, before the optimizer's step,
    to pass a process_group: ranks that share the model but see different data, and will then share
    the scales. Every rank must call it. This takes one all-reduce (MAX) of 2 numbers per tensor:
    the amax, and whether it was Inf or NaN. The first call also compares the recipes. (With several
    micro-batches per step, DDP must not broadcast buffers, which would overwrite the amax of other
    ranks: use DistributedDataParallel(..., broadcast_buffers=False).)

    A tensor that was not cast in the step keeps its history, and so does one whose amax was Inf or
    NaN. In the first step there is no scale to share yet, and each rank uses its own amax. Forward
    passes without grad mode use the scales and record nothing. Raises TypeError if `model` is not a
    module or process_group is not a group, ValueError if ranks have different recipes or layers.
    """
    is_module("update_scales", model)
    named = {name: m for name, m in model.named_modules() if has_state(m)}
    if process_group is not None:
        is_group("update_scales", process_group)
        _agree(model, named, process_group)
        _share([amax for layer in named.values() for amax in _amaxes(layer)], process_group)
    _update(named.values())


@torch.no_grad()
def _update(layers: Iterable[torch.nn.Module]) -> None:
    """Call the op once per recipe and device: most models have one of each."""
    alike: dict[tuple[Any, torch.device], list[torch.nn.Module]] = {}
    # Once where copies share their buffers, as those of copy.copy and of nn.DataParallel do.
    for layer in {id(layer.amax): layer for layer in layers}.values():
        alike.setdefault((layer.recipe, layer.amax.device), []).append(layer)  # type: ignore[arg-type]
    for (recipe, _), group in alike.items():
        update_delayed_scales_(
            [history for layer in group for history in local(layer.amax_history).unbind()],  # type: ignore[arg-type]
            [scale for layer in group for scale in local(layer.scale).unbind()],  # type: ignore[arg-type]
            [amax for layer in group for amax in _amaxes(layer)],
            [getattr(recipe, role).max for role in DELAYED_ROLES] * len(group),
            margin=recipe.margin,
            power_of_two=recipe.power_of_two_scale,
            most_recent=recipe.amax_of == "most_recent",
        )


@torch.no_grad()
def _share(amaxes: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Set each amax to the largest of all ranks, or to NaN (which MAX alone would lose) if it is
    not finite on any of them."""
    import torch.distributed as dist

    if not amaxes:
        return
    mine = torch.stack(amaxes)
    bad = ~torch.isfinite(mine)
    both = torch.cat([torch.where(bad, UNUSED, mine), bad.float()])
    dist.all_reduce(both, dist.ReduceOp.MAX, group)
    largest, bad_anywhere = both.chunk(2)
    shared = torch.where(bad_anywhere != 0, torch.nan, largest)
    for amax, new in zip(amaxes, shared, strict=True):
        amax.copy_(new)


def _agree(
    model: torch.nn.Module, named: dict[str, torch.nn.Module], group: dist.ProcessGroup
) -> None:
    """ValueError on every rank unless all have the same delayed layers; once for each model."""
    import torch.distributed as dist

    mine = [f"{name}: {layer.recipe}" for name, layer in named.items()]
    if _agreed.get(model) == (group, mine):
        return
    lists: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(lists, mine, group=group)
    for rank, other in enumerate(lists):
        if other != mine:
            differs = sorted(set(mine) ^ set(other))[:2]
            raise ValueError(
                "update_scales: all ranks of process_group must have the same layers and recipes, "
                f"got {len(mine)} here and {len(other)} on rank {rank}; different: {differs}"
            )
    _agreed[model] = (group, mine)


def plain_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """model.state_dict() without the buffers of delayed scaling and the indices of outliers, for
    loading into the same model made of plain torch.nn layers. (A converted model loads both,
    whatever its recipe.)"""
    state = model.state_dict()
    for name, module in model.named_modules(remove_duplicate=False):
        added = [*BUFFERS] if has_state(module) else []
        recipe = getattr(module, "recipe", None)
        added += ["outliers"] if isinstance(recipe, Recipe) and recipe.outliers else []
        for buffer in added:
            state.pop(f"{name}.{buffer}" if name else buffer, None)
    return state


def keep_fp32(layer: torch.nn.Module, before: dict[str, torch.Tensor]) -> None:
    """After layer.to(...): keep scales in FP32 whatever the parameters are, and initialized."""
    for name, old in before.items():
        new = layer._buffers[name]
        if new is None or (new.dtype == torch.float32 and new.is_meta == old.is_meta):
            continue
        if old.is_meta:  # to_empty() leaves memory uninitialized
            old = _fresh(layer.recipe, new.device)[name]  # type: ignore[arg-type]
        layer._buffers[name] = old.to(new.device)


def loadable(
    layer: torch.nn.Module, state_dict: Mapping[str, Any], prefix: str, errors: list[str]
) -> dict[str, Any]:
    """A state dict for `layer` with exactly the scales that it needs.

    Scales that are missing are reset: the current ones belong to other weights. Values that do not
    fit are reported in `errors`.
    """
    state = dict(state_dict)
    keys = {name: prefix + name for name in BUFFERS}
    if not has_state(layer):
        foreign = {key for name, key in keys.items() if not hasattr(layer, name)}
        return {key: value for key, value in state.items() if key not in foreign}
    recipe: Recipe = layer.recipe  # type: ignore[assignment]
    fresh = _fresh(recipe, torch.device("cpu"))
    state = {keys[name]: fresh[name] for name in BUFFERS[2:]} | state
    if not all(key in state for key in keys.values()):
        return {**state, **{keys[name]: fresh[name] for name in BUFFERS}}
    for name, key in keys.items():
        want, got = fresh[name], state[key]
        if getattr(got, "shape", None) != want.shape or got.dtype != want.dtype:
            have = f"{tuple(got.shape)}, {got.dtype}" if hasattr(got, "shape") else type(got)
            errors.append(
                f"{key} must have shape {tuple(want.shape)} and dtype float32 for the recipe "
                f"{recipe}, got {have}"
            )
            state[key] = want
        elif unusable := _unusable(name, got):
            low = "0 or between 2^-126 and 2^126" if name == "scale" else "finite, 0 or more"
            errors.append(f"{key} must be {low}, got {unusable}: the file is damaged")
            state[key] = want
    return state


def _unusable(name: str, saved: torch.Tensor) -> list[float]:
    """Why a value is not the result of any update; meta and fake tensors are not checked."""
    if saved.is_meta or type(saved) is not torch.Tensor:
        return []
    low, high = (MIN_SCALE, MAX_SCALE) if name == "scale" else (0.0, torch.finfo(saved.dtype).max)
    usable = (saved == 0) | ((saved >= low) & (saved <= high))
    if name.endswith("amax"):
        usable |= (saved == UNUSED) | ~saved.isfinite()
    return saved[~usable].tolist()[:3]


_fp16_layers: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # whose gradients are fp16
_without_fp16: weakref.WeakSet[torch.optim.Optimizer] = (
    weakref.WeakSet()
)  # without params of these layers
_warned = False


def check_loss_scaling(layer: torch.nn.Module, recipe: Recipe | None) -> None:
    """Warn once if an fp16 recipe, as this layer may have, is trained without loss scaling."""
    if recipe is None or not recipe.needs_loss_scaling:
        _fp16_layers.discard(layer)
        return
    _fp16_layers.add(layer)
    _without_fp16.clear()
    before_steps(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """For optimizers of mixprec only, which know whether a GradScaler drives the step. Torch's are
    stepped in the same way with and without one."""
    global _warned
    scaling = getattr(optimizer, "_current_scaling", None)
    if _warned or optimizer in _without_fp16 or scaling is None or scaling().found_inf is not None:
        return
    weights = {id(layer._first_weight) for layer in _fp16_layers}
    if not any(id(p) in weights for group in optimizer.param_groups for p in group["params"]):
        _without_fp16.add(optimizer)
        return
    _warned = True
    warnings.warn(
        "a model with an fp16 recipe is being trained without loss scaling: gradients below 6e-8 "
        "become 0. Use scaler = mixprec.GradScaler(), scaler.scale(loss).backward(), "
        "scaler.step(optimizer), scaler.update(); or a bf16 recipe",
        stacklevel=4,
    )
