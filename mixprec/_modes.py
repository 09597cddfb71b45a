"""The function modes of torch that blocks of mixprec are.

torch keeps these modes per thread, hands those of the caller of backward() to the threads that run
it, and torch.compile guards on them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch._ops import HigherOrderOperator
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils import checkpoint
from torch.utils._device import DeviceContext

from ._context import context, replaced
from ._originals import BACKWARD

Function = TypeVar("Function", bound=Callable[..., Any])


def not_compiled(function: Function, *, below: bool = False) -> Function:
    """Decorator of what runs between the functions of a program, such as the method of a mode.

    Where a program goes on uncompiled, after a graph break, Dynamo would compile it by itself, and
    run what it compiled for one attribute of a tensor for another one too. What it traces as a part
    of a program's function is right, and stays. below: it leaves alone what `function` calls, too.
    """
    dynamo: Any = torch._C._dynamo.eval_frame
    if not hasattr(dynamo, "set_code_exec_strategy"):
        # A torch that this was not written for: it does not trace it either.
        return _disable_dynamo(function)  # type: ignore[return-value]
    actions = dynamo._FrameAction
    strategy = dynamo._FrameExecStrategy(actions.SKIP, actions.SKIP if below else actions.DEFAULT)
    dynamo.set_code_exec_strategy(function.__code__, strategy)
    return function


def nor_below(function: Function) -> Function:
    """`not_compiled` of what runs no code of the program."""
    return not_compiled(function, below=True)


class Mode(TorchFunctionMode):
    """A mode that needs no functions of torch in place of those of fused layers."""

    def in_backward(self) -> Mode | None:
        """What is in its place while a backward pass runs that was called inside of it."""
        return None


class Block(Mode):
    """What layers look up. It holds for a checkpoint that is computed again if it did for the
    forward pass, and in other code of a backward pass it moves no op.

    in_order: rows of attention have bits that depend on no other rows."""

    in_order = False

    def in_backward(self) -> Mode:
        return self

    @not_compiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in BACKWARD and not isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)
        if torch.compiler.is_compiling():
            # torch runs func outside of this mode; layers that it runs are to see the block.
            with self, torch._C.DisableTorchFunction():
                return func(*args, **kwargs)
        is_other = any(kind is not torch.Tensor for kind in types) or is_watched()
        if func not in BACKWARD or is_other:
            return func(*args, **kwargs)
        return run_backward(self, func, args, kwargs)


def is_watched() -> bool:
    """Whether a torch function mode of the program is to see each of torch's functions."""
    stack = _get_current_function_mode_stack()
    return any(not isinstance(mode, (Mode, DeviceContext)) for mode in stack)


@contextlib.contextmanager
def only(modes: Iterable[TorchFunctionMode]) -> Iterator[None]:
    """These modes, in place of the thread's."""

    def replace(new: Iterable[TorchFunctionMode]) -> None:
        for _ in _get_current_function_mode_stack():
            _pop_mode()
        for mode in new:
            _push_mode(mode)

    before = _get_current_function_mode_stack()
    replace(modes)
    try:
        yield
    finally:
        replace(before)


@not_compiled
def run_backward(mode: Mode, func: Any, args: Any, kwargs: Any) -> Any:
    """func of BACKWARD, with the modes that stay and without asking them."""
    stack = [*_get_current_function_mode_stack(), mode]
    stay = [mode.in_backward() for mode in stack if isinstance(mode, Mode)]
    run = _tensor_backward if func is torch.Tensor.backward else without_dispatch(func)
    with only(mode for mode in stay if mode is not None):
        return run(*args, **kwargs)


@not_compiled
def _tensor_backward(
    loss: torch.Tensor,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Tensor.backward."""
    run = without_dispatch(torch.autograd.backward)
    run(loss, gradient, retain_graph, create_graph, inputs=inputs)


def without_dispatch(func: Any) -> Any:
    """A function of torch in Python that does not ask the function modes about itself."""
    names = {**func.__globals__, "has_torch_function": lambda _: False}
    copy = FunctionType(func.__code__, names, func.__name__, func.__defaults__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


class _Recomputed:
    """What a checkpoint computes again, in the blocks of its forward pass, `twice_differentiable`
    and `use_backend` included, in place of those around backward()."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.blocks = [m for m in _get_current_function_mode_stack() if isinstance(m, Block)]
        self.twice, self.backend = context.twice_differentiable, context.backend

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stack = _get_current_function_mode_stack()
        with (
            only([m for m in stack if not isinstance(m, Block)] + self.blocks),
            replaced("twice_differentiable", self.twice),
            replaced("backend", self.backend),
        ):
            return self.function(*args, **kwargs)


@functools.cache
def follow_checkpoints() -> None:
    """From the first layer or block of a process on."""
    forward = checkpoint.CheckpointFunction.forward

    def remember(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        again = _Recomputed(function)
        outputs = forward(ctx, function, *args)
        ctx.run_function = again
        return outputs

    class Hook(checkpoint._checkpoint_hook):
        def __init__(self, frame: Any) -> None:
            frame.recompute_fn = _Recomputed(frame.recompute_fn)
            super().__init__(frame)

    checkpoint.CheckpointFunction.forward = staticmethod(remember)  # type: ignore[method-assign]
    checkpoint._checkpoint_hook = Hook  # type: ignore[misc]
