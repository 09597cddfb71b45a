"""The modules, optimizers and scalers of a step, and what of them a CUDA graph depends on."""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import numbers
import operator
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.overrides import _get_current_function_mode_stack

from . import _masters, scaling
from ._context import context
from ._local_gradients import LOW_PRECISION
from .optim._base import Optimizer
from .recipes import Recipe

_KINDS = (nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, LRScheduler)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
CONSTANTS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, type, Recipe)
_NUMBERS = (numbers.Number, range, enum.Enum)
# Of the attributes that are compared.
_VALUES = (
    *(torch.Tensor, nn.Module, tuple, frozenset, functools.partial),
    *(*_NUMBERS, *_FUNCTIONS, *CONSTANTS),
)
_OF_MODULES = frozenset(vars(nn.Module()))
_WRITTEN = ("_last_skip", "_quantized_weight")  # attributes from which no step reads on
_address, stride_of = torch.Tensor.data_ptr, torch.Tensor.stride
_requires_grad, version_of, gradient_of = (
    getattr(torch.Tensor, name).__get__ for name in ("requires_grad", "_version", "grad")
)
# Functions that write gradients, and methods. One of another program that has such a name makes a
# graph more careful; one that clears gradients is known by its code.
_OF_GRADIENTS = ("backward", "clip_grad_norm_", "clip_grad_value_")
_OF_METHODS = ("step", "unscale_", *_OF_GRADIENTS)
# Functions that read or set the state of random numbers on a GPU, which a capture cannot.
_STATES = {
    getattr(torch.cuda.random, name).__code__
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all")
}
_CLEARS = {
    inspect.unwrap(kind.zero_grad).__code__
    for kind in (nn.Module, torch.optim.Optimizer, Optimizer)
}


@contextlib.contextmanager
def used(wanted: bool) -> Iterator[dict[Any, Any] | None]:
    """The modules, optimizers, scalers and schedulers of which this thread calls a method, by id,
    under "clears_first" whether the first that has to do with gradients clears them, and under
    "random" what reads or sets the state of random numbers; None where they are not wanted, or a
    profiler looks on."""
    found: dict[Any, Any] = {}

    def look(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code in _STATES:
            found.setdefault("random", code.co_name)
        if event == "call" and code.co_argcount:
            user = frame.f_locals.get(code.co_varnames[0])
            if isinstance(user, _KINDS):
                found[id(user)] = user
            elif code.co_name not in _OF_GRADIENTS:
                return
            if code in _CLEARS or code.co_name in _OF_METHODS:
                found.setdefault("clears_first", code in _CLEARS)

    if not wanted or sys.getprofile() is not None:
        yield None
        return
    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(None)


def _regions() -> dict[str, Any]:
    """What of this thread decides how a step runs."""
    modes = _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else ()
    return {
        "the current device": torch._C._cuda_getDevice(),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "torch.autocast": (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        "the default dtype": torch.get_default_dtype(),
        "a setting of torch.backends": (
            torch._C._get_deterministic_algorithms(),
            torch._C._get_cublas_allow_tf32(),
        ),
        "hooks of saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(False),
        "use_backend": context.backend,
        "twice_differentiable": context.twice_differentiable,
        "a mode": list(map(_mode, modes)),
        "what is known of masters": _masters.Changes.count,
        "set_automatic_updates": scaling.updates_automatically(),
    }


def _mode(mode: Any) -> tuple[Any, ...]:
    return (type(mode), *(value for value in vars(mode).values() if isinstance(value, CONSTANTS)))


def _same(a: Any, b: Any) -> bool:
    """Whether a graph reads the same from an attribute with either value."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, _NUMBERS):
        return repr(a) == repr(b)  # of -0.0, too
    return isinstance(a, CONSTANTS) and bool(a == b)


def _containers(x: Any, seen: set[int]) -> Iterator[Any]:
    """The dicts and lists in x, itself too."""
    if id(x) in seen or not isinstance(x, (dict, list, set, deque, tuple)):
        return
    seen.add(id(x))
    if not isinstance(x, tuple):
        yield x
    for value in x.values() if isinstance(x, dict) else x:
        yield from _containers(value, seen)


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    return next((name for name, value in before.items() if value != now[name]), None)


def _hooks(user: Any) -> list[Any]:
    """Those of a module or optimizer, by number."""
    if isinstance(user, torch.optim.Optimizer):
        return [user._optimizer_step_pre_hooks, user._optimizer_step_post_hooks]
    m: nn.Module = user
    return [m._forward_pre_hooks, m._forward_hooks, m._backward_pre_hooks, m._backward_hooks]


class Users:
    """The modules, optimizers and scalers of a step, and what of them a graph depends on."""

    def __init__(self, found: Mapping[Any, Any]) -> None:
        users = list(found.values())  # and a bool, which is of no kind
        self.clears_first = bool(found.get("clears_first"))
        self._random: str | None = found.get("random")
        modules = (m for user in users if isinstance(user, nn.Module) for m in user.modules())
        self.modules = list({id(m): m for m in modules}.values())
        self.optimizers = [user for user in users if isinstance(user, torch.optim.Optimizer)]
        scalers = [user for user in users if isinstance(user, torch.amp.GradScaler)]
        self.scalers = [scaler for scaler in scalers if scaler.is_enabled()]
        self.schedulers = [user for user in users if isinstance(user, LRScheduler)]

    def params(self) -> list[torch.Tensor]:
        owned = (p for m in self.modules for p in m.parameters(recurse=False))
        mine = (p for o in self.optimizers for g in o.param_groups for p in g["params"])
        return list({id(p): p for p in chain(owned, mine)}.values())

    def with_rates(self) -> list[dict[str, Any]]:
        """The param groups whose lr can be written to the device."""
        groups = [g for o in self.optimizers if isinstance(o, Optimizer) for g in o.param_groups]
        return [g for g in groups if not (torch.is_tensor(g["lr"]) and g["lr"].is_cuda)]

    def refusal(self) -> str | None:
        """Why these cannot be captured."""
        scales = [getattr(scaler, "_scale", None) for scaler in self.scalers]
        cached = torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled()
        kept = any(vars(m).get("_quantized_weight") is not None for m in self.modules)
        reasons = {
            "it calls a learning rate scheduler, which a replay would not: call it after step": (
                self.schedulers
            ),
            "release_gradients=True decides on the host when a backward pass begins": any(
                getattr(o, "_release_gradients", False) for o in self.optimizers
            ),
            "reuse_weights is around it: enter it inside, where its casts are captured": kept,
            f"it calls torch.cuda.{self._random}, and a graph has random numbers of its own: call "
            "it outside; torch.utils.checkpoint takes preserve_rng_state=False": self._random,
            "torch.autocast is around it and keeps casts of weights: enter it inside, or with "
            "cache_enabled=False": cached,
            "the scale of a GradScaler is on the CPU: train with a new one, whose scale begins on "
            "the device of the loss": any(s is not None and not s.is_cuda for s in scales),
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    @staticmethod
    def _inside(name: str, values: Iterable[Any]) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for value in values:
            yield from ((name, its) for its in _containers(value, seen))

    def _places(self) -> Iterator[tuple[str, Any]]:
        """Dicts with attributes, and lists."""
        for m in self.modules:
            for entries in (vars(m), m._parameters, m._buffers, m._modules, *_hooks(m)):
                yield type(m).__name__, entries
            own = (x for k, x in vars(m).items() if k not in _OF_MODULES)
            yield from self._inside(type(m).__name__, own)
        for user in (*self.optimizers, *self.scalers):
            yield type(user).__name__, vars(user)
        for o in self.optimizers:
            name = type(o).__name__
            yield from ((f"{name}.state", each) for each in (o.state, *o.state.values()))
            yield f"{name}.param_groups", o.param_groups
            for i, group in enumerate(o.param_groups):
                yield f"{name}.param_groups[{i}]", group
                yield f"{name}.param_groups[{i}]", group["params"]
                own = (x for k, x in group.items() if k != "params")
                yield from self._inside(f"{name}.param_groups[{i}]", own)
            yield from ((name, hooks) for hooks in _hooks(o))
        yield from (("a parameter", vars(p)) for p in self.params())

    def remember(self) -> None:
        """What `change` compares with, such that this calls no Python for each value."""
        rates = set(map(id, self.with_rates()))
        places = list(self._places())
        self._named = [
            (f"{name}.{key}", entries, key)
            for name, entries in places
            if isinstance(entries, dict)
            for key, value in entries.items()
            if isinstance(value, _VALUES)
            and not (key in _WRITTEN or (key == "lr" and id(entries) in rates))
        ]
        self._sized = [entries for _, entries in places]
        self._sizes = list(map(len, self._sized))
        # An optimizer reads what stands in these now, also where the dict or list is another one.
        owned: list[tuple[Any, Any]] = []
        for o in self.optimizers:
            owned += [(vars(o), "state"), (vars(o), "param_groups")]
            owned += [(group, "params") for group in o.param_groups]
        self._named += [("an optimizer's state or group", *each) for each in owned]
        self._dicts, self._keys = [each[1] for each in self._named], [k for *_, k in self._named]
        owners = (*self.modules, *self.optimizers, *self.scalers, *self.params())
        attributes = {id(vars(owner)) for owner in owners}
        # Of dicts other than of attributes, the keys in their order.
        self._lists: list[Any] = [x for _, x in places if id(x) not in attributes]
        self._lists += [o.state.values() for o in self.optimizers]
        self._values, self._regions = self._now(), _regions()
        self._classes = list(map(type, self.modules))
        plain = (x for x in self._values if type(x) in (torch.Tensor, nn.Parameter))
        self._tensors = list({id(x): x for x in plain}.values())
        self._on_host = [x for x in self._tensors if x.device.type == "cpu"]
        self._low = [p for p in self.params() if p.dtype in LOW_PRECISION]
        self._memory, self._written = self._memory_now(), list(map(version_of, self._low))

    def _now(self) -> list[Any]:
        unscaled = map(len, map(operator.attrgetter("_per_optimizer_states"), self.scalers))
        values = map(dict.get, self._dicts, self._keys)
        return [*values, *unscaled, *chain.from_iterable(self._lists)]

    def _memory_now(self) -> dict[str, Any]:
        return {
            "the memory of a tensor": list(map(_address, self._tensors)),
            "requires_grad": list(map(_requires_grad, self._tensors)),
            "a tensor on the CPU": list(map(version_of, self._on_host)),
        }

    def change(self) -> str | None:
        """The name of something that is not as `remember` found it."""
        if (regions := _regions()) != self._regions:
            return _difference(self._regions, regions)
        if list(map(version_of, self._low)) != self._written:
            return "a 16-bit parameter, whose master follows it in the next step,"
        return self.own_change()

    def own_change(self) -> str | None:
        """The same, of what step itself may have changed but for the elements of tensors."""
        sizes, values = list(map(len, self._sized)), self._now()
        if sizes != self._sizes or list(map(type, self.modules)) != self._classes:
            pairs = zip(self._places(), self._sizes, sizes, strict=False)
            return next((name for (name, _), a, b in pairs if a != b), "a class")
        if not all(map(operator.is_, values, self._values)):
            for i, (now, before) in enumerate(zip(values, self._values, strict=True)):
                if not _same(now, before):
                    return (
                        self._named[i][0] if i < len(self._named) else "unscale_, a list or a hook"
                    )
            self._values = values
        memory = self._memory_now()
        return _difference(self._memory, memory) if memory != self._memory else None
