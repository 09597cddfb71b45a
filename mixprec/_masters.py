"""The FP32 values behind 16-bit parameters: one record for each, which belongs to the parameter.

A record is a dict. It holds one of
    "master"     the FP32 values, of which the parameter is the rounding
    "remainder"  int16 or int8: the bits of them that a BF16 parameter lacks
or neither, where the parameter is all there is; beside it
    "loaded"     what load_state_dict has loaded into the parameter since: FP32 values; or True, 16
                 bits before an optimizer took the record
    "optimizer"  the number of the optimizer that updates it, whose state has the same tensor

It is an attribute of the parameter, and an entry of each module that `cast_parameters` found it in:
what copies a model or shards it makes other parameters, and they are found by their place in the
module.
"""

from __future__ import annotations

import secrets
import warnings
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ._local_gradients import LOW_PRECISION, is_sharded, local
from .ops import export_master, join_master
from .ops._reference.rounding import lower_half, remainder_of, upper_half

FORMS = ("master", "remainder")
_NAME = "_mixprec_master"
_TORCHS = frozenset(kind for kind in vars(torch.optim).values() if isinstance(kind, type))
_WIDE = (torch.float32, torch.float64)

Record = dict[str, Any]
_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # those that have entries
_watching = False


class _Counter:
    """How often a record got another tensor or a parameter other values: what optimizers know of
    parameters holds only while it stands still."""

    value = 0


class Entries:
    """The records of a module by the names of its parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.records: dict[str, Record] = {}
        _modules.add(module)

    def __reduce__(self) -> tuple[Any, ...]:
        # The copy of a module is made before its attributes are: this one gets the copy.
        module = self._module()
        params = {} if module is None else module._parameters
        return _entries, (module, {n: _of(params.get(n), r) for n, r in self.records.items()})


def _of(param: torch.Tensor | None, record: Record) -> Record:
    return record if param is None else vars(param).get(_NAME, record)


def _entries(module: nn.Module, records: dict[str, Record]) -> Entries:
    entries = Entries(module)
    entries.records = records
    return entries


def changes() -> int:
    return _Counter.value


def new_number() -> int:
    """For an optimizer, to tell its records from those of others, in other processes too."""
    return secrets.randbits(62)


def find(param: torch.Tensor) -> Record | None:
    """The record of a parameter, if it has one."""
    record = vars(param).get(_NAME)
    if record is None:
        for module in list(_modules):
            for name, its in vars(module)[_NAME].records.items():
                if module._parameters.get(name) is param:
                    vars(param)[_NAME] = its
                    return its
    return record


def keep(
    param: torch.Tensor, values: torch.Tensor, places: Collection[tuple[nn.Module, str]]
) -> None:
    """Record the values that `param` had before it was rounded to what it holds now.

    Where it is not trained, only what was cut off: 16 bits of BF16, or nothing.
    """
    record = find(param)
    record = {} if record is None else record
    record.clear()
    low = param.detach()
    if param.requires_grad:
        record["master"] = values.float()
    elif not (low.is_meta or torch.equal(low.to(values.dtype), values)):
        if low.dtype == torch.bfloat16:
            record["remainder"] = remainder_of(values.float(), low)
        else:
            record["master"] = values.float()
    _attach(param, record)
    for module, name in places:
        if _NAME not in vars(module):
            vars(module)[_NAME] = Entries(module)
            module.register_load_state_dict_pre_hook(_before_loading)
        vars(module)[_NAME].records[name] = record
    _Counter.value += 1


def _attach(param: torch.Tensor, record: Record) -> None:
    global _watching
    vars(param)[_NAME] = record
    if not _watching:
        _watching = True
        register_optimizer_step_pre_hook(_before_a_step)


def forget(param: torch.Tensor) -> None:
    """From now on the parameter is all there is."""
    if record := find(param):
        record.clear()
        _Counter.value += 1


def values_of(param: torch.Tensor) -> torch.Tensor:
    """The FP32 values behind a parameter of 16 bits, or one that was cast back to FP32: its own
    where nothing is known, or where other code has written it since."""
    record = find(param)
    p = param.detach()
    if not record or param.is_meta:
        return p.float()
    with torch.no_grad():
        _place(param, record)
        if "loaded" in record or ("remainder" in record and p.dtype == torch.float16):
            _settle(param, record)
        if p.dtype not in LOW_PRECISION:
            return _like(param, _widened(local(p), record))
        if "remainder" in record:
            return export_master(p, record["remainder"])
        if "master" not in record:
            return p.float()
        master = record["master"]
        return torch.where(_same(p, master), master, p.float())


def has_values(param: torch.Tensor) -> bool:
    """Whether there is more than the parameter itself."""
    return not (find(param) or {}).keys().isdisjoint((*FORMS, "loaded"))


def set_values(param: torch.Tensor, values: torch.Tensor) -> None:
    """Make FP32 values that round to the parameter those behind it, in the form that it has."""
    record = find(param)
    if record is None:
        _attach(param, record := {})
    if "remainder" in record:  # to the last bit the same for the same values
        remainder = record["remainder"]
        remainder.copy_(remainder_of(values, param.detach(), remainder.dtype))
        return
    record["loaded"] = values
    with torch.no_grad():
        _place(param, record)
        _settle(param, record)


def is_followed(param: torch.Tensor) -> bool:
    """Whether the master that an optimizer updates rounds to the parameter everywhere."""
    record = find(param) or {}
    if not record.keys() >= {"master", "optimizer"} or "loaded" in record:
        return True
    return param.dtype not in LOW_PRECISION or bool(_same(param.detach(), record["master"]).all())


def put(param: torch.Tensor, form: str, values: torch.Tensor, number: int | None = None) -> None:
    """Make `values` the master or remainder, in a record that an optimizer's state shares."""
    record = find(param)
    record = {} if record is None else record
    record.clear()
    record[form] = values
    if number is not None:
        record["optimizer"] = number
    _attach(param, record)
    _Counter.value += 1


def undo_of(params: Collection[torch.Tensor]) -> Callable[[], None]:
    """A function that gives these parameters the records that they have now."""
    before = [(p, dict(record)) for p in params if (record := find(p)) is not None]
    known = {id(p) for p, _ in before}
    without = [p for p in params if id(p) not in known]

    def undo() -> None:
        for p, record in before:
            its = find(p)
            assert its is not None, "they stay"
            its.clear()
            its.update(record)
        for p in without:
            vars(p).pop(_NAME, None)

    return undo


@torch.no_grad()
def claim(
    who: str,
    param: torch.Tensor,
    state: dict[str, Any],
    form: str | None,
    remainder: torch.dtype,
    number: int,
) -> None:
    """Bring the record into the form that an optimizer keeps, and put its tensor into `state`.

    form: None for a parameter that is all there is; one in FP32 gets the values that it had.
    """
    for name in FORMS:
        held = state.get(name)
        if isinstance(held, torch.Tensor) and held.shape != param.shape:
            raise ValueError(
                f"{who}: the {name} of a param of shape {tuple(param.shape)} has shape "
                f"{tuple(held.shape)}: cut or extend state[param][{name!r}] as the other entries, "
                "or delete it, and it is made from the param"
            )
    record = find(param)
    record = {} if record is None else record
    before = {name: record[name] for name in FORMS if name in record}
    for name in FORMS:
        held = state.pop(name, None)
        mine = record.get("optimizer") == number or not before
        if held is not None and held is not record.get(name) and mine:  # copied, or set by hand
            record.pop("master", None)
            record.pop("remainder", None)
            record[name] = held
    _place(param, record)
    _settle(param, record)
    p = local(param.detach())
    if form is None:
        if record and p.dtype not in LOW_PRECISION:
            p.copy_(_widened(p, record))  # the bits that it lacked while it had 16
        record.clear()
    else:
        _convert(param, record, form, remainder)
        state[form] = record[form]
        record["optimizer"] = number
        _attach(param, record)
    _Counter.value += any(record.get(name) is not t for name, t in before.items())


def _place(param: torch.Tensor, record: Record) -> None:
    """Move the record to the device of the parameter, and shard it as that is."""
    for name in ("loaded", *FORMS):
        t = record.get(name)
        if not isinstance(t, torch.Tensor):
            continue
        if t.is_meta and not param.is_meta:
            del record[name]
            continue
        if t.shape != param.shape:
            del record[name]
            warnings.warn(
                f"the FP32 values of a parameter of shape {tuple(t.shape)} are lost, because it "
                f"has shape {tuple(param.shape)} now: use fully_shard (FSDP2), which keeps the "
                "shape, or call cast_parameters after what changes it",
                stacklevel=2,
            )
            continue
        if is_sharded(param) and not is_sharded(t):
            from torch.distributed.tensor import distribute_tensor

            mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
            # Each rank has all of it, and takes its part, as fully_shard does.
            t = distribute_tensor(t.to(param.device), mesh, placements, src_data_rank=None)
        if t.device != param.device:
            t = t.to(param.device)
        record[name] = t


def _settle(param: torch.Tensor, record: Record) -> None:
    """Take into the record what has been written to the parameter since. No host sync."""
    loaded: Any = record.pop("loaded", None)
    p = local(param.detach())
    if p.dtype not in LOW_PRECISION:
        return
    wide = local(loaded).float() if isinstance(loaded, torch.Tensor) else None
    if "remainder" in record and p.dtype == torch.bfloat16:
        remainder = local(record["remainder"])
        if wide is not None:
            new = remainder_of(wide, p, remainder.dtype)
            kept = torch.where(export_master(p, remainder) == wide, remainder, new)
            remainder.copy_(torch.where(_same(p, wide), kept, remainder))
        return
    if "remainder" in record:  # the model was cast since
        low = p.to(torch.bfloat16)
        record["master"] = _like(param, join_master(low, local(record.pop("remainder"))))
    if wide is not None and "master" not in record:
        record["master"] = _like(param, p.float())
    if "master" in record:
        master = local(record["master"])
        same = _same(p, master)
        own = torch.where(same, master, p.to(master.dtype))
        if loaded is True:  # as a whole: of other weights, no bits of these stay
            own = torch.where(same.all(), master, p.to(master.dtype))
        if wide is not None:
            own = torch.where(_same(p, wide), wide, own)
        master.copy_(own)


def _convert(param: torch.Tensor, record: Record, form: str, dtype: torch.dtype) -> None:
    p = local(param.detach())
    if form == "master":
        if "remainder" in record:
            wide = export_master(p, local(record.pop("remainder")))
            record["master"] = _like(param, wide)
        elif "master" not in record:
            record["master"] = param.detach().to(torch.float32)
    elif "master" in record:
        wide = local(record.pop("master"))
        record["remainder"] = _like(param, remainder_of(wide, p, dtype))
    elif "remainder" not in record:
        record["remainder"] = torch.zeros_like(param, dtype=dtype, requires_grad=False)
    elif record["remainder"].dtype != dtype:
        half = lower_half if dtype == torch.int16 else upper_half
        record["remainder"] = _like(param, half(local(record["remainder"])))


def _widened(p: torch.Tensor, record: Record) -> torch.Tensor:
    """The values of (the part of) a parameter that was cast to FP32, where other code has not
    written it."""
    wide = local(record["master"]) if "master" in record else None
    if wide is None:
        if "remainder" not in record:
            return p.float()
        wide = join_master(p.to(torch.bfloat16), local(record["remainder"]))
    same = torch.stack([wide.to(dtype).to(p.dtype) == p for dtype in LOW_PRECISION]).any(0)
    return torch.where(same, wide.to(p.dtype), p)


def _same(param: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    rounded = master.to(param.dtype)
    return (rounded == param) | (rounded.isnan() & param.isnan())


def _like(param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A tensor of which this rank has `part`, sharded as the parameter is."""
    if not is_sharded(param):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    shape, stride = param.shape, param.stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def _before_loading(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, *_: Any
) -> None:
    """A hook of load_state_dict: FP32 values that are loaded become the master."""
    for name, record in vars(module)[_NAME].records.items():
        value, param = state_dict.get(prefix + name), module._parameters.get(name)
        if not isinstance(value, torch.Tensor) or param is None or value.is_meta:
            continue
        if value.shape != param.shape:
            continue
        _Counter.value += 1
        wide = value.dtype in _WIDE
        if param.dtype in _WIDE or (wide and metadata.get("assign_to_params_buffers")):
            if wide or not torch.equal(values_of(param).to(value.dtype), value.to(param.device)):
                record.clear()
        elif wide:
            record["loaded"] = value.detach().to(torch.float32, copy=True)
        elif "remainder" in record and "optimizer" not in record and not param.is_meta:
            here = value.detach().to(param.device)
            other = local(here.to(param.dtype)) != local(param.detach())
            local(record["remainder"]).masked_fill_(other.to(record["remainder"].device), 0)
        elif "optimizer" in record:  # of FP32 values before these, nothing is left
            record.pop("loaded", None)
        elif record:
            record["loaded"] = True


def _before_a_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """A hook of all optimizers: those of torch have no masters. It frees what they do not take."""
    if torch.compiler.is_compiling() or type(optimizer) not in _TORCHS:
        return
    kept = [p for g in optimizer.param_groups for p in g["params"] if vars(p).get(_NAME)]
    for param in kept:
        if param.dtype not in LOW_PRECISION:
            param.data = values_of(param).to(param.dtype)
        forget(param)
    kept = [p for p in kept if p.dtype in LOW_PRECISION]
    if kept:
        name, dtype = type(optimizer).__name__, str(kept[0].dtype).removeprefix("torch.")
        ours = f"mixprec.optim.{name}"
        if name not in ("AdamW", "Adam", "SGD", "Muon"):
            ours = f"mixprec.optim.Masters(torch.optim.{name}, params, ...)"
        warnings.warn(
            f"torch.optim.{name} updates {len(kept)} parameters that cast_parameters made "
            f"{dtype}: updates of less than half a unit of {dtype} are lost. {ours} keeps FP32 "
            "masters; if this is meant, cast_parameters(..., keep_masters=False) says so",
            stacklevel=3,
        )
