"""The FP32 values behind 16-bit parameters: one record for each, which belongs to the parameter.

It is an attribute of the parameter, and an entry of each module that `cast_parameters` found it in:
what copies a model or shards it makes other parameters, and they are found by their place in the
module. `_master_forms` says what it holds.
"""

from __future__ import annotations

import secrets
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from . import _master_forms as forms
from ._local_gradients import LOW_PRECISION, local, set_data, sharded_groups
from ._master_forms import FORMS, Record
from ._steps import before_steps
from .ops._reference.rounding import remainder_of

_NAME = "_mixprec_master"
_TORCHS = frozenset(kind for kind in vars(torch.optim).values() if isinstance(kind, type))
_WIDE = (torch.float32, torch.float64)

_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # those that have entries
_watching = False
models: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # that cast_parameters has cast


class Changes:
    """How often a record got another tensor or a parameter other values: what optimizers know of
    parameters holds only while it stands still."""

    count = 0


class _Copies:
    """Whether a module was copied or unpickled whose parameters may lack their records."""

    are_new = False


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
    _Copies.are_new = True
    return entries


def new_number() -> int:
    """For an optimizer, to tell its records from those of others, in other processes too."""
    return secrets.randbits(62)


def attach() -> None:
    """Give each parameter in a known place its record, so that `known` has it: one pass, before any
    of the functions below."""
    places = [*_places()]
    uses = Counter(id(its) for _, _, its in places)
    for module, name, its in places:
        param = module._parameters.get(name)
        if param is not None and known(param) is None:
            record = its if uses[id(its)] == 1 else _not_of_another(param, its, places)
            vars(param)[_NAME] = record
    _Copies.are_new = any(_NAME not in vars(module) for module in list(_modules))


def check_groups(who: str, params: Collection[torch.Tensor]) -> None:
    """ValueError where fully_shard has put some of these, of two dtypes, into one group, before its
    own error in the first forward pass."""
    mine = set(map(id, params))
    for model in list(models):
        for group in sharded_groups(model):
            first = {p.dtype: name for name, p in reversed(group.items())}
            if len(first) > 1 and not mine.isdisjoint(map(id, group.values())):
                got = ", ".join(f"{name} in {dtype}" for dtype, name in first.items())
                raise ValueError(
                    f"{who}: params that fully_shard gathers together must have one dtype, got "
                    f"{got}: call cast_parameters after fully_shard, or leave it out and pass "
                    "fully_shard mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
                )


def known(param: torch.Tensor) -> Record | None:
    """The record of a parameter, if it has one."""
    return vars(param).get(_NAME)


def _places() -> Iterator[tuple[nn.Module, str, Record]]:
    for module in list(_modules):
        if (entries := vars(module).get(_NAME)) is not None:  # None: while it is copied
            yield from ((module, name, its) for name, its in entries.records.items())


def _not_of_another(
    param: torch.Tensor, record: Record, places: list[tuple[nn.Module, str, Record]]
) -> Record:
    """The record, or a copy of it where another parameter has it: the two were tied before."""
    for module, name, its in places:
        other = module._parameters.get(name)
        if other is None or other is param or vars(other).get(_NAME, its) is not record:
            continue
        # A remainder fits any values: of others it is not.
        if "remainder" in record and not _equal(param, other):
            return {}
        return {
            n: v.clone() if isinstance(v, torch.Tensor) else v
            for n, v in record.items()
            if n != "optimizer"
        }
    return record


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not a.is_meta and not b.is_meta and torch.equal(local(a), local(b).to(a.device))


def keep(
    param: torch.Tensor, values: torch.Tensor, places: Collection[tuple[nn.Module, str]]
) -> None:
    """Record the values that `param` had before it was rounded to what it holds now.

    Where it is not trained, only what was cut off: 16 bits of BF16, or nothing.
    """
    record = known(param)
    record = {} if record is None else record
    record.clear()
    if param.requires_grad:
        record["master"] = values.float()
    else:
        record.update(forms.cut_off(values, param.detach()))
    _attach(param, record)
    follow(param, places)
    Changes.count += 1


def follow(param: torch.Tensor, places: Collection[tuple[nn.Module, str]]) -> None:
    """Enter the record into the modules that have the parameter; without one, an empty one."""
    if (record := known(param)) is None:
        _attach(param, record := {})
    for module, name in places:
        if _NAME not in vars(module):
            vars(module)[_NAME] = Entries(module)
            module.register_load_state_dict_pre_hook(_before_loading)
        vars(module)[_NAME].records[name] = record


def _attach(param: torch.Tensor, record: Record) -> None:
    global _watching
    vars(param)[_NAME] = record
    if not _watching:
        _watching = True
        before_steps(_before_a_step)
        register_module_parameter_registration_hook(_at_a_new_place)


def _at_a_new_place(module: nn.Module, name: str, param: torch.Tensor | None) -> None:
    """A hook of all modules: a parameter may move, as into a parametrization."""
    if _Copies.are_new:
        attach()
    if param is None:
        return
    if known(param) is not None:
        follow(param, [(module, name)])
    elif (entries := vars(module).get(_NAME)) is not None and (its := entries.records.get(name)):
        forms.distribute(module._parameters.get(name), param, its)


def forget(param: torch.Tensor) -> None:
    """From now on the parameter is all there is."""
    if record := known(param):
        record.clear()
        Changes.count += 1


def values_of(param: torch.Tensor) -> torch.Tensor:
    """The FP32 values behind a parameter of 16 bits, or one that was cast back to FP32: its own
    where nothing is known, or where other code has written it since."""
    with torch.no_grad():
        return forms.values(param, known(param) or {})


def in_form(param: torch.Tensor, form: str, remainder: torch.dtype) -> torch.Tensor:
    """What an optimizer that keeps this form would have now."""
    record, wide = known(param) or {}, values_of(param)
    copy = {"remainder": record["remainder"]} if "remainder" in record else {"master": wide}
    with torch.no_grad():
        forms.convert(param, copy, form, remainder)
    return copy[form]


def to_save(param: torch.Tensor) -> torch.Tensor:
    """A master or a remainder: the tensor that an optimizer's state has too, unless other weights
    were loaded since."""
    record = known(param) or {}
    if record.keys().isdisjoint(("previous", "other")):
        for form in FORMS:
            if form in record:
                return record[form]
    return values_of(param)


def has_values(param: torch.Tensor) -> bool:
    """Whether there is more than the parameter itself."""
    return not (known(param) or {}).keys().isdisjoint(FORMS)


def set_values(param: torch.Tensor, values: torch.Tensor) -> None:
    """Make FP32 values that round to the parameter those behind it, in the form that it has."""
    record = known(param)
    if record is None:
        _attach(param, record := {})
    if "remainder" in record:  # to the last bit the same for the same values
        remainder = record["remainder"]
        remainder.copy_(remainder_of(values, param.detach(), remainder.dtype))
    elif "master" in record:
        record["master"].copy_(values)
    else:
        record["master"] = values


def is_followed(param: torch.Tensor) -> bool:
    """Whether the master that an optimizer updates rounds to the parameter everywhere."""
    record, p = known(param) or {}, param.detach()
    if not record.keys() >= {"master", "optimizer"} or "other" in record:
        return True
    forms.place(param, record)
    if p.dtype not in LOW_PRECISION or "master" not in record:  # it had another shape
        return True
    return bool(forms.same(p, record["master"]).all())


def put(param: torch.Tensor, form: str, values: torch.Tensor, **marks: Any) -> None:
    """Make `values` the master or remainder. marks: entries of the record."""
    record = known(param)
    record = {} if record is None else record
    record.clear()
    record.update({form: values, **marks})
    _attach(param, record)
    Changes.count += 1


def undo_of(params: Collection[torch.Tensor]) -> Callable[[], None]:
    """A function that gives these parameters the records that they have now."""
    before = [(p, None if (its := known(p)) is None else dict(its)) for p in params]

    def undo() -> None:
        for p, record in before:
            if record is None:
                vars(p).pop(_NAME, None)
                continue
            its = vars(p)[_NAME]
            its.clear()
            its.update(record)

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
    record = known(param)
    is_new = record is None
    record = {} if record is None else record
    before = {name: record[name] for name in FORMS if name in record}
    for name in FORMS:
        held = state.pop(name, None)
        mine = record.get("optimizer") == number or is_new
        if held is not None and held is not record.get(name) and mine:  # copied, or set by hand
            record.pop("master", None)
            record.pop("remainder", None)
            record[name] = held
    forms.place(param, record)
    forms.settle(param, record)
    p = local(param.detach())
    if form is None:
        if record and p.dtype not in LOW_PRECISION:
            p.copy_(forms.widened(p, record))  # the bits that it lacked while it had 16
        record.clear()
    else:
        forms.convert(param, record, form, remainder)
        state[form] = record[form]
        record["optimizer"] = number
        _attach(param, record)
    Changes.count += any(record.get(name) is not t for name, t in before.items())


def _before_loading(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, *_: Any
) -> None:
    """A hook of load_state_dict: FP32 values that are loaded become the master."""
    for name, its in vars(module)[_NAME].records.items():
        value, param = state_dict.get(prefix + name), module._parameters.get(name)
        if not isinstance(value, torch.Tensor) or param is None or value.is_meta:
            continue
        if value.shape != param.shape:
            continue
        if known(param) is None:
            attach()
        # An optimizer that was copied before its model has given the parameter a record.
        record = known(param)
        record = its if record is None else record
        Changes.count += 1
        wide = value.dtype in _WIDE
        if param.dtype in _WIDE or (wide and metadata.get("assign_to_params_buffers")):
            if wide or not _rounds(values_of(param), value):
                record.clear()
        elif wide:
            with torch.no_grad():
                forms.load(param, record, value)
        elif _rounds(record.get("previous"), value):
            record["master"] = record.pop("previous")
            record.pop("other", None)
        elif _rounds(record.get("master"), value):
            record.pop("other", None)
        elif "remainder" in record and "fresh" not in record:
            if not (param.is_meta or _rounds(own := values_of(param), value)):
                is_trained = param.requires_grad or "optimizer" in record
                record.clear()
                if is_trained:
                    record.update(master=value.detach().float(), previous=own)
        elif record and "fresh" not in record:
            record["other"] = True


def _rounds(wide: Any, value: torch.Tensor) -> bool:
    """Whether FP32 values round to `value` everywhere."""
    if not isinstance(wide, torch.Tensor) or wide.is_meta or wide.shape != value.shape:
        return False
    return torch.equal(local(wide).to(value.dtype), local(value).to(wide.device))


def _before_a_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """A hook of all optimizers: those of torch have no masters. It frees what they do not take."""
    if torch.compiler.is_compiling() or type(optimizer) not in _TORCHS:
        return
    params = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    if _modules and any(known(p) is None for p in params):  # what shards a model made others
        attach()
    kept = [p for p in params if known(p)]
    for param in kept:
        if param.dtype not in LOW_PRECISION:
            set_data(param, values_of(param).to(param.dtype))
        forget(param)
    kept = [p for p in kept if p.dtype in LOW_PRECISION]
    if kept:
        name, dtype = type(optimizer).__name__, str(kept[0].dtype).removeprefix("torch.")
        instead = f"mixprec.optim.Masters(torch.optim.{name}, params, ...) keeps FP32 masters"
        if name in ("AdamW", "Adam", "SGD", "Muon"):
            instead = f"mixprec.optim.{name} keeps FP32 masters"
        elif name in ("LBFGS", "SparseAdam"):  # a closure, sparse gradients: Masters has neither
            instead = "leave these parameters in FP32 by keep_fp32="
        warnings.warn(
            f"torch.optim.{name} updates {len(kept)} parameters that cast_parameters made "
            f"{dtype}: updates of less than half a unit of {dtype} are lost. {instead}; if this "
            "is meant, cast_parameters(..., keep_masters=False) says so",
            stacklevel=3,
        )
