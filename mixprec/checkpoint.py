"""Checkpoints: one file with the whole state of a run, saved and loaded completely or not at all.

The file is written by torch.save and holds a dict: "format", "version", "step", "extra", "rng" (or
None), "classes", the state dicts under the names of the arguments: "model", "optimizer", ..., and
"masters": by model and parameter, the FP32 values of those in 16 bits, or the bits that they lack.
Its zip container has a checksum of every tensor, which torch.load ignores and load_checkpoint
verifies.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch

from . import _checkpoint_file as files
from . import _masters
from ._local_gradients import LOW_PRECISION, is_sharded
from .nn._layer import Layer
from .ops import export_master
from .scaling import BUFFERS

# What torch.compile(module) puts into the names of the module's entries.
_COMPILED = "_orig_mod."
# What to do where the delayed scales of all layers are missing, in the file or in the model.
_SCALES = {
    "lacks": "the model has delayed scales, the file none: load it before convert",
    "adds": "they are the delayed scales of a converted model: convert the model as the one that "
    'was saved, such as by convert(model, "fp8-delayed"), before load_checkpoint',
}
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def save_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    scaler: Any = None,
    lr_scheduler: Any = None,
    step: int | None = None,
    extra: Any = None,
    rng: bool = True,
) -> None:
    """Save the state of a run to the file `path`, atomically: if it fails (a full disk, kill -9, a
    power cut), `path` still holds the previous file.

    model, optimizer, scaler, lr_scheduler: objects with state_dict(), or lists of them. step and
    extra (plain data: tensors, numbers, strings, None in lists, tuples and dicts) are returned by
    load_checkpoint. rng: the states of the random generators of torch (of the CPU and, if CUDA is
    in use, of its devices), of Python's `random` and, if it was imported, of `numpy.random`.
    torch.load(path, weights_only=True) reads the file. With a model, the FP32 values behind its
    16-bit parameters are saved, of frozen ones too.

    Gradients are not saved: call this between two steps, after clearing them. Raises ValueError,
    naming the entry, for a value that could not be loaded or a tensor sharded over ranks (a
    DTensor); nothing is written in that case.
    """
    if step is not None and type(step) is not int:
        raise ValueError(f"save_checkpoint: step must be an int, got {step!r}")
    _masters.attach()
    parts = _parts(model=model, optimizer=optimizer, scaler=scaler, lr_scheduler=lr_scheduler)
    checkpoint = {
        "format": files.FORMAT,
        "version": files.VERSION,
        "step": step,
        "extra": extra,
        "rng": files.random_states() if rng else None,
        "classes": {name: type(part).__name__ for name, part in parts.items()},
        **{name: _state_of(name, part) for name, part in parts.items()},
        "masters": {n: _masters_of(part) for n, part in parts.items() if n.startswith("model")},
    }
    for name, value in checkpoint.items():
        files.check_plain(name, value)
    files.replace_file(path, lambda temporary: files.write(checkpoint, temporary))


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    optimizer: Any = None,
    scaler: Any = None,
    lr_scheduler: Any = None,
    rng: bool = True,
    convert_dtype: bool = False,
) -> dict[str, Any]:
    """Load a file of save_checkpoint into the objects given; return {"step": ..., "extra": ...}.

    Tensors are moved to the devices that the objects use; `extra` stays on the CPU. The run
    continues bit for bit as if it had not been interrupted.

    All or nothing: a ValueError, which names the path, leaves everything unchanged. It is raised
    for a file that is damaged, truncated, of a newer version or not a checkpoint; if the file lacks
    something requested, rng included; for a model with other names, shapes or dtypes; for an
    optimizer or scheduler of another class, or one that rejects its state.

    convert_dtype: allow weights that are fp32, bf16, fp16 or fp64 in the file and another of these
    in the model. They are rounded to nearest, from the masters where the file has some, and values
    that are FP32 in the file, or masters, are the masters of 16-bit parameters afterwards; a finite
    value that would become Inf is a ValueError.
    """
    where = f"load_checkpoint: {os.fspath(path)}"
    _masters.attach()
    # Load the model last: at the next step masters are compared with its weights.
    parts = _parts(optimizer=optimizer, scaler=scaler, lr_scheduler=lr_scheduler, model=model)
    checkpoint = files.read(path, where)
    for name, part in parts.items():
        if name not in checkpoint:
            held = ", ".join(checkpoint["classes"]) or "none of them"
            raise ValueError(f"{where} holds no {name}, of model, optimizer and so on only: {held}")
        if name.startswith("model"):
            checkpoint[name] = _with_names_of(part, checkpoint[name])
            _check_weights(f"{where}: {name}", part, checkpoint[name], convert_dtype)
        elif not name.startswith("scaler"):
            saved, own = checkpoint["classes"].get(name), type(part).__name__
            if saved != own:
                raise ValueError(f"{where}: {name} was saved from {saved}, got {own}")
    if rng:
        files.check_random_states(where, checkpoint["rng"])
    with ExitStack() as undo:
        records = _masters.undo_of(_parameters(parts.values()))
        for name, part in parts.items():
            state = checkpoint[name]
            undo.callback(part.load_state_dict, copy.deepcopy(part.state_dict()))
            undo.callback(records)  # before the part, whose state may set them
            try:
                if name.startswith("model"):
                    saved = checkpoint.get("masters", {}).get(name, {})
                    state = _through_masters(part, state, _with_names_of(part, saved))
                elif name.startswith("optimizer"):
                    state = _at_home(part, state)
                part.load_state_dict(state)
                if name.startswith("model"):
                    knows_all = "masters" in checkpoint  # else an older mixprec has written it
                    _set_masters(part, state, _with_names_of(part, saved), knows_all)
            except Exception as error:
                raise ValueError(f"{where}: {name}: {error}") from error
        undo.pop_all()
    if rng:
        files.set_random_states(checkpoint["rng"])
    return {"step": checkpoint["step"], "extra": checkpoint["extra"]}


def _state_of(name: str, part: Any) -> Any:
    """Its state dict; of a compiled model, with the names that it has without torch.compile."""
    state = part.state_dict()
    if name.startswith("model") and hasattr(part, "named_parameters"):
        for key, p in part.named_parameters(remove_duplicate=False):
            if key in state and p.dtype not in LOW_PRECISION and _masters.has_values(p):
                state[key] = _masters.values_of(p)  # float() has left it rounded
    if name.startswith("model") and any(_COMPILED in key for key in state):
        return {key.replace(_COMPILED, ""): value for key, value in state.items()}
    return state


def _with_names_of(model: Any, saved: Any) -> Any:
    """A state dict with `model`'s own names, whichever of the two torch.compile has renamed."""
    names = (*model.state_dict(), *_not_chosen(model))
    own = {key.replace(_COMPILED, ""): key for key in names}
    if not isinstance(saved, dict) or own.keys() == saved.keys() == set(own.values()):
        return saved
    plain = {key.replace(_COMPILED, ""): value for key, value in saved.items()}
    return {own.get(key, key): value for key, value in plain.items()}


def _parts(**arguments: Any) -> dict[str, Any]:
    """The objects given by their names in the file: "optimizer", or "optimizer[0]" of several."""
    parts = {}
    for name, value in arguments.items():
        if isinstance(value, (list, tuple)):
            parts.update({f"{name}[{i}]": part for i, part in enumerate(value)})
        elif value is not None:
            parts[name] = value
    return parts


def _not_chosen(model: Any) -> set[str]:
    """The names of outliers that a layer has none of yet, and loads."""
    return {
        f"{name}.outliers".removeprefix(".")
        for name, module in model.named_modules()
        if isinstance(module, Layer) and module.recipe.outliers and module.outliers is None
    }


def _check_weights(where: str, model: Any, saved: Any, convert_dtype: bool) -> None:
    """ValueError unless model.load_state_dict(saved) can load every value without loss."""
    own = model.state_dict()
    if not isinstance(saved, dict):
        raise ValueError(f"{where} must be a state dict, got {type(saved).__name__}")
    more = saved.keys() - own.keys() - _not_chosen(model)
    for verb, names in (("lacks", own.keys() - saved.keys()), ("adds", more)):
        if names:
            shown = ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
            scales = all(name.rpartition(".")[2] in BUFFERS for name in names)
            hint = f"; {_SCALES[verb]}" if scales else ""
            raise ValueError(f"{where} {verb} {len(names)} entries: {shown}{hint}")
    for name, mine in own.items():
        value = saved[name]
        if not isinstance(mine, torch.Tensor) or not isinstance(value, torch.Tensor):
            if isinstance(mine, torch.Tensor) or isinstance(value, torch.Tensor):
                raise ValueError(f"{where}: {name} is a tensor only in the file or in the model")
            continue
        if is_sharded(mine):
            raise ValueError(
                f"{where}: {name} is a DTensor; load sharded models with "
                "torch.distributed.checkpoint"
            )
        if mine.is_meta:
            raise ValueError(f"{where}: {name} is on the meta device; use model.to_empty() first")
        if value.shape != mine.shape:
            raise ValueError(
                f"{where}: {name} must have shape {tuple(mine.shape)}, got {tuple(value.shape)}"
            )
        if value.dtype == mine.dtype:
            continue
        floats = value.dtype in _FLOATS and mine.dtype in _FLOATS
        if not (floats and convert_dtype):
            hint = "; convert_dtype=True rounds to nearest" if floats else ""
            raise ValueError(f"{where}: {name} must have {mine.dtype}, got {value.dtype}{hint}")
        if not torch.equal(value.to(mine.dtype).isfinite(), value.isfinite()):
            raise ValueError(f"{where}: {name} holds values that overflow {mine.dtype}")


def _parameters(parts: Iterable[Any]) -> list[torch.Tensor]:
    """Those of models and optimizers."""
    params: dict[torch.Tensor, None] = {}
    for part in parts:
        for group in getattr(part, "param_groups", ()):
            params.update(dict.fromkeys(group["params"]))
        if hasattr(part, "named_parameters"):
            params.update(dict.fromkeys(part.parameters()))
    return list(params)


def _masters_of(model: Any) -> dict[str, torch.Tensor]:
    """By the names of a state dict without torch.compile's: an FP32 tensor is a master, one of
    integers a remainder."""
    masters, named = {}, getattr(model, "named_parameters", None)
    for name, p in () if named is None else named(remove_duplicate=False):
        if p.dtype in LOW_PRECISION and _masters.has_values(p) and not p.is_meta:
            masters[name.replace(_COMPILED, "")] = _masters.to_save(p)
    return masters


def _through_masters(
    model: Any, saved: dict[str, Any], masters: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """The weights to load; where they have a master and their dtype is converted, the master.

    masters: those in the file; else those that the optimizer, which is loaded before, has given to
    the parameters.
    """
    weights = copy.copy(saved)
    for name, param in model.state_dict(keep_vars=True).items():
        value, master = saved[name], masters.get(name)
        if not isinstance(param, torch.Tensor) or value.dtype == param.dtype:
            continue
        if master is None:
            master = (_masters.known(param) or {}).get("master")
        if master is not None and master.is_floating_point():
            follows = master.cpu().to(value.dtype) == value
            weights[name] = torch.where(follows, master.cpu(), value.to(master.dtype))
        elif master is not None:
            weights[name] = export_master(value, master)
    return weights


def _set_masters(
    model: Any, weights: dict[str, Any], masters: dict[str, torch.Tensor], knows_all: bool
) -> None:
    """Make FP32 weights the masters of the 16-bit parameters that they were loaded into, and else
    the masters of the file; where it has none, the weights are all there is."""
    for name, param in model.state_dict(keep_vars=True).items():
        if not isinstance(param, torch.nn.Parameter) or param.dtype not in LOW_PRECISION:
            continue
        value = weights[name]
        if value.dtype == param.dtype:
            value = masters.get(name)
        if value is None:
            if not (knows_all and _masters.has_values(param)):
                continue
            value = param.detach().float()
        form = "master" if value.is_floating_point() else "remainder"
        value = value.to(param.device, torch.float32 if form == "master" else None, copy=True)
        known: Any = (_masters.known(param) or {}).get(form)  # the optimizer's state has it
        has_it = known is not None and not known.is_meta and known.dtype == value.dtype
        if not (has_it and torch.equal(known, value)):
            _masters.put(param, form, value)


def _at_home(optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """The state with tensor settings, such as lr, on the devices of the optimizer's own."""
    groups = [dict(group) for group in saved["param_groups"]]
    for group, own in zip(groups, optimizer.param_groups, strict=False):
        for name, value in group.items():
            mine = own.get(name)
            if isinstance(value, torch.Tensor) and isinstance(mine, torch.Tensor):
                group[name] = value.to(mine.device)
    return {**saved, "param_groups": groups}
