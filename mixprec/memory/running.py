"""The op that this thread is running: what autograd saves meanwhile belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._C._autograd import _get_sequence_nr
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from .. import _originals
from .._context import context, replaced
from .._modes import Mode, nor_below, not_compiled, without_dispatch

_MHA = _originals.functional.multi_head_attention_forward


class Op(NamedTuple):
    """A function of torch or of mixprec.functional, and its arguments."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sequence: int  # autograd's nodes that existed before have lower numbers
    as_is: list[torch.Tensor]  # what it saves and nobody is to compress
    parts: list[tuple[torch.Tensor, Op]]  # what it saves as another op would

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    def tensors(self) -> Iterator[torch.Tensor]:
        leaves = tree_leaves((self.args, self.kwargs))
        return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def current(t: torch.Tensor | None = None) -> Op | None:
    """The op that runs now, or the part of it that saves t; None inside an autograd.Function of
    another library, compiled code, and whatever a backward pass computes again."""
    op: Op | None = context.op if torch._C._current_graph_task_id() == -1 else None
    return op and next((part for saved, part in op.parts if saved is t), op)


@nor_below
def _op(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Op:
    return Op(name, args, kwargs, _get_sequence_nr(), [], [])


@contextmanager
def running(name: str, *args: Any) -> Iterator[None]:
    """For an autograd.Function, which torch's function modes do not see."""
    with replaced("op", _op(name, args, {})):
        yield


def keep_as_is(*tensors: torch.Tensor | None) -> None:
    """Never compress these objects, which the current op will save, such as its cast weight."""
    op = None if torch.compiler.is_compiling() else context.op
    if op is not None:
        op.as_is.extend(t for t in tensors if t is not None)


def saved_as(name: str, *tensors: torch.Tensor | None) -> None:
    """The current op will save these objects for what the op `name` does with them."""
    op = None if torch.compiler.is_compiling() else context.op
    if op is not None:
        part = op._replace(name=name, as_is=[], parts=[])  # not this list, which would hold itself
        op.parts.extend((t, part) for t in tensors if t is not None)


def is_held_by_owner(t: torch.Tensor, watch: Watch) -> bool:
    """Whether t, or what it is a view of, was there before the block: a buffer or an input. It has
    no history, is an argument of the op, and no result of a function that `watch` saw."""
    base = t if t._base is None else t._base
    if base.grad_fn is not None or base in watch.made:
        return False
    op = current()
    given = () if op is None else op.tensors()
    return op is None or any(base is a or base is a._base for a in given)


class Watch(Mode):
    """Makes each function of torch that `names` knows the current op while it runs. The others are
    ops without a name."""

    def __init__(self, names: dict[Callable[..., Any], str]) -> None:
        super().__init__()
        self.names = names
        self.made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    @not_compiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__":  # an attribute of a tensor
            return func(*args, **kwargs)
        if func is _MHA:
            with self:  # its parts save as they do outside of it
                return without_dispatch(func)(*args, **kwargs)
        op = None if func in _originals.BACKWARD else _op(self.names.get(func, ""), args, kwargs)
        with replaced("op", op):
            result = func(*args, **kwargs)
        # A result without a gradient, of frozen layers, looks like a buffer later.
        plain = type(result) is torch.Tensor and not result.requires_grad and result._base is None
        if plain and not any(result is arg for arg in args):
            self.made[result] = None
        return result
