"""Functions of other libraries that a forward pass calls by a global name, in one pass."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from .._modes import is_watched
from ..functional._derivatives import is_twice_differentiable
from ..functional._one_pass import rotary
from ..ops._dispatch import checks
from . import _region
from ._content import content_of, undecorated
from ._fused import PLAIN
from ._marked import Marked

# The content of f(q, k, cos, sin, unsqueeze_dim=1), which returns x * cos + cat(-x2, x1) * sin of
# both q and k [B, H, T, D], x1 and x2 being the halves of x: of 119 modules of transformers 5.24.
_ROTARY = "f33b83a4172790f6"
# That of wrappers of forward passes that only rename an argument, from `old_name`.
RENAMES = "f9f84e3c40a9c33d"


def calls_known_functions(kind: Any) -> bool:
    raw, _ = _undecorated(kind.forward)
    return raw is not None and bool(_found(raw))


class RotaryForward(Marked):
    """A module around layers whose forward pass rotates queries and keys by such a function."""

    def unfused(self, *args: Any, **kwargs: Any) -> Any:
        kind: Any = type(self.module)
        if torch.compiler.is_compiling():  # which makes one loop of them
            return super().unfused(*args, **kwargs)
        raw, renamed = _undecorated(kind.forward)
        found = {} if raw is None else _found(raw)
        if raw is None or not found or renamed & kwargs.keys():
            return super().unfused(*args, **kwargs)
        scope = {**raw.__globals__, **{name: _in_one_pass(f) for name, f in found.items()}}
        same = FunctionType(raw.__code__, scope, raw.__name__, raw.__defaults__, raw.__closure__)
        same.__kwdefaults__ = raw.__kwdefaults__
        return same(self.module, *args, **kwargs)


def _undecorated(forward: Any) -> tuple[FunctionType | None, set[str]]:
    """The function itself, and the names of arguments that its decorators rename; None under a
    decorator that may do anything."""
    function, variables = undecorated(forward, {RENAMES})
    known = isinstance(function, FunctionType) and not hasattr(function, "__wrapped__")
    return (function if known else None), {each["old_name"] for each in variables}


def _found(raw: FunctionType) -> dict[str, FunctionType]:
    """The known functions that it calls, by name."""
    used = {name: raw.__globals__.get(name) for name in raw.__code__.co_names}
    functions = {name: f for name, f in used.items() if isinstance(f, FunctionType)}
    return {name: f for name, f in functions.items() if content_of(f).digest == _ROTARY}


def _in_one_pass(function: FunctionType) -> Callable[..., Any]:
    def rotate(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 4 and not kwargs and _fits(*args):
            q, k, cos, sin = args
            with _region.without_modes():
                # To the dtype that x * cos has.
                return tuple(rotary(x.to(cos.dtype), cos[0], sin[0]) for x in (q, k))
        return function(*args, **kwargs)

    return rotate


def _fits(q: Any, k: Any, cos: Any, sin: Any) -> bool:
    """Whether `rotary` computes the same: one table, with each number twice, for all of a batch."""
    tensors = (q, k, cos, sin)
    if any(type(x) not in PLAIN or not x.is_cpu or x.is_nested for x in tensors):
        return False
    t, d = q.shape[-2:] if q.dim() == k.dim() == 4 else (0, 1)
    return (
        d % 2 == 0
        and k.shape[-2:] == (t, d)
        and cos.shape == sin.shape == (1, t, d)
        and q.dtype in checks.FLOATS
        and q.dtype == k.dtype
        and cos.dtype == sin.dtype
        and cos.dtype in (q.dtype, torch.float32)
        and not (cos.requires_grad or sin.requires_grad)
        and all(torch.equal(x[..., : d // 2], x[..., d // 2 :]) for x in (cos, sin))
        and _region.current_region() is None
        and not _region.is_for_onnx()
        and not is_twice_differentiable()
        and not is_watched()
        and not torch._C._are_functorch_transforms_active()
    )
