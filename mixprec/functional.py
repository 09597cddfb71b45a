"""linear and matmul with gradients: three GEMMs in the formats that a recipe names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from .formats import Format
from .ops import _backends, _checks
from .recipes import Recipe

# kind ("forward", "grad_input", "grad_weight"), layer name, format of a, format of b
Observer = Callable[[str, str, str, str], None]

_observer: Observer | None = None


@contextlib.contextmanager
def observed(callback: Observer) -> Iterator[None]:
    """Call callback(kind, name, a_format, b_format) before each GEMM run inside the block.

    kind: "forward", "grad_input" or "grad_weight"; name: the `name` given to `linear`; the
    formats are names such as "e4m3". A backward pass is seen if it runs inside the block. Blocks
    nest: the innermost callback is called. The setting is global to the process (CUDA's backward
    runs in a thread of its own) and restored when the block ends.
    """
    global _observer
    before, _observer = _observer, callback
    try:
        yield
    finally:
        _observer = before


# Below, the ops are called through _backends.call: `linear` has checked the arguments, and the
# public functions would do so again at every call (gemm of 8 x 32 x 16: 12 us against 6).


class _Operand(NamedTuple):
    """A tensor seen as a matrix and cast: data [R, C], data_t [C, R], fp32 scale_inv (FP8)."""

    data: torch.Tensor
    data_t: torch.Tensor
    scale_inv: torch.Tensor | None


def _cast(x: torch.Tensor, fmt: Format, recipe: Recipe, *, use_t: bool) -> _Operand:
    """Cast x [..., C] to `fmt`. use_t: whether a GEMM will read data_t."""
    if x.dim() == 1:
        x = x.unsqueeze(0)
    if fmt.bits == 16:
        data = x.to(fmt.dtype).flatten(0, -2)  # x itself, not a copy, where its dtype is right
        return _Operand(data, data.t(), None)
    device = x.device.type
    transpose = use_t and _wants_k_major(device)
    data, data_t, scale_inv, _ = _backends.call(
        "quantize", device, x, fmt.dtype, None, transpose, recipe.power_of_two_scale
    )
    data = data.flatten(0, -2)
    return _Operand(data, data_t if transpose else data.t(), scale_inv)


def _wants_k_major(device_type: str) -> bool:
    """Whether the FP8 GEMM reads operands only with K contiguous in memory.

    FP8 tensor cores do, and K is another dimension in the backward GEMMs than in the forward one:
    there `quantize` writes the transposed copy in the same pass. A CPU kernel reads any strides.
    """
    return device_type == "cuda"


def _gemm(
    kind: str,
    ctx: Any,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor | None,
    b_scale_inv: torch.Tensor | None,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    if _observer is not None:
        a_format, b_format = getattr(ctx.recipe, kind)
        _observer(kind, ctx.name, a_format.name, b_format.name)
    fast_accum = False
    return _backends.call(
        "gemm", a.device.type, a, b, a_scale_inv, b_scale_inv, bias, out_dtype, fast_accum
    )


class _Linear(torch.autograd.Function):
    """y [..., N] = x [..., K] @ weight [N, K]^T + bias [N]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        recipe: Recipe,
        out_dtype: torch.dtype,
        name: str,
        grad_enabled: bool,
    ) -> torch.Tensor:
        ctx.recipe, ctx.name = recipe, name
        ctx.x_shape, ctx.x_dtype, ctx.w_dtype = x.shape, x.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        # Each backward GEMM saves only what it multiplies with: w for grad_input, x for
        # grad_weight. Both contract over another dimension than the forward: their data_t.
        need_x, need_w = ctx.needs_input_grad[:2]
        qx = _cast(x, recipe.x, recipe, use_t=need_w and grad_enabled)
        qw = _cast(weight, recipe.w, recipe, use_t=need_x and grad_enabled)
        saved_x = (qx.data_t, qx.scale_inv) if need_w else (None, None)
        saved_w = (qw.data_t, qw.scale_inv) if need_x else (None, None)
        ctx.save_for_backward(*saved_x, *saved_w)
        if bias is not None and bias.dtype == torch.float64:
            bias = bias.float()
        b = qw.data.t()
        y = _gemm("forward", ctx, qx.data, b, qx.scale_inv, qw.scale_inv, out_dtype, bias)
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_t, x_scale_inv, w_t, w_scale_inv = ctx.saved_tensors  # [K, M], [], [K, N], []
        need_x, need_w, need_bias = ctx.needs_input_grad[:3]
        grad_x = grad_w = grad_bias = None
        if need_x or need_w:
            qg = _cast(g, ctx.recipe.g, ctx.recipe, use_t=need_w)
        if need_x:
            b = w_t.t()
            grad_x = _gemm("grad_input", ctx, qg.data, b, qg.scale_inv, w_scale_inv, ctx.x_dtype)
            grad_x = grad_x.view(ctx.x_shape)
        if need_w:
            b = x_t.t()
            grad_w = _gemm("grad_weight", ctx, qg.data_t, b, qg.scale_inv, x_scale_inv, ctx.w_dtype)
        if need_bias:
            rows = g.unsqueeze(0) if g.dim() == 1 else g.flatten(0, -2)
            grad_bias = rows.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return grad_x, grad_w, grad_bias, None, None, None, None


def _check(
    op: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: object
) -> None:
    _checks.is_tensor(op, "x", x)
    _checks.is_tensor(op, "weight", weight)
    if weight.dim() != 2:
        raise ValueError(f"{op}: weight must be [N, K], got shape {tuple(weight.shape)}")
    n, k = weight.shape
    if x.dim() == 0 or x.shape[-1] != k:
        raise ValueError(
            f"{op}: x must be [..., K] with K = {k} as in weight [N, K], got shape {tuple(x.shape)}"
        )
    _checks.has_dtype(op, "x", x, _checks.FLOATS)
    _checks.has_dtype(op, "weight", weight, _checks.FLOATS)
    _checks.on_device(op, "weight", weight, x.device, "x")
    if bias is not None:
        _checks.is_tensor(op, "bias", bias)
        _checks.has_dtype(op, "bias", bias, (*_checks.FLOATS, torch.float64))
        _checks.has_shape(op, "bias", bias, (n,), "[N]")
        _checks.on_device(op, "bias", bias, x.device, "x")
    if out_dtype not in _checks.FLOATS:
        raise ValueError(f"{op}: out_dtype must be float32, bfloat16 or float16, got {out_dtype}")


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    recipe: Recipe | str = "fp8",
    out_dtype: torch.dtype | None = None,
    name: str = "",
) -> torch.Tensor:
    """Return y = q(x) @ q(weight)^T + bias, [..., N], with gradients computed the same way.

    x: [..., K], one or more dimensions, any strides; weight: [N, K]; both fp32, bf16 or fp16.
    bias: [N], fp32, bf16, fp16 or fp64. recipe: "bf16", "fp16", "fp8" or a Recipe, which says
    what q is for x, weight and the incoming gradient g. out_dtype: fp32, bf16 or fp16; None takes
    x's. name: handed to `observed`.

        grad of x      = q(g) @ q(weight)    in x's dtype
        grad of weight = q(g)^T @ q(x)       in weight's dtype
        grad of bias   = sum of g over rows  in bias's dtype

    Sums are FP32 and each result is rounded once. What is saved for backward is q(x) and
    q(weight): one byte an element in FP8, and the tensors themselves where they have the recipe's
    16-bit dtype. A gradient that nobody needs costs nothing and saves nothing. Inf and NaN in x,
    weight or g come out as Inf or NaN in what is computed from them, never as a large finite
    value. There is no second derivative: RuntimeError when one is asked for. TypeError or
    ValueError names an argument that does not fit.
    """
    recipe = Recipe.parse(recipe)
    if out_dtype is None and isinstance(x, torch.Tensor):
        out_dtype = x.dtype
    _check("linear", x, weight, bias, out_dtype)
    return _Linear.apply(x, weight, bias, recipe, out_dtype, name, torch.is_grad_enabled())


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    recipe: Recipe | str,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return q(a) @ q(b), [..., N], with gradients: `linear` without a bias and with b = weight^T.

    a: [..., K], cast as the recipe's x; b: [K, N], cast as its w; any strides, fp32, bf16 or
    fp16. out_dtype: None takes a's dtype. Raises what `linear` raises.
    """
    recipe = Recipe.parse(recipe)
    _checks.is_tensor("matmul", "a", a)
    _checks.is_tensor("matmul", "b", b)
    if b.dim() != 2 or a.dim() == 0 or a.shape[-1] != b.shape[0]:
        raise ValueError(
            f"matmul: a must be [..., K] and b [K, N], got a {tuple(a.shape)}, b {tuple(b.shape)}"
        )
    _checks.has_dtype("matmul", "a", a, _checks.FLOATS)
    _checks.has_dtype("matmul", "b", b, _checks.FLOATS)
    return linear(a, b.t(), recipe=recipe, out_dtype=out_dtype)
