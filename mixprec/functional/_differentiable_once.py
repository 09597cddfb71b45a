"""What autograd functions with casts do not support, said with what to do instead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import function

_INSTEAD = (
    "run the forward pass inside mixprec.autocast(enabled=False), where layers compute as torch's"
)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator of a backward pass, with an error that says what to do about it."""

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: torch.Tensor) -> Any:
        with torch.no_grad():
            outputs = backward(ctx, *grads)
        if not torch.is_grad_enabled() or not any(g.requires_grad for g in grads):
            return outputs
        message = f"layers with a recipe have no second derivative: {_INSTEAD}"
        # Raises when it is differentiated, not now: create_graph=True may be meant for others.
        error: Any = torch._C._functions.DelayedError(message.encode(), len(outputs))
        return error(*[None if t is None else t.detach().requires_grad_() for t in outputs])

    return wrapper


def apply(name: str, kind: type[function.Function], *args: Any) -> torch.Tensor:
    """kind.apply(*args), or RuntimeError inside of the transforms of torch.func."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"{name}: torch.func.grad, vmap and so on do not support casts by a recipe: {_INSTEAD}"
        )
    result: torch.Tensor = kind.apply(*args)
    return result
