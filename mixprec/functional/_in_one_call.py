"""A linear layer whose forward pass is one call of C++, and whose backward pass is another.

The same bits and saved memory as op by op (`_linear`, and `_grouped_linear` for groups), which
`use_backend("cpp")` asks for. A call that fails, before it has written anything, runs op by op once
more, which says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._context import context
from .._modes import nor_below
from ..memory.running import keep_as_is, running
from ..ops import linear_pass
from ..ops._dispatch import simulation
from ..ops.linear_pass import Kernels
from ..recipes import Recipe
from . import _products, operands
from ._derivatives import PLAIN, Tensors, is_plain_eager
from .operands import Matrix, Operand

_NOTHING = (None, None, None)


class CallFailed(Exception):
    """Of the call itself: an error of a hook of the program is not one."""


def kernels(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Recipe,
    out_dtype: torch.dtype,
) -> Kernels | None:
    """The kernels of a layer's passes, if nothing has to see its casts and products."""
    if (
        recipe.code is not None
        and is_plain_eager(x, weight)
        and x.dim() > 1
        and context.backend is None
        and not context.twice_differentiable
        and (bias is None or (type(bias) in PLAIN and bias.dtype != torch.float64))
        and not _products.is_observed()
        and not (torch._C._len_torch_function_stack() and simulation.current())
    ):
        k_major = not x.is_cpu and operands.wants_k_major(x.device, "tensor")
        return linear_pass.kernels(x, weight, bias, recipe, out_dtype, k_major)
    return None


def may_run(its: Kernels, g: torch.Tensor, main_grad: torch.Tensor | None) -> bool:
    """Whether the backward pass may be one call, of a layer whose forward pass was."""
    can_add = main_grad is None or its.accumulates
    unseen = is_plain_eager(g) and not _products.is_observed()
    return can_add and unseen and context.backend is None


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    product: _products.Product,
    recipe: Recipe,
    out_dtype: torch.dtype,
    grad_enabled: bool,
    its: Kernels,
    op_by_op: Callable[[Any, torch.Tensor], Tensors],
    offs: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight^T + bias, [..., N], of x [..., K] and weight [N, K]; CallFailed if that fails.

    op_by_op: the gradients, from the ctx of `_linear`, in a backward pass that is to be seen. offs:
    the ends of the groups of x [S, K], on a CPU; then weight is [E, N, K], and bias None.
    """
    args = x, weight, bias, product, recipe, out_dtype, grad_enabled, its, op_by_op, offs
    if not context.hooks:
        return _apply(*args)
    with running("linear" if offs is None else "grouped_linear", x, weight, bias):
        return _apply(*args)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        product: _products.Product,
        recipe: Recipe,
        out_dtype: torch.dtype,
        grad_enabled: bool,
        its: Kernels,
        op_by_op: Callable[[Any, torch.Tensor], Tensors],
        offs: torch.Tensor | None,
    ) -> torch.Tensor:
        _, delayed, qw, *_ = product
        need_x, need_w = ctx.needs_input_grad[:2]
        use_x_t, use_w_t = need_w and grad_enabled, need_x and grad_enabled
        qx, keep, scale, amax = None, None, None, None
        if context.casts and offs is None:
            qx, keep = operands.shared_cast(x, recipe, delayed, use_x_t, grad_enabled)
        if recipe.is_delayed and delayed is not None:
            scale, amax = delayed.scale, delayed.amax if grad_enabled else None
        rows = x if x.dim() == 2 else x.flatten(0, -2)
        args = (
            *((rows, None, None) if qx is None else qx.matrix),
            *((weight, None, None) if qw is None else qw.matrix),
            *(bias, scale, amax, recipe.code, its.choice, its.k_major, use_x_t, use_w_t, out_dtype),
            offs,
        )
        forward = linear_pass.linear_forward
        try:
            if x.is_cpu:
                y, *made = forward(*args)
            else:
                y, *made = linear_pass.run_on_gpu(forward, its, recipe, *args)
        except RuntimeError as error:
            raise CallFailed from error
        if amax is not None:
            torch.autograd.graph.increment_version(amax)
        if keep is not None and qx is None:
            qx = _operand(rows, made[:6])
            keep(qx)
        # What the products of the backward pass read: of a cast that is given, or was made (nothing
        # was made of a tensor that has its dtype), and of its transpose, where that has own scales.
        saved: list[Any] = [*_NOTHING, *_NOTHING]
        own_t = [False, False]
        for i, (needed, t, given) in enumerate(((need_w, rows, qx), (need_x, weight, qw))):
            if not needed:
                continue
            of_t = made[6 * i : 6 * i + 6]
            own_t[i] = of_t[3] is not None if given is None else given.own_t is not None
            matrix = of_t[3:] if own_t[i] else of_t[:3] if of_t[0] is not None else (t, None, None)
            saved[3 * i : 3 * i + 3] = matrix if given is None else given.for_backward
        ctx.recipe, ctx.products, ctx.its, ctx.own_t = recipe, (product,), its, own_t
        ctx.op_by_op = op_by_op
        ctx.x_shape, ctx.x_dtype, ctx.w_dtype = x.shape, x.dtype, weight.dtype
        ctx.by_columns = offs is None and weight.stride(0) == 1 and weight.stride(1) > 1
        ctx.bias_dtype = None if bias is None else bias.dtype
        saved.append(offs)
        if context.op is not None:
            keep_as_is(*saved[1:])
        ctx.save_for_backward(*saved)
        if x.dim() == 2 and qw is None:  # one that is given may be another weight's
            return y
        # Not a view: autograd forbids in-place ops on it, such as nn.ReLU(inplace=True).
        return torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    @nor_below
    def backward(ctx: Any, g: torch.Tensor) -> Tensors:
        its, (product,) = ctx.its, ctx.products
        saved, grads = None, None
        if not torch.is_grad_enabled() and may_run(its, g, product.main_grad):
            saved = ctx.saved_tensors
            grads = gradients(
                g, saved[:3], saved[3:6], product, ctx.recipe, its, ctx.x_dtype, ctx.w_dtype,
                ctx.bias_dtype if ctx.needs_input_grad[2] else None, ctx.by_columns, saved[6],
            )  # fmt: skip
        # Not where x or weight has been replaced by one of another K: autograd might take that for
        # an expanded one.
        k = ctx.x_shape[-1]
        if (
            grads is None
            or (grads[0] is not None and grads[0].shape[1] != k)
            or (grads[1] is not None and grads[1].shape[-1] != k)
        ):
            return *ctx.op_by_op(_OpByOp(ctx, saved), g), *[None] * 7
        grad_x = grads[0]
        if grad_x is not None and g.dim() != 2:
            grad_x = grad_x.view(ctx.x_shape)
        return grad_x, *grads[1:], *[None] * 7


def gradients(
    g: torch.Tensor,
    x: Any,
    w: Any,
    product: _products.Product,
    recipe: Recipe,
    its: Kernels,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    by_columns: bool,
    offs: torch.Tensor | None = None,
) -> Tensors | None:
    """Those of x [M, K], weight and bias, from what was saved of x and of weight: three times None
    for one whose operand is not needed. bias_dtype: None without a bias that needs one. offs: as in
    `linear`. None if the call has failed."""
    delayed, main_grad = product.delayed, product.main_grad
    rows = g if g.dim() == 2 else g.flatten(0, -2)
    scale = amax = seed = None
    casts = x[0] is not None or w[0] is not None
    if casts and recipe.is_delayed and delayed is not None:
        scale, amax = delayed.scale, delayed.grad_amax
    if casts and recipe.is_random:
        # Groups are cast twice, op by op: as they are, and with space between them.
        seed = operands.seed_of(g.device, 1 if offs is None or x[0] is None else 2)
    in_call = bias_dtype if g.is_cpu and g.dtype.itemsize == 2 else None
    by_columns = by_columns and recipe.power_of_two_scale and not recipe.is_block
    args = (
        *(rows, *x, *w, main_grad, scale, amax, seed, recipe.code, its.choice, its.k_major),
        *(x_dtype, w_dtype, in_call, by_columns, offs),
    )
    backward = linear_pass.linear_backward
    try:
        if g.is_cpu:
            grad_x, grad_w, grad_b = backward(*args)
        else:
            grad_x, grad_w, grad_b = linear_pass.run_on_gpu(backward, its, recipe, *args)
    except RuntimeError:
        return None
    written = [t for t in (None if x[0] is None else main_grad, amax) if t is not None]
    if written:
        torch.autograd.graph.increment_version(written)
    if bias_dtype is not None and in_call is None:
        grad_b = _products.grad_bias(g, bias_dtype)
    return grad_x, grad_w, grad_b


def product(
    x: Matrix,
    weight: torch.Tensor,
    its: Kernels,
    kept: Operand | None,
    bias: torch.Tensor | None,
    recipe: Recipe,
    out_dtype: torch.dtype,
    use_w_t: bool,
) -> tuple[torch.Tensor, Operand]:
    """x @ weight^T + bias of an x that is cast, and the operand of weight: `kept`, or made here."""
    w = (weight, None, None) if kept is None else kept.matrix
    y, *made = linear_pass.linear_forward(
        *x, *w, bias, None, None, recipe.code, its.choice, its.k_major, False, use_w_t, out_dtype
    )
    return y, kept or _operand(weight, made[6:])


def _operand(x: torch.Tensor, made: list[Any]) -> Operand:
    """What linear_forward made of x: nothing of a tensor that has its dtype."""
    matrix = Matrix(x) if made[0] is None else Matrix(*made[:3])
    return Operand(matrix, None if made[3] is None else Matrix(*made[3:]))


# Of autograd itself: that of torch.autograd.Function looks for transforms, which there are not.
_apply = super(torch.autograd.Function, _Linear).apply


class _OpByOp:
    """A ctx as `_linear` reads it."""

    backend, simulated, twice = None, None, False

    def __init__(self, ctx: Any, saved: Any) -> None:
        self._ctx, self._saved = ctx, saved  # which torch's checkpoint allows to be read once
        self.like_w = _products.WeightLike(ctx.w_dtype, ctx.by_columns)

    @property
    def saved_tensors(self) -> Any:
        return *(self._ctx.saved_tensors if self._saved is None else self._saved), *_NOTHING

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)
