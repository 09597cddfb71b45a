"""linear and matmul with gradients: three GEMMs in the formats of a recipe."""

from __future__ import annotations

from typing import Any

import torch

from .._context import context
from ..memory.running import keep_as_is
from ..ops._dispatch import checks, simulation
from ..recipes import Recipe
from . import _in_one_call, _products, _tensor_parallel, operands
from ._arguments import check_outliers, check_output, check_state, main_grad_of
from ._derivatives import (
    Tensors,
    apply,
    differentiable,
    is_twice_differentiable,
    on_backend_of_forward,
    result,
)
from ._gathered import Gathered
from ._products import LOCAL, Gemms, Product, WeightLike, clips, grad_bias, saturate
from .operands import NOTHING, Delayed, Matrix, Operand, transposed


def _second(ctx: Any, inputs: Any, grads: Tensors) -> Tensors:
    """The gradients of the inputs g, x and weight, for those of the first gradients

    g @ weight, g^T @ x and sum(g).
    """
    (g, x, weight), (u, v, s) = inputs, grads
    recipe = Recipe.parse("bf16") if ctx.recipe.is_scaled else ctx.recipe  # one of 16 bits

    def times(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return linear(a, b, recipe=recipe, out_dtype=dtype)

    def rows(t: torch.Tensor) -> torch.Tensor:
        return t.reshape(-1, t.shape[-1])

    grad_g = grad_x = grad_w = None
    if u is not None:
        grad_g = times(u, weight, g.dtype)
        if weight.requires_grad:
            grad_w = times(rows(g).t(), rows(u).t(), weight.dtype)
    if v is not None:
        if x.requires_grad:
            grad_x = times(g, v.t(), x.dtype)
        term = times(x, v, g.dtype)
        grad_g = term if grad_g is None else grad_g + term
    if s is not None:
        term = s.to(g.dtype).expand_as(g)
        grad_g = term if grad_g is None else grad_g + term
    return grad_g, grad_x, grad_w


class _Linear(torch.autograd.Function):
    """y [..., N] = x [..., K] @ weight [N, K]^T + bias [N], op by op."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        product: Product,
        recipe: Recipe,
        out_dtype: torch.dtype,
        grad_enabled: bool,
        simulated: str | None,
    ) -> torch.Tensor:
        ctx.recipe, ctx.backend, ctx.products, ctx.simulated = (
            recipe, context.backend, (product,), simulated,
        )  # fmt: skip
        ctx.x_shape, ctx.x_dtype, ctx.like_w = x.shape, x.dtype, WeightLike.of(weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        # What is not saved with save_for_backward is modified in place.
        _, delayed, quantized_weight, name, outliers, over = product
        over = over or LOCAL
        rest_x, rest_w, high_x, high_w = x, weight, None, None
        if outliers is not None:
            (rest_x, high_x), (rest_w, high_w) = (_products.split(t, outliers) for t in (x, weight))
        # Save only what the backward GEMMs need: w for grad_input, x for grad_weight. Both sum over
        # another dimension than the forward GEMM, so they take the transposes.
        need_x, need_w = ctx.needs_input_grad[:2]
        use_t = need_w and grad_enabled
        if type(rest_x) is Gathered:
            qx = rest_x.operand(recipe, name, use_t)
        else:
            qx = operands.cast_input(
                rest_x, recipe, delayed, use_t=use_t, grad_enabled=grad_enabled, groups=over.x
            )
        qw = quantized_weight or operands.cast(
            rest_w,
            "w",
            recipe,
            delayed,
            use_t=need_x and grad_enabled,
            record=grad_enabled,
            groups=over.w,
        )
        saved_x = qx.for_backward if need_w else NOTHING
        saved_w = qw.for_backward if need_x else NOTHING
        ctx.own_t = qx.own_t is not None, qw.own_t is not None
        ctx.twice = is_twice_differentiable()
        keep_as_is(*saved_x[1:], *saved_w)
        columns = outliers, high_x if need_w else None, high_w if need_x else None
        keep_as_is(*columns)
        ctx.save_for_backward(*saved_x, *saved_w, *columns, *((x, weight) if ctx.twice else ()))
        dtype = out_dtype if outliers is None else torch.float32
        y = Gemms(recipe, name, simulated).forward(qx.matrix, qw.matrix, bias, dtype)
        if high_x is not None and high_w is not None:
            _products.add(y, high_x, high_w, name, simulated)
            y = result(y, out_dtype)
        # Not a view: autograd forbids in-place ops on it, such as nn.ReLU(inplace=True).
        return torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Tensors:
        return *gradients(ctx, g), *[None] * 5


@on_backend_of_forward
@differentiable(_second)
def gradients(ctx: Any, saved: tuple[torch.Tensor, ...], g: torch.Tensor) -> Tensors:
    """Of x, weight and bias, op by op."""
    gemms = Gemms(ctx.recipe, ctx.products[0].name, ctx.simulated)
    x_t = transposed(Matrix(*saved[:3]), ctx.own_t[0])  # [K, M]
    w_t = transposed(Matrix(*saved[3:6]), ctx.own_t[1])  # [K, N]
    outliers, x_outliers, w_outliers = saved[6:9]
    need_x, need_w, need_bias = ctx.needs_input_grad[:3]
    main_grad, delayed = ctx.products[0].main_grad, ctx.products[0].delayed
    grad_x = grad_w = None
    if need_x or need_w:
        groups = (ctx.products[0].over or LOCAL).g
        qg = operands.cast(g, "g", ctx.recipe, delayed, use_t=need_w, groups=groups)
    if need_x:
        grad_x = gemms.grad_input(qg.matrix, w_t, ctx.x_dtype)
    if need_w:
        grad_w = gemms.grad_weight(qg.matrix_t, x_t, ctx.like_w, main_grad)
    if outliers is not None:
        _products.put(gemms, main_grad, g, outliers, (grad_x, w_outliers), (grad_w, x_outliers))
    grad_b = grad_bias(g, ctx.bias_dtype) if need_bias else None
    return None if grad_x is None else grad_x.view(ctx.x_shape), grad_w, grad_b


def check_input(x: torch.Tensor, weight: torch.Tensor, op: str = "linear", name: str = "") -> None:
    """The checks of every call of a layer of this name: x, and its weight's dtype and device."""
    k = weight.shape[1]
    valid = isinstance(x, torch.Tensor) and x.dtype in checks.FLOATS
    if not valid or (x.layout != torch.strided and not torch.compiler.is_compiling()):
        checks.has_dtype(checks.of_layer(op, name), "x", x, checks.FLOATS, checks.CAST_X)
    if x.dim() == 0 or x.shape[-1] != k:
        raise ValueError(
            f"{checks.of_layer(op, name)}: x must be [..., K] with K = {k} as in weight [N, K], "
            f"got shape {tuple(x.shape)}"
        )
    if weight.dtype not in checks.FLOATS or weight.device != x.device:
        op = checks.of_layer(op, name)
        checks.has_dtype(op, "weight", weight, checks.FLOATS, checks.CAST_WEIGHT)
        checks.on_device(op, "weight", weight, x.device, "x")


def run_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    product: Product,
    recipe: Recipe,
    out_dtype: torch.dtype,
    clipped: torch.Tensor | None,
) -> torch.Tensor:
    """`linear`, for arguments that have been checked."""
    clip = recipe.clip_activations and clips(recipe, out_dtype)
    dtype, grad_enabled = torch.float32 if clip else out_dtype, torch.is_grad_enabled()
    args, y = (x, weight, bias, product, recipe, dtype, grad_enabled), None
    may = product.over is None or not recipe.is_scaled
    if may and (its := _in_one_call.kernels(x, weight, bias, recipe, dtype)) is not None:
        try:
            y = _in_one_call.linear(*args, its, gradients)
        except _in_one_call.CallFailed:
            y = None  # what is wrong is said below
    if y is None and _tensor_parallel.is_sharded(weight):
        return _tensor_parallel.linear(
            x,
            weight,
            bias,
            product,
            recipe,
            lambda x, w, bias, its: run_linear(x, w, bias, its, recipe, out_dtype, clipped),
        )
    if y is None:
        y = apply("linear", _Linear, *args, simulation.current())
    return saturate(y, clipped) if clip else y


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    recipe: Recipe | str = "fp8",
    out_dtype: torch.dtype | None = None,
    name: str = "",
    delayed: Delayed | None = None,
    quantized_weight: Operand | None = None,
    clipped: torch.Tensor | None = None,
    outliers: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return y = q(x) @ q(weight)^T + bias, [..., N], with gradients computed the same way.

    x: [..., K], one or more dimensions, any strides; weight: [N, K]; both fp32, bf16 or fp16.
    bias: [N], fp32, bf16, fp16 or fp64. recipe: a name ("bf16", "fp16", "fp8", "fp8-rowwise",
    "fp8-block", ...) or a Recipe, which says what q is for x, weight and the incoming gradient g.
    out_dtype: fp32, bf16 or fp16; None takes x's. name: the layer's, for audit. delayed: the state
    of a recipe with delayed scaling, which mixprec.nn.Linear keeps. quantized_weight: what
    `operands.cast(weight, "w", recipe, delayed, use_t=True)` returned for this weight. clipped:
    int64 [], counts the outputs that a recipe with clip_activations saturated. outliers: int64
    [k], different indices of features, of a recipe that has some: all products read these in bf16.

        grad of x      = q(g) @ q(weight)    in x's dtype
        grad of weight = q(g)^T @ q(x)       in weight's dtype, or added to weight.main_grad
        grad of bias   = sum of g over rows  in bias's dtype

    Sums are FP32 and each result is rounded once. What is saved for backward is q(x) and
    q(weight): one byte per element in FP8, the codes and scales of block formats, and the tensors
    themselves if they have the recipe's 16-bit dtype. Gradients that are not required are not
    computed, and nothing is saved for them. Inf and NaN in x, weight or g propagate as Inf or NaN,
    never as a large finite value. Second derivatives need `twice_differentiable`.
    Inside torch.func.grad, vjp, jacrev and vmap each sample is a call of its own; jvp, hessian and
    recipes with state raise RuntimeError. TypeError or ValueError names an invalid argument.

    A weight with an attribute main_grad (fp32, its shape) and no `grad` gets its gradient added
    there, unrounded; `grad` stays None, so that DDP does not see it. If hooks are registered on
    the weight, they get the gradient in its dtype, and the result is added to main_grad.
    """
    recipe = Recipe.parse(recipe)
    checks.is_tensor("linear", "weight", weight)
    if weight.dim() != 2:
        raise ValueError(f"linear: weight must be [N, K], got shape {tuple(weight.shape)}")
    check_input(x, weight, name=name)
    out_dtype = x.dtype if out_dtype is None else out_dtype
    check_output("linear", weight, bias, out_dtype, "[N]")
    check_state("linear", recipe, delayed, clipped, x.device, "mixprec.nn.Linear")
    check_outliers("linear", recipe, outliers, weight.shape[1], x.device)
    if quantized_weight is not None and x.requires_grad and torch.is_grad_enabled():
        operands.check_transpose("linear", quantized_weight, recipe)
    main_grad, kept = main_grad_of("linear", weight), delayed if recipe.is_delayed else None
    product = Product(main_grad, kept, quantized_weight, name, outliers)
    return run_linear(x, weight, bias, product, recipe, out_dtype, clipped)


def matmul(
    a: torch.Tensor, b: torch.Tensor, *, recipe: Recipe | str, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return q(a) @ q(b), [..., N], with gradients: `linear` without a bias and with b = weight^T.

    a: [..., K], cast as the recipe's x; b: [K, N], cast as its w; any strides, fp32, bf16 or
    fp16. out_dtype: None takes a's dtype. Raises the same errors as `linear`.
    """
    recipe = Recipe.parse(recipe)
    checks.is_tensor("matmul", "a", a)
    checks.is_tensor("matmul", "b", b)
    if b.dim() != 2 or a.dim() == 0 or a.shape[-1] != b.shape[0]:
        raise ValueError(
            f"matmul: a must be [..., K] and b [K, N], got a {tuple(a.shape)}, b {tuple(b.shape)}"
        )
    checks.has_dtype("matmul", "a", a, checks.FLOATS)
    checks.has_dtype("matmul", "b", b, checks.FLOATS)
    return linear(a, b.t(), recipe=recipe, out_dtype=out_dtype)
