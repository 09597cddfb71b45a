"""What Dynamo is asked and told while a block of audit runs, and no longer."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from . import casts
from .patches import Patch

_OWN = "_torchdynamo_orig_backend"
_STATE = "SymbolicTorchFunctionState"


def is_supported() -> bool:
    """Whether this torch can compile inside of a block, and keep that apart from the rest."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None or frames.config.compiled_autograd:  # which has graphs of its own
        return False
    needed = (
        (frames, "_callback_from_stance"),
        (frames, "innermost_backend"),
        (frames, "set_eval_frame_isolate_recompiles_id"),
        (torch._C._dynamo.eval_frame, "_get_cache_entries_for_region"),
        (TorchDispatchMode, "ignore_compile_internals"),
        (_state(), "call_torch_function_mode"),
    )
    return all(hasattr(place, name) for place, name in needed)


def _state() -> Any:
    """Dynamo's class of the function modes that it traces."""
    return getattr(sys.modules.get("torch._dynamo.variables.torch_function"), _STATE, None)


class Asked(TorchDispatchMode):
    """A mode that Dynamo asks for what compiles the frames of a function, in place of `given`."""

    def callback(self, given: Any) -> Any:
        raise NotImplementedError


@contextlib.contextmanager
def _asked() -> Iterator[None]:
    """Dynamo asks the modes of its thread."""
    frames: Any = sys.modules["torch._dynamo.eval_frame"]
    original = frames._callback_from_stance

    def callback(given: Any) -> Any:
        found = original(given)
        modes = [m for m in _get_current_dispatch_mode_stack() if isinstance(m, Asked)]
        if modes and found is not None and not hasattr(found, _OWN):
            found = given  # by torch.compiler.set_stance: code that is there may run
        for mode in modes:
            found = mode.callback(found)
        return found

    with mock.patch.object(frames, "_callback_from_stance", callback), _untraced():
        yield


ASKING = Patch(_asked)


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    """Dynamo traces no `Calls`, which would keep it from some functions."""
    state = _state()
    call = state.call_torch_function_mode

    def is_ours(mode: Any) -> bool:
        is_lazy = hasattr(mode, "peek_value") and not mode.is_realized()
        return isinstance(mode.peek_value() if is_lazy else mode.value, casts.Calls)

    def has_modes(self: Any) -> bool:
        return not all(map(is_ours, self.mode_stack))

    def call_mode(self: Any, *args: Any) -> Any:
        if not is_ours(self.mode_stack[-1]):
            return call(self, *args)
        with self._pop_mode_for_inlining():
            return call_mode(self, *args)

    with (
        mock.patch.object(state, "in_torch_function_mode", has_modes),
        mock.patch.object(state, "call_torch_function_mode", call_mode),
    ):
        yield


@contextlib.contextmanager
def keeping_sizes() -> Iterator[None]:
    """The sizes that Dynamo sees inside make no size of the program's own code dynamic."""
    pgo: Any = sys.modules.get("torch._dynamo.pgo")
    known = None if pgo is None else pgo.get_code_state()
    before = copy.deepcopy(known)
    try:
        yield
    finally:
        if known is not None:
            known.clear()
            known.update(before)


def free(codes: Iterable[CodeType], region: int) -> None:
    """What was compiled of these for the caches of `region`."""
    guards: Any = sys.modules["torch._dynamo.guards"]
    for code in codes:
        for entry in torch._C._dynamo.eval_frame._get_cache_entries_for_region(code, region):
            manager: Any = entry.guard_manager
            if not isinstance(manager, guards.DeletedGuardManagerWrapper):
                deleted = guards.DeletedGuardManagerWrapper("the block of audit has ended")
                manager.extra_state.invalidate(entry, deleted)


def compiling(
    hooks: Any, inner: Any, tracing: Callable[[Any], AbstractContextManager[None]]
) -> Any:
    """Compiles frames as Dynamo does, inside of tracing(frame)."""
    frames: Any = sys.modules["torch._dynamo.convert_frame"]
    wrapped = frames.catch_errors_wrapper(inner, hooks)

    def compile(frame: Any, *args: Any) -> Any:
        with tracing(frame):
            return wrapped(frame, *args)

    asked: Any = compile
    asked._torchdynamo_orig_backend, asked.hooks = inner, hooks
    return asked


@contextlib.contextmanager
def without(mode: TorchDispatchMode) -> Iterator[None]:
    """What compiled code calls is in its graph: the mode does not see it."""
    above = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        _push_mode(other)
    try:
        yield
    finally:
        for _ in above:
            _pop_mode()
        for other in (mode, *reversed(above)):
            _push_mode(other)
