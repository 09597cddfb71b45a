"""Checkpoints: one file with all that a run needs to go on, written as a whole, loaded as a whole.

The file is torch.save's, of a dict: "format", "version", "step", "extra", "rng" (or None),
"classes", and the state dicts under the names of the arguments: "model", "optimizer", ... Its zip
container has a checksum of every tensor, which torch.load does not look at; here it is compared.
"""

from __future__ import annotations

import copy
import os
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from ._atomic import replace_file
from ._local_gradients import is_sharded

FORMAT, VERSION = "mixprec checkpoint", 1

# What torch.load(weights_only=True) makes again, of exactly these types: a subclass (a float of
# numpy, a namedtuple) would be saved as a reference to its class, which it refuses to look up.
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_VALUES = (type(None), bool, int, float, str, torch.dtype, torch.Size)
_LISTS, _DICTS = (list, tuple), (dict, OrderedDict, Counter)
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
    """Write the state of a run to the file `path`, which afterwards is the new one as a whole or,
    whatever happens meanwhile (a full disk, kill -9, a power cut), the old one.

    model, optimizer, scaler, lr_scheduler: anything with state_dict(), or a list of such. step, and
    extra (anything plain: tensors, numbers, strings, None in lists, tuples and dicts), come back
    from load_checkpoint. rng: the states of torch's random generators, of the CPU and, if CUDA is
    in use, of its devices. torch.load(path, weights_only=True) reads the file.

    Save between two steps, when gradients are cleared: they are not part of it. ValueError, with
    nothing written, for a value that could not be loaded, and for tensors that are sharded over
    ranks (DTensors), with its place.
    """
    if step is not None and type(step) is not int:
        raise ValueError(f"save_checkpoint: step must be an int, got {step!r}")
    parts = _parts(model=model, optimizer=optimizer, scaler=scaler, lr_scheduler=lr_scheduler)
    checkpoint = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "extra": extra,
        "rng": _rng_state() if rng else None,
        "classes": {name: type(part).__name__ for name, part in parts.items()},
        **{name: part.state_dict() for name, part in parts.items()},
    }
    for name, value in checkpoint.items():
        _check_plain(name, value)
    replace_file(path, lambda temporary: _write(checkpoint, temporary))


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
    """Load a file of save_checkpoint into what is given; return its {"step": ..., "extra": ...}.

    Everything goes to the device where its counterpart is; `extra` stays on the CPU. After it, a
    run goes on as it would have without the break, bit for bit.

    All or nothing: ValueError, naming the path, leaves everything as it was. It is raised for a
    file that is damaged, cut off, of a newer version or no checkpoint; for something asked for,
    rng included, that the file does not hold; for a model of other names, shapes or dtypes; for an
    optimizer or scheduler of another class, or one that refuses its state.

    convert_dtype: let the weights be fp32, bf16, fp16 or fp64 in the file and another of these in
    the model. They are rounded to nearest, from the optimizer's masters where it is loaded along
    and the file holds some; a finite value that would become Inf is a ValueError.
    """
    where = f"load_checkpoint: {os.fspath(path)}"
    # The model last: its weights are what masters are compared with at the next step.
    parts = _parts(optimizer=optimizer, scaler=scaler, lr_scheduler=lr_scheduler, model=model)
    checkpoint = _read(path, where)
    for name, part in parts.items():
        if name not in checkpoint:
            held = ", ".join(checkpoint["classes"]) or "none of them"
            raise ValueError(f"{where} holds no {name}, of model, optimizer and so on only: {held}")
        if name.startswith("model"):
            _check_weights(f"{where}: {name}", part, checkpoint[name], convert_dtype)
        elif not name.startswith("scaler"):
            saved, own = checkpoint["classes"][name], type(part).__name__
            if saved != own:
                raise ValueError(f"{where}: {name} was saved from {saved}, got {own}")
    if rng:
        _check_rng_state(where, checkpoint["rng"])
    with ExitStack() as undo:
        for name, part in parts.items():
            state = checkpoint[name]
            undo.callback(part.load_state_dict, copy.deepcopy(part.state_dict()))
            try:
                if name.startswith("model"):
                    state = _through_masters(part, state, _as_list(optimizer))
                elif name.startswith("optimizer"):
                    state = _at_home(part, state)
                part.load_state_dict(state)
            except Exception as error:
                raise ValueError(f"{where}: {name}: {error}") from error
        undo.pop_all()
    if rng:
        _set_rng_state(checkpoint["rng"])
    return {"step": checkpoint["step"], "extra": checkpoint["extra"]}


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _parts(**arguments: Any) -> dict[str, Any]:
    """By its name in the file, "optimizer" or, of several, "optimizer[0]", whatever was given."""
    parts = {}
    for name, value in arguments.items():
        several = isinstance(value, (list, tuple))
        for i, part in enumerate(_as_list(value)):
            parts[f"{name}[{i}]" if several else name] = part
    return parts


def _check_plain(place: str, value: Any) -> None:
    kind = type(value)
    if is_sharded(value):
        raise ValueError(
            f"save_checkpoint: {place} is a DTensor, of which each rank has a part; save sharded "
            "models and their optimizers with torch.distributed.checkpoint"
        )
    if kind in _TENSORS:
        if value.is_meta:
            raise ValueError(f"save_checkpoint: {place} is on the meta device and has no values")
    elif kind in _LISTS:
        for i, item in enumerate(value):
            _check_plain(f"{place}[{i}]", item)
    elif kind in _DICTS:
        for key, item in value.items():
            if type(key) not in _VALUES:
                raise ValueError(
                    f"save_checkpoint: the keys of {place} must be strings or numbers, got {key!r}"
                )
            _check_plain(f"{place}[{key!r}]", item)
    elif kind not in _VALUES:
        raise ValueError(
            f"save_checkpoint: {place} must be a tensor, a number, a string, or a list or dict of "
            f"such, got {kind.__module__}.{kind.__qualname__}"
        )


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    before = get_crc32_options()
    set_crc32_options(True)
    try:
        with open(path, "wb") as file:
            torch.save(checkpoint, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # the reason: torch went on to close its archive
            raise error.__context__ from None
        raise
    finally:
        set_crc32_options(before)


def _read(path: str | os.PathLike[str], where: str) -> dict[str, Any]:
    with open(path, "rb") as file:  # once, because a save may replace it meanwhile
        try:
            with zipfile.ZipFile(file) as archive:
                damaged = archive.testzip()
                # The attribute of a folder, which no checksum covers: torch would read nothing and
                # leave the tensor as the memory was.
                folders = [e.filename for e in archive.infolist() if e.external_attr & 0x10]
            if damaged is not None or folders:
                raise ValueError(f"{damaged or folders[0]} is not what its checksum says")
            file.seek(0)
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
        except MemoryError:
            raise
        except Exception as error:
            raise ValueError(f"{where} is damaged or no checkpoint: {error}") from error
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != FORMAT:
        raise ValueError(f"{where} is no checkpoint that save_checkpoint wrote")
    version = checkpoint.get("version")
    if version != VERSION:
        raise ValueError(
            f"{where} has version {version!r}, and this mixprec reads {VERSION}; a newer mixprec "
            "has written it"
        )
    if missing := {"step", "extra", "rng", "classes"} - checkpoint.keys():
        raise ValueError(f"{where} is damaged: it holds no {', '.join(sorted(missing))}")
    return checkpoint


def _check_weights(where: str, model: Any, saved: Any, convert_dtype: bool) -> None:
    """ValueError unless model.load_state_dict(saved) will take every value, and lose none."""
    own = model.state_dict()
    if not isinstance(saved, dict):
        raise ValueError(f"{where} must be a state dict, got {type(saved).__name__}")
    for word, names in (("lacks", own.keys() - saved.keys()), ("adds", saved.keys() - own.keys())):
        if names:
            shown = ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
            raise ValueError(f"{where} {word} {len(names)} entries: {shown}")
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


def _through_masters(
    model: Any, saved: dict[str, Any], optimizers: Iterable[Any]
) -> dict[str, Any]:
    """The weights to load: where they are about to be rounded to another dtype, the masters that
    they are roundings of."""
    masters = {
        id(p): state["master"]
        for o in optimizers
        for p, state in getattr(o, "state", {}).items()
        if "master" in state
    }
    weights = copy.copy(saved)
    for name, param in model.state_dict(keep_vars=True).items():
        value = saved[name]
        if id(param) in masters and value.dtype != param.dtype:
            master = masters[id(param)].cpu()
            follows = master.to(value.dtype) == value
            weights[name] = torch.where(follows, master, value.to(master.dtype))
    return weights


def _at_home(optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """The state with tensors among its settings, such as lr, where the optimizer has them."""
    groups = [dict(group) for group in saved["param_groups"]]
    for group, own in zip(groups, optimizer.param_groups, strict=False):
        for name, value in group.items():
            mine = own.get(name)
            if isinstance(value, torch.Tensor) and isinstance(mine, torch.Tensor):
                group[name] = value.to(mine.device)
    return {**saved, "param_groups": groups}


def _rng_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def _check_rng_state(where: str, state: Any) -> None:
    if state is None:
        raise ValueError(f"{where} holds no state of random generators; pass rng=False")
    devices = torch.cuda.device_count()
    if len(state["cuda"]) not in (0, devices):
        raise ValueError(
            f"{where} holds the random generators of {len(state['cuda'])} CUDA devices, and here "
            f"are {devices}; pass rng=False to go on with other random numbers"
        )
    try:
        torch.Generator().set_state(state["cpu"])
        for i, one in enumerate(state["cuda"]):
            torch.Generator(f"cuda:{i}").set_state(one)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{where}: rng: {error}") from error


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    for i, one in enumerate(state["cuda"]):
        torch.cuda.set_rng_state(one, i)
