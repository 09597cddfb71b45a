"""norm -> linear layers -> activation -> linear, each cast in the same pass as what computes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .._context import context
from ..memory.running import keep_as_is, saved_as
from ..ops._dispatch import simulation
from ..ops._dispatch.casts import Cast
from ..ops.act_quantize import act_backward_op, act_quantize_op
from ..ops.linear_pass import Kernels
from ..ops.norm_quantize import norm_backward_op, norm_quantize_op
from ..recipes import Recipe
from . import _in_one_call, operands
from ._derivatives import NO_SECOND, apply, on_backend_of_forward
from ._products import Gemms, Product, WeightLike, grad_bias
from .operands import NOTHING, Matrix, Operand, OperandCast, transposed


class Norm(NamedTuple):
    """The settings of a norm: subtract_mean is True for LayerNorm, False for RMSNorm."""

    eps: float
    subtract_mean: bool


class Fused(torch.autograd.Function):
    """Products of one operand, which may be a norm's output; with `act`, all but the last product
    are followed by act(h) or act(h) * up, the operand of the last one.

    low: the dtype of the values between the norm and the last product, and of their gradients.
    weights_and_biases: of each product in turn. Returns the outputs of the products (with `act`, of
    the last one) and, with a residual, x + residual.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        norm_bias: torch.Tensor | None,
        norm: Norm | None,
        act: str | None,
        products: tuple[Product, ...],
        recipe: Recipe,
        low: torch.dtype,
        out_dtype: torch.dtype,
        grad_enabled: bool,
        simulated: str | None,
        its: Kernels | None,
        *weights_and_biases: Any,
    ) -> Any:
        weights, biases = weights_and_biases[0::2], weights_and_biases[1::2]
        ctx.norm, ctx.act, ctx.products, ctx.recipe, ctx.low = norm, act, products, recipe, low
        gemms = ctx.gemms = [Gemms(recipe, p.name, simulated) for p in products]
        ctx.backend, ctx.its = context.backend, its
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        ctx.like_w = [WeightLike.of(w) for w in weights]
        ctx.bias_dtypes = [None if b is None else b.dtype for b in biases]
        # Of x, the residual or the norm; of each weight; of each bias.
        needs = ctx.needs_input_grad
        need_x, need_w, need_bias = any(needs[:4]), needs[13::2], needs[14::2]
        first = products[:-1] if act else products
        need_h = need_x or any(need_w[: len(first)]) or any(need_bias[: len(first)])
        ctx.needs = need_x, need_w, need_bias, need_h
        # The weights that a gradient passes through: to x, and to what is before the activation.
        passes = [need_x if i < len(first) else need_h for i in range(len(products))]

        qx, total, mean, rstd = _operand_of_x(
            x, residual, norm_weight, norm_bias, norm, recipe, first,
            any(need_w[: len(first)]) and grad_enabled, grad_enabled,
        )  # fmt: skip
        qw: list[Operand] = []

        def multiply(x: Operand, dtype: torch.dtype) -> torch.Tensor:
            """By the next weight."""
            i = len(qw)
            kept, use_t = products[i].quantized_weight, grad_enabled and passes[i]
            if its is not None:
                args = x.matrix, weights[i], its, kept, biases[i], recipe, dtype, use_t
                try:
                    y, w = _in_one_call.product(*args)
                    qw.append(w)
                    return y
                except RuntimeError:
                    pass  # what is wrong is said below
            w = kept or operands.cast(
                weights[i], "w", recipe, None, use_t=use_t, record=grad_enabled
            )
            qw.append(w)
            return gemms[i].forward(x.matrix, w.matrix, biases[i], dtype)

        outputs = [multiply(qx, low if act else out_dtype) for _ in first]
        qa, hidden = None, []
        if act:
            hidden = outputs
            up = hidden[1] if len(hidden) == 2 else None
            last = products[-1]
            use_t = need_w[-1] and grad_enabled
            how = OperandCast.make("x", recipe, last.delayed, x.device, use_t, grad_enabled)
            qa = how.operand(act_quantize_op(hidden[0], up, act, *how.cast))
            outputs = [multiply(qa, out_dtype)]

        saved_x = qx.for_backward if any(need_w[: len(first)]) else NOTHING
        saved_a = qa.for_backward if qa and need_w[-1] else NOTHING
        saved_w = [
            t
            for w, passed in zip(qw, passes, strict=True)
            for t in (w.for_backward if passed else NOTHING)
        ]
        ctx.own_t = [q is not None and q.own_t is not None for q in (qx, qa, *qw)]
        keep_as_is(*saved_x[1:], *saved_a[1:], mean, rstd, *saved_w)
        saved_as("normalized", total if norm else None)
        saved_as("gate" if len(hidden) == 2 else "hidden", *hidden[:1])
        norm_saved = (total, norm_weight, mean, rstd) if norm and need_x else (None,) * 4
        ctx.has_bias, ctx.hidden = norm_bias is not None, len(hidden)
        ctx.norm_dtypes = [None if t is None else t.dtype for t in (norm_weight, norm_bias)]
        ctx.save_for_backward(
            *norm_saved, *saved_x, *saved_a, *saved_w, *(hidden if need_h else [None] * len(hidden))
        )
        ctx.set_materialize_grads(False)
        shape = x.shape[:-1]
        views = [torch.ops.aten._unsafe_view.default(y, (*shape, y.shape[-1])) for y in outputs]
        if residual is None:
            return tuple(views)
        return (*views, total.view(ctx.x_shape))  # x may have had one dimension

    @staticmethod
    @on_backend_of_forward
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        saved: Any = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(NO_SECOND)
        recipe, products, gemms, act = ctx.recipe, ctx.products, ctx.gemms, ctx.act
        need_x, need_w, need_bias, need_h = ctx.needs
        n = 10 + 3 * len(products)
        kept = [Matrix(*saved[i : i + 3]) for i in range(4, n, 3)]
        x_t, a_t, *weights = map(transposed, kept, ctx.own_t)
        hidden = saved[n:]
        first = products[:-1] if act else products
        g_total = grads[-1] if len(grads) > (1 if act else len(products)) else None
        grad_wb: list[torch.Tensor | None] = [None] * (2 * len(products))

        qgs: list[Operand | None] = []
        if act:
            g, last = grads[0], products[-1]
            one, like = None, ctx.like_w[-1]
            its = ctx.its if need_h else None
            if g is not None and its is not None and _in_one_call.may_run(its, g, last.main_grad):
                one = _in_one_call.gradients(
                    g, kept[1], kept[-1], last, recipe, its, ctx.low, like.dtype,
                    ctx.bias_dtypes[-1] if need_bias[-1] else None, like.by_columns,
                )  # fmt: skip
            if g is None:
                qgs = [None] * len(first)
            elif one is not None:
                g_a, *grad_wb[-2:] = one
                qgs = _before_activation(ctx, g_a, hidden, first, grad_wb)
            else:
                qg = operands.cast(g, "g", recipe, last.delayed, use_t=need_w[-1])
                if need_w[-1]:
                    grad_wb[-2] = gemms[-1].grad_weight(
                        qg.matrix_t, a_t, ctx.like_w[-1], last.main_grad
                    )
                if need_bias[-1]:
                    grad_wb[-1] = grad_bias(g, ctx.bias_dtypes[-1])
                if need_h:
                    g_a = gemms[-1].grad_input(qg.matrix, weights[-1], ctx.low)
                    qgs = _before_activation(ctx, g_a, hidden, first, grad_wb)
        else:
            for i, (p, g) in enumerate(zip(first, grads, strict=False)):
                if g is None or not (need_x or need_w[i]):
                    qgs.append(None)
                else:
                    qgs.append(operands.cast(g, "g", recipe, p.delayed, use_t=need_w[i]))
                if need_bias[i] and g is not None:
                    grad_wb[2 * i + 1] = grad_bias(g, ctx.bias_dtypes[i])

        for i, (p, qg_h) in enumerate(zip(first, qgs, strict=False)):
            if qg_h is not None and need_w[i]:
                grad_wb[2 * i] = gemms[i].grad_weight(
                    qg_h.matrix_t, x_t, ctx.like_w[i], p.main_grad
                )
        dx = dw = db = None
        if need_x:
            sources = [
                (gemms[i], qg_h.matrix, weights[i])
                for i, qg_h in enumerate(qgs)
                if qg_h is not None
            ]
            dx, dw, db = _grad_of_x(ctx, sources, saved[:4], g_total)
        residual = dx if ctx.needs_input_grad[1] else None
        return (dx, residual, dw, db, *[None] * 9, *grad_wb)


def _operand_of_x(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    norm: Norm | None,
    recipe: Recipe,
    first: Sequence[Product],
    use_t: bool,
    record: bool,
) -> tuple[Operand, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The operand that the first products share, x + residual, and the norm's statistics."""
    states = [p.delayed for p in first]
    if x.dim() == 1:
        x = x.unsqueeze(0)
        residual = None if residual is None else residual.unsqueeze(0)
    if norm is None:
        qx = operands.cast_input(x, recipe, states[0], use_t=use_t, grad_enabled=record)
        total, mean, rstd = x, None, None
    else:
        how = OperandCast.make("x", recipe, states[0], x.device, use_t, record)
        results = norm_quantize_op(
            x, residual, norm_weight, norm_bias, norm.eps, norm.subtract_mean, *how.cast
        )
        qx = how.operand(results)
        total, mean, rstd = results[5:]
        total = x if residual is None else total
    for state in states[1:] if record else ():  # they see the same x, by the scale of the first
        if state is not None and states[0] is not None:
            state.amax.clamp_min_(states[0].amax)
    return qx, total, mean, rstd


def _before_activation(
    ctx: Any,
    g: Any,
    hidden: Sequence[torch.Tensor],
    first: Sequence[Product],
    grad_wb: list[torch.Tensor | None],
) -> list[Operand | None]:
    """`_through_activation`, and the gradients of the biases."""
    qgs, plain = _through_activation(ctx, g, hidden, first)
    for i, grad_h in enumerate(plain):
        if ctx.needs[2][i]:
            grad_wb[2 * i + 1] = grad_bias(grad_h, ctx.bias_dtypes[i])
    return qgs


def _through_activation(
    ctx: Any, g: torch.Tensor, hidden: Sequence[torch.Tensor], first: Sequence[Product]
) -> tuple[list[Operand | None], list[torch.Tensor]]:
    """The gradients of `hidden` as operands, and, where a bias needs them, as they are."""
    recipe, use_t = ctx.recipe, any(ctx.needs[1][: len(first)])
    up = hidden[1] if len(hidden) == 2 else None
    # The sum for a bias takes the values before the cast; a second delayed scale has no argument.
    how = OperandCast.make("g", recipe, first[0].delayed, g.device, use_t)
    is_cast = how.cast.dtype != ctx.low
    separate = is_cast and (
        any(ctx.needs[2][: len(first)]) or (up is not None and recipe.is_delayed)
    )
    results = act_backward_op(g, hidden[0], up, ctx.act, *(Cast(ctx.low) if separate else how.cast))
    pieces: Any = (results[:5], results[5:])[: len(first)]
    if separate:
        plain = [piece[0] for piece in pieces]
        return [
            operands.cast(grad_h, "g", recipe, p.delayed, use_t=use_t)
            for p, grad_h in zip(first, plain, strict=True)
        ], plain
    return [*map(how.operand, pieces)], [] if is_cast else [piece[0] for piece in pieces]


def _grad_of_x(
    ctx: Any,
    sources: Sequence[tuple[Gemms, Matrix, Matrix]],
    norm_saved: Any,
    g_total: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of x, of the norm's weight and of its bias. The products' are added in FP32."""
    if not sources:
        return g_total, None, None
    one = ctx.low if ctx.norm else ctx.x_dtype
    gemms, qg_h, w_t = sources[0]
    g = gemms.grad_input(qg_h, w_t, one if len(sources) == 1 else torch.float32)
    for gemms, qg_h, w_t in sources[1:]:
        gemms.add_grad_input(g, qg_h, w_t)
    if ctx.norm is None:
        return g.to(ctx.x_dtype).view(ctx.x_shape), None, None
    total, norm_weight, mean, rstd = norm_saved
    g_total = None if g_total is None else g_total.view(total.shape)
    dx, dw, db = norm_backward_op(
        g.view(total.shape), total, norm_weight, mean, rstd, g_total, ctx.has_bias
    )
    weight_dtype, bias_dtype = ctx.norm_dtypes
    return (
        dx.view(ctx.x_shape),
        None if weight_dtype is None else dw.to(weight_dtype),
        None if bias_dtype is None else db.to(bias_dtype),
    )


def run_fused(
    op: str,
    x: torch.Tensor,
    products: Sequence[Product],
    weights_and_biases: Sequence[torch.Tensor | None],
    recipe: Recipe,
    out_dtype: torch.dtype,
    norm: Norm | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    act: str | None = None,
) -> tuple[torch.Tensor, ...]:
    """`Fused`, for arguments that have been checked."""
    its, pairs = None, zip(weights_and_biases[::2], weights_and_biases[1::2], strict=True)
    if x.is_cpu:  # where one answer is that of all products
        each = [_in_one_call.kernels(x, w, b, recipe, out_dtype) for w, b in pairs if w is not None]
        its = None if None in each else each[0]
    results: Any = apply(
        op,
        Fused,
        x,
        residual,
        norm_weight,
        norm_bias,
        norm,
        act,
        tuple(products),
        recipe,
        recipe.dtype,
        out_dtype,
        torch.is_grad_enabled(),
        simulation.current(),
        its,
        *weights_and_biases,
    )
    return tuple(results)
