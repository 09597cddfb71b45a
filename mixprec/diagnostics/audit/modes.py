"""The functions of torch that a program calls, and what holds for torch while it is audited."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._ops import HigherOrderOperator
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from ... import _originals
from ..._modes import Mode, nor_below, not_compiled, run_backward

_POOLS = {torch.max_pool1d, functional.max_pool1d, getattr(functional, "_max_pool1d", None)}


class _Call(NamedTuple):
    """func: a function of torch; has_dtype: it was called with dtype=; autocast: by the type of
    device, in what torch.autocast computes there (the ops that autocast runs do not see it)."""

    func: Any
    has_dtype: bool
    autocast: dict[str, torch.dtype]


def autocast_dtypes() -> dict[str, torch.dtype]:
    kinds = ("cpu", "cuda")
    return {k: torch.get_autocast_dtype(k) for k in kinds if torch.is_autocast_enabled(k)}


@contextlib.contextmanager
def autocast_inside() -> Iterator[None]:
    """torch.autocast for the ops that a kernel calls, as it is for them outside of a dispatch mode,
    which switches it off."""
    keys = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutocastCPU, keys.AutocastCUDA):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield


class Calls(Mode):
    """Knows the function of torch that the program has called, before autocast and dispatch."""

    def __init__(self) -> None:
        super().__init__()
        self.call = _Call(None, False, {})
        self.autocast_on: set[str] = set()
        self.backward = 0  # the calls of backward() that run
        self.pools = False  # whether max_pool1d has run
        self.gradients: list[Any] = []  # what the program has given to them

    def in_backward(self) -> Calls:
        return self

    @not_compiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "__get__":  # an attribute of a tensor
            return func(*args, **kwargs)
        before = self.call
        self.pools |= func in _POOLS
        self.call = _Call(func, kwargs.get("dtype") is not None, autocast := autocast_dtypes())
        self.autocast_on.update(autocast)
        try:
            if isinstance(func, HigherOrderOperator) and (run := _uncompiled(func)) is not None:
                with self:
                    return run(*args, **kwargs)
            if func not in _originals.BACKWARD:
                return func(*args, **kwargs)
            self.call = before  # a checkpoint computes functions again, which are to be seen
            self.backward += 1
            self.gradients += tree_leaves((args[1:], kwargs))
            return run_backward(self, func, args, kwargs)
        finally:
            self.call = before
            if func in _originals.BACKWARD:
                self.backward -= 1
                self.gradients.clear()


def _uncompiled(func: HigherOrderOperator) -> Callable[..., Any] | None:
    """The same of ops. torch compiles these functions also in eager mode: Dynamo makes inputs of
    the tensors that their Python functions use, and else those get no gradient."""

    def cond(condition: Any, if_true: Any, if_false: Any, operands: Any) -> Any:
        return (if_true if condition else if_false)(*operands)

    def flex_attention(*args: Any, **kwargs: Any) -> Any:
        kind, tensors = args[0].device.type, args[:3]
        if torch.is_autocast_enabled(kind):
            tensors = tuple(t.to(torch.get_autocast_dtype(kind)) for t in tensors)
        dense = func.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd]
        with torch.autocast(kind, enabled=False):
            return dense(*tensors, *args[3:], **kwargs)

    return {"cond": cond, "flex_attention": flex_attention}.get(func.name())


@not_compiled
def _force_eager() -> AbstractContextManager[object]:
    """What torch.compile has compiled, or is to compile in a block, runs uncompiled: each op is
    seen."""
    # torch loads Dynamo in any case, for the first op under a dispatch mode.
    try:
        return torch.compiler.set_stance("force_eager")
    except RuntimeError as error:
        raise RuntimeError(
            "audit: a block cannot begin inside of a function that torch.compile compiles: enter "
            "it around the call"
        ) from error


def is_in_compiled() -> bool:
    """Whether a function that torch.compile has returned runs, in this thread."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    frame: FrameType | None = None if dynamo is None else sys._getframe(1)
    while frame is not None:
        is_dynamo = frame.f_globals is vars(dynamo)
        if is_dynamo and isinstance(frame.f_locals.get("self"), dynamo.OptimizeContext):
            return True
        frame = frame.f_back
    return False


_CALL_HIGHER_ORDER = HigherOrderOperator.__call__.__code__
_HAS_TORCH_FUNCTION = torch.overrides.has_torch_function


@nor_below
def _has_torch_function(args: Any) -> bool:
    """torch's, which modules with a fast path ask: one of our modes is no reason to leave it."""
    if torch.compiler.is_dynamo_compiling():
        return any(type(arg) not in (torch.Tensor, torch.nn.Parameter, type(None)) for arg in args)
    modes = torch.overrides._get_current_function_mode_stack()
    if not modes or not all(isinstance(mode, Calls) for mode in modes):
        return _HAS_TORCH_FUNCTION(args)
    caller = sys._getframe(1)  # these functions run no code that asks for a fast path
    if caller.f_code is _CALL_HIGHER_ORDER and _uncompiled(caller.f_locals["self"]) is not None:
        return torch._C._is_torch_function_mode_enabled()
    with contextlib.ExitStack() as stack:
        for _ in modes:
            stack.enter_context(torch.overrides._pop_mode_temporarily())
        return _HAS_TORCH_FUNCTION(args)


_lock, _patches, _blocks = threading.Lock(), contextlib.ExitStack(), 0


@contextlib.contextmanager
def torch_patched() -> Iterator[None]:
    """Changes of torch that hold in all threads while blocks of audit are open: the first one makes
    them, the last one takes them back. In threads without one of these modes code that they reach
    behaves as torch's, but that nothing is compiled."""
    global _blocks
    with _lock:
        if _blocks == 0:
            _patches.enter_context(_force_eager())
            # `Calls` does not keep torch's modules from their fast paths.
            name = "has_torch_function"
            _patches.enter_context(mock.patch.object(torch.overrides, name, _has_torch_function))
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if _blocks == 0:
                _patches.close()
