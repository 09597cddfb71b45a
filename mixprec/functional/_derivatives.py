"""Second derivatives of layers with casts, or an error."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import function

from .._context import context, replaced
from .._local_gradients import PLAIN
from .._modes import is_watched, nor_below
from ..memory.running import running
from ._transforms import run_transformed

Tensors = tuple[torch.Tensor | None, ...]

NO_SECOND = (
    "create_graph=True: layers with a recipe have second derivatives only where the forward "
    "pass ran inside mixprec.functional.twice_differentiable()"
)


@contextlib.contextmanager
def twice_differentiable() -> Iterator[None]:
    """Give layers that run inside the block second derivatives, and further ones.

    For a loss that contains gradients, such as a gradient penalty: run its forward pass and
    `torch.autograd.grad(..., create_graph=True)` inside the block. Layers then also keep x and
    weight as they are, in addition to what their recipe saves. The first derivatives are the same
    bits as without the block. Casts count as the identity, and the GEMMs of higher derivatives take
    16-bit operands, those of the recipe or, for FP8, bf16. A weight with `main_grad` adds its
    gradient there, which is not differentiated again. Not supported inside torch.compile.
    """
    with replaced("twice_differentiable", True):
        yield


def is_twice_differentiable() -> bool:
    return not torch.compiler.is_compiling() and context.twice_differentiable


def is_plain(x: Any) -> bool:
    """Whether x is an ordinary tensor, of which every function is torch's."""
    return type(x) in PLAIN and x.layout is torch.strided and not x.is_nested


def may_run_as_one(*tensors: Any, transforms: bool = False) -> bool:
    """Whether one function of ours may stand for several of torch's, of these tensors: nothing is
    to see each of them. transforms: those of torch.func may."""
    if is_twice_differentiable() or is_watched() or not all(map(is_plain, tensors)):
        return False
    if transforms or torch.compiler.is_compiling():
        return True
    return not torch._C._are_functorch_transforms_active()


def is_plain_eager(x: Any, y: Any = None) -> bool:
    """Whether a call with x and y runs its kernels and nothing else: nothing traces it, nothing but
    blocks of ours is to see its ops, and no tensor stands for others."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in PLAIN
        and (y is None or (type(y) in PLAIN and not is_functorch_wrapped_tensor(y)))
        and not is_functorch_wrapped_tensor(x)
        and not is_legacy_batchedtensor(x)
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
        and not (torch._C._len_torch_function_stack() and is_watched())
    )


def on_backend_of_forward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of backward(ctx, ...): its ops run on ctx.backend, which forward took from
    `context.backend`, and not on that of the thread that it runs on. It gets gradients that torch
    has batched (is_grads_batched, jacobian(vectorize=True)) one by one."""

    @nor_below
    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> Any:
        # Compiled code is traced inside the block of its forward pass.
        if torch.compiler.is_compiling():
            return backward(ctx, *grads)
        batched = any(map(_is_batched, grads))
        run = functools.partial(_one_by_one, backward) if batched else backward
        if ctx.backend == context.backend:
            return run(ctx, *grads)
        with replaced("backend", ctx.backend):
            return run(ctx, *grads)

    return wrapper


def _is_batched(g: Any) -> bool:
    return g is not None and is_legacy_batchedtensor(g)


class _ReadOnce:
    """A ctx, whose saved tensors a checkpoint lets be read once."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def _one_by_one(backward: Callable[..., Any], ctx: Any, *grads: Any) -> Any:
    for state in (ctx, *getattr(ctx, "products", ())):
        if any(getattr(state, name, None) is not None for name in ("main_grad", "delayed")):
            raise RuntimeError(
                "is_grads_batched: layers that keep state (main_grad, delayed scales) take one "
                "gradient at a time: call torch.autograd.grad for each"
            )

    def batches(level: int) -> list[Any]:
        return [torch._remove_batch_dim(g, level, 1, 0) if _is_batched(g) else g for g in grads]

    # Which level of vmap it is cannot be asked for.
    level = next(n for n in itertools.count(1) if not any(map(_is_batched, batches(n))))
    known, given = _ReadOnce(ctx), batches(level)
    sizes = [len(b) if _is_batched(g) else None for b, g in zip(given, grads, strict=True)]
    results = [
        backward(known, *(b if n is None else b[i] for b, n in zip(given, sizes, strict=True)))
        for i in range(max(n for n in sizes if n is not None))
    ]
    return tuple(
        None if parts[0] is None else torch._add_batch_dim(torch.stack(parts), 0, level)
        for parts in zip(*results, strict=True)
    )


class _Gradients(torch.autograd.Function):
    """The gradients of x, weight and bias as a function of g, x and weight.

    second(ctx, (g, x, weight), (u, v, s)) returns the gradients of the three for the incoming u, v
    and s, those of the gradients of x, weight and bias.
    """

    @staticmethod
    def forward(
        ctx: Any, g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, first: Any, second: Any
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(g, x, weight)
        ctx.second, ctx.backend = second, context.backend
        return first()

    @staticmethod
    @on_backend_of_forward
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        with twice_differentiable():  # where this runs for a third derivative
            return *ctx.second(ctx.saved_tensors, grads), None, None


def differentiable(second: Callable[..., Tensors]) -> Callable[..., Any]:
    """Decorator of backward(ctx, saved, g), whose forward pass set ctx.twice to
    `is_twice_differentiable()` and then saved x and weight last.

    saved: ctx.saved_tensors, which torch's checkpoint allows to be read once; second: as for
    `_Gradients`, after the ctx of the layer's forward pass.
    """

    def decorated(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def wrapper(ctx: Any, g: torch.Tensor) -> Any:
            saved = ctx.saved_tensors
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return backward(ctx, saved, g)
            if not ctx.twice:
                # Now, not when it is differentiated: torch.autograd.grad leaves out nodes that do
                # not lead to its inputs, and a layer's part would be missing without a word.
                raise RuntimeError(NO_SECOND)
            nothing: list[None] = []

            def first() -> Tensors:
                outputs = backward(ctx, saved, g)
                nothing.extend(outputs[3:])
                return outputs[:3]

            grads = _Gradients.apply(g, *saved[-2:], first, functools.partial(second, ctx))
            return *grads, *nothing

        return wrapper

    return decorated


def result(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """y in dtype, as what a forward pass returns. y itself if it has that dtype: of a y.to(dtype)
    that does nothing, Dynamo of torch 2.11 makes a second output, and all gradients are zero."""
    return y if y.dtype == dtype else y.to(dtype)


def apply(name: str, kind: type[function.Function], *args: Any) -> torch.Tensor:
    """kind.apply(*args), also inside of the transforms of torch.func."""
    if torch._C._are_functorch_transforms_active():
        return run_transformed(name, kind, args)
    if torch.compiler.is_compiling() or not context.hooks:
        return kind.apply(*args)
    with running(name, *args):
        return kind.apply(*args)
