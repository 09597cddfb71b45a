"""The functions of this folder inside of the transforms of torch.func: grad, vmap and so on.

torch asks for autograd functions whose forward pass has no ctx. Those here run the forward and the
backward pass of another one as functions of tensors.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import function
from torch.utils import _pytree as pytree

from ..ops._dispatch import autocast
from ..recipes import Recipe

_TORCH = (
    "run the forward pass inside mixprec.autocast(enabled=False), where layers compute as torch's"
)
_NO_SECOND = (
    "torch.func: casts by a recipe have first derivatives in reverse mode only (grad, vjp, jacrev, "
    f"vmap), not jvp, jacfwd, hessian or grad of grad: {_TORCH}"
)


def _state_of(arguments: dict[str, Any]) -> str | None:
    """What a call would change besides its results."""
    recipe = arguments.get("recipe")
    if isinstance(recipe, Recipe) and (recipe.is_delayed or recipe.clip_activations):
        return f"recipe {recipe.name}, which keeps state"
    product = arguments.get("product")
    products = arguments.get("products", () if product is None else (product,))
    mains = any(product.main_grad is not None for product in products)
    return "weights with main_grad" if mains else None


def _requires_grad(t: torch.Tensor) -> bool:
    """At any level of the transforms."""
    functorch = torch._C._functorch
    while not t.requires_grad and functorch.is_functorch_wrapped_tensor(t):
        t = functorch.get_unwrapped(t)
    return t.requires_grad


def _without_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: torch.compile, which would trace `function` without an error and give gradients of
    0, calls it as it is, or refuses with fullgraph=True."""
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        if "torch._dynamo" not in sys.modules:  # its import takes a second
            return function(*args)
        if not disabled:
            disabled.append(torch._dynamo.disable(function))
        return disabled[0](*args)

    return run


class _Context:
    """In the place of the ctx of an autograd function."""

    saved_tensors: tuple[torch.Tensor | None, ...] = ()

    def __init__(self, needs_input_grad: Sequence[bool]) -> None:
        self.needs_input_grad = tuple(needs_input_grad)

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        pass


class _Call:
    """kind.apply(*args) without its tensors, and what its forward pass leaves for backward."""

    def __init__(self, kind: type[function.Function], args: tuple[Any, ...]) -> None:
        self.kind = kind
        self.rest, self.spec = pytree.tree_flatten(args)
        self.places = [i for i, x in enumerate(self.rest) if isinstance(x, torch.Tensor)]
        self.tensors = [self.rest[i] for i in self.places]
        for i in self.places:
            self.rest[i] = None
        # Of each argument, its position among the tensors, if it is one itself. (Not by identity:
        # one tensor may be several arguments.)
        counts = [
            len([x for x in pytree.tree_leaves(a) if isinstance(x, torch.Tensor)]) for a in args
        ]
        first = itertools.accumulate(counts, initial=0)
        pairs = zip(args, first, strict=False)
        self.positions = [n if isinstance(a, torch.Tensor) else None for a, n in pairs]
        self.needs = [n is not None and _requires_grad(self.tensors[n]) for n in self.positions]
        recipe = next((a for a in args if isinstance(a, Recipe)), None)
        self.is_random = recipe is not None and recipe.is_random
        self.outputs, self.has_tuple = 0, False
        self.attributes: dict[str, Any] = {}
        self.saved: list[int | None] = []  # positions in (*tensors, *results of _Forward)

    @_without_dynamo
    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs, then what is saved for backward and is neither an input nor an output."""
        leaves = [*self.rest]
        for i, t in zip(self.places, tensors, strict=True):
            leaves[i] = t
        ctx: Any = _Context(self.needs)
        result: Any = self.kind.forward(ctx, *pytree.tree_unflatten(leaves, self.spec))
        outputs = list(result) if isinstance(result, tuple) else [result]
        known = [*tensors, *outputs]
        memory = {t.untyped_storage()._cdata for t in known}
        self.outputs, self.saved = len(outputs), []
        self.has_tuple = isinstance(result, tuple)
        for t in ctx.saved_tensors:
            if t is not None and all(t is not one for one in known):
                # A view of an input may not be returned.
                known.append(t.clone() if t.untyped_storage()._cdata in memory else t)
                self.saved.append(len(known) - 1)
            else:
                indices = (n for n, one in enumerate(known) if one is t)
                self.saved.append(None if t is None else next(indices))
        self.attributes = {**vars(ctx)}
        del self.attributes["needs_input_grad"]
        self.attributes.pop("saved_tensors", None)
        return tuple(known[len(tensors) :])


class _Gradients:
    """The backward pass of a call: which of its tensors need a gradient, which outputs have one."""

    def __init__(self, call: _Call, needs: Sequence[bool], given: Sequence[bool]) -> None:
        self.call, self.needs, self.given = call, [*needs], [*given]
        self.is_random = call.is_random

    @_without_dynamo
    def run(self, tensors: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """The gradients that are needed. tensors: those of the outputs, then what was saved."""
        call, rest = self.call, iter(tensors)
        grads = [next(rest) if given else None for given in self.given]
        known = list(rest)
        ctx: Any = _Context([n is not None and self.needs[n] for n in call.positions])
        vars(ctx).update(call.attributes)
        ctx.saved_tensors = tuple(None if n is None else known[n] for n in call.saved)
        results: Any = call.kind.backward(ctx, *grads)
        grads_by_tensor = dict(zip(call.positions, results, strict=True))
        return tuple(
            torch.zeros_like(known[n]) if grads_by_tensor.get(n) is None else grads_by_tensor[n]
            for n, need in enumerate(self.needs)
            if need
        )


def _one_by_one(kind: Any, info: Any, in_dims: Any, call: Any, *tensors: torch.Tensor) -> Any:
    """A vmap rule: each sample is a call of its own, with scales of its own."""
    if call.is_random and info.randomness != "different":
        raise RuntimeError(
            "torch.func.vmap: a recipe with stochastic_rounding draws random numbers for each "
            f'sample: pass randomness="different", got {info.randomness!r}'
        )
    size, pairs = info.batch_size, [*zip(tensors, in_dims[1:], strict=True)]
    if size == 0:  # one sample of zeros says the shapes
        pairs = [(t if d is None else t.new_zeros(_with_one(t, d)), d) for t, d in pairs]
    parts = [
        kind.apply(call, *(t if d is None else t.select(d, i) for t, d in pairs))
        for i in range(max(size, 1))
    ]
    stacked = tuple(_stack(column)[:size] for column in zip(*parts, strict=True))
    return stacked, (0,) * len(stacked)


def _with_one(t: torch.Tensor, dim: int) -> tuple[int, ...]:
    return tuple(1 if i == dim else n for i, n in enumerate(t.shape))


def _stack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """torch.stack, also of FP8. (Not of its bytes: torch 2.11 has no view(dtype) in a vmap.)"""
    if parts[0].dtype.itemsize > 1:
        with autocast.disabled(parts[0].device.type):  # which refuses the other type of 16 bits
            return torch.stack(list(parts))
    stacked = parts[0].new_empty((len(parts), *parts[0].shape))
    for i, part in enumerate(parts):
        stacked[i].copy_(part)
    return stacked


def _no_second(ctx: Any, *given: Any) -> Any:
    raise RuntimeError(_NO_SECOND)


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return call.forward(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        call, *tensors = inputs
        ctx.call = call
        ctx.mark_non_differentiable(*output[call.outputs :])
        ctx.set_materialize_grads(False)
        # The inputs too: a second derivative must not leave out what depends on them.
        used = {None if n is None else n - len(tensors) for n in call.saved}
        results = (t if j in used else None for j, t in enumerate(output))
        ctx.save_for_backward(*tensors, *results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        needs = ctx.needs_input_grad[1:]
        given = grads[: ctx.call.outputs]
        if all(g is None for g in given) or not any(needs):
            return (None,) * (1 + len(needs))
        gradients = _Gradients(ctx.call, needs, [g is not None for g in given])
        results = iter(
            _Backward.apply(gradients, *(g for g in given if g is not None), *ctx.saved_tensors)
        )
        return None, *(next(results) if need else None for need in needs)

    jvp = staticmethod(_no_second)

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: _Call, *tensors: torch.Tensor) -> Any:
        return _one_by_one(_Forward, info, in_dims, call, *tensors)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(gradients: _Gradients, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients.run(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    backward = jvp = staticmethod(_no_second)

    @staticmethod
    def vmap(info: Any, in_dims: Any, gradients: _Gradients, *tensors: torch.Tensor) -> Any:
        return _one_by_one(_Backward, info, in_dims, gradients, *tensors)


@_without_dynamo
def run_transformed(name: str, kind: type[function.Function], args: tuple[Any, ...]) -> Any:
    """kind.apply(*args) inside of transforms of torch.func. RuntimeError for a call with state."""
    arguments = inspect.signature(kind.forward).bind(None, *args).arguments
    if (state := _state_of(arguments)) is not None:
        raise RuntimeError(
            f"{name}: torch.func.grad, vmap and so on do not support {state}: {_TORCH}"
        )
    call = _Call(kind, args)
    tensors, call.tensors = call.tensors, []
    results = _Forward.apply(call, *tensors)
    outputs = results[: call.outputs]
    return outputs if call.has_tuple else outputs[0]
