"""Casts of operands that layers share while one forward pass of a module runs."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import _get_current_function_mode_stack

from ..ops._dispatch import backends, simulation
from ..recipes import Recipe
from .operands import Delayed, Operand, cast

__all__ = ["cast_input", "saved_tensors_hooks", "share_casts"]

# As many tensors as a layer's neighbours take in turn, such as a decoder's and an encoder's. More
# would keep memory that nothing reads.
_LIMIT = 2


class _Thread(threading.local):
    def __init__(self) -> None:
        # Of each module whose forward pass runs, the innermost last: (x, key, operand).
        self.casts: list[list[tuple[weakref.ref[torch.Tensor], Any, Operand]]] = []


_thread = _Thread()


@contextlib.contextmanager
def share_casts() -> Iterator[None]:
    """For the forward pass of a module: its layers cast a tensor that several of them take once."""
    _thread.casts.append([])
    try:
        yield
    finally:
        _thread.casts.pop()


def cast_input(
    x: torch.Tensor, recipe: Recipe, delayed: Delayed | None, *, use_t: bool, grad_enabled: bool
) -> Operand:
    """`operands.cast` of a layer's input, or the operand that another layer has made of it.

    grad_enabled: the caller's grad mode (an autograd.Function runs without). Only the cast is
    shared, which depends on nothing but the key, and never beyond `share_casts`.
    """
    shared = _shareable(x, recipe, delayed)
    if shared:
        known, key = _thread.casts[-1], _key(x, recipe, use_t, grad_enabled)
        for tensor, of, operand in known:
            if tensor() is x and of == key:
                return operand
    operand = cast(x, "x", recipe, delayed, use_t=use_t, record=grad_enabled)
    if shared:
        known[:] = [*known[1 - _LIMIT :], (weakref.ref(x), key, operand)]
    return operand


def saved_tensors_hooks() -> object:
    """The innermost hooks on saved tensors, such as those of torch.utils.checkpoint; or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _shareable(x: torch.Tensor, recipe: Recipe, delayed: Delayed | None) -> bool:
    """Whether the cast of x depends on its values alone, and a write to x can be seen."""
    if torch.compiler.is_compiling() or not _thread.casts:
        return False
    if delayed is not None or "x" in recipe.stochastic_rounding:
        return False
    return (
        (recipe.is_scaled or x.dtype != recipe.x.dtype)  # else there is nothing to cast
        and type(x) in (torch.Tensor, torch.nn.Parameter)
        and not x.is_inference()  # which have no version
        # Selective checkpointing, counters and fake tensors see each op: none may be missing.
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
        and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _key(x: torch.Tensor, recipe: Recipe, use_t: bool, grad_enabled: bool) -> tuple[Any, ...]:
    # The weak reference keeps the address of a storage that is gone from another one.
    stream = torch.cuda.current_stream(x.device) if x.is_cuda else None
    return (
        *(
            StorageWeakRef(x.untyped_storage()),
            x._version,
            x.data_ptr(),
            x.dtype,
            x.shape,
            x.stride(),
            x.device,
            stream,
        ),
        *(recipe, use_t, simulation.current(), backends.forced()),
        # Nothing is shared across the beginning or end of these.
        *(grad_enabled, saved_tensors_hooks(), tuple(_get_current_function_mode_stack())),
    )
