"""Norms, activations and rotary positions in one pass, with their gradients."""

from __future__ import annotations

from typing import Any

import torch

from .._context import context
from ..ops._dispatch import checks
from ..ops._dispatch.casts import Cast
from ..ops.act_quantize import act_backward_op, act_quantize_op
from ..ops.attention import rotary_in_place_op
from ..ops.attention import rotary_op as rotated
from ..ops.norm_quantize import norm_backward_op, norm_quantize_op
from ._derivatives import NO_SECOND, apply, on_backend_of_forward


class RowNorm(torch.autograd.Function):
    """The norm of the last dimension of x as `norm_linear` describes it, rounded once, to dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        subtract_mean: bool,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        y, *_, mean, rstd = norm_quantize_op(
            x, None, weight, bias, eps, subtract_mean, *Cast(dtype)
        )
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.backend = context.backend
        # Not a view: autograd forbids in-place ops on it.
        return y if y._base is None else torch.ops.aten._unsafe_view.default(y, y.shape)

    @staticmethod
    @on_backend_of_forward
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, weight, mean, rstd = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(NO_SECOND)
        with_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[2]
        dx, dw, db = norm_backward_op(g, x, weight, mean, rstd, None, with_bias)
        return (
            dx if ctx.needs_input_grad[0] else None,
            dw.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            db.to(ctx.bias_dtype) if with_bias else None,
            *[None] * 3,
        )


class Activation(torch.autograd.Function):
    """The activation `kind` of `mixprec.act_quantize` of x, computed in FP32, in the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.kind, ctx.backend = kind, context.backend
        ctx.save_for_backward(x)
        y = act_quantize_op(x, None, kind, *Cast(x.dtype))[0]
        # Not a view: autograd forbids in-place ops on it.
        return y if y._base is None else torch.ops.aten._unsafe_view.default(y, y.shape)

    @staticmethod
    @on_backend_of_forward
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(NO_SECOND)
        dx = act_backward_op(g, x, None, ctx.kind, *Cast(x.dtype))[0]
        return dx.view(x.shape), None


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        interleaved: bool,
        inverse: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.inverse, ctx.backend = interleaved, inverse, context.backend
        return rotated(x, None, None, cos, sin, interleaved, inverse)

    @staticmethod
    @on_backend_of_forward
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tables = *ctx.saved_tensors, ctx.interleaved, not ctx.inverse
        if torch.is_grad_enabled():  # it is to be differentiated again
            return _Rotary.apply(g, *tables), *[None] * 4
        return rotated(g, None, None, *tables), *[None] * 4


class _RotaryQKV(torch.autograd.Function):
    """q, k and v of x [B, H, T, D], in one pass each way: their gradients become one tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        heads: int,
        kv_heads: int,
        interleaved: bool,
        inplace: bool,
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.backend = interleaved, context.backend
        sizes = (heads, kv_heads, kv_heads)
        turned = x.split(sizes, 1)
        if inplace:
            rotary_in_place_op(x[:, : heads + kv_heads], cos, sin, interleaved, False)
        else:
            turned = rotated(*turned, cos, sin, interleaved, False).split(sizes, 1)
        # Not views: they are what the function computes, and may be written to.
        return tuple(torch.ops.aten._unsafe_view.default(t, t.shape) for t in turned)

    @staticmethod
    @on_backend_of_forward
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tables = *ctx.saved_tensors, ctx.interleaved, True
        if torch.is_grad_enabled():
            q, k = (_Rotary.apply(g, *tables) for g in grads[:2])
            return torch.cat((q, k, grads[2]), 1), *[None] * 6
        return rotated(*grads, *tables), *[None] * 6


def _tables(*factors: torch.Tensor) -> list[torch.Tensor]:
    for name, x in zip(("cos", "sin"), factors, strict=True):
        checks.is_tensor("rotary", name, x)
        checks.needs_no_grad("rotary", f"detach {name}", x)
    return [x.float() for x in factors]


def rotary(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """Return x with each pair of features rotated by an angle of its position, [B, H, T, D].

        y1 = x1 * cos - x2 * sin
        y2 = x2 * cos + x1 * sin

    x: [B, H, T, D], fp32, bf16 or fp16, any strides, D even. The pairs are the features i and
    i + D/2, with interleaved 2i and 2i + 1. cos, sin: [T, D/2]; or [T, D], with factors for each
    feature: those of y1 and of y2. With angles for each sample [B, T, D/2] or [B, T, D], where B
    may be 1. They are read as FP32 and get no gradient. The result has the dtype of x and lies in
    memory as [B, T, H, D].

    The formula is FP32, every operation rounded, then one rounding to the dtype; all backends give
    the same bits. The gradient is the transposed map: the rotation by the opposite angle. TypeError
    or ValueError names an invalid argument.

    Source: RoFormer (Su et al., 2021).
    """
    checks.is_tensor("rotary", "x", x)
    return apply("rotary", _Rotary, x, *_tables(cos, sin), bool(interleaved), False)


def rotary_qkv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    heads: int,
    kv_heads: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q and k, both rotated as by `rotary`, and v, of what one linear layer computes.

    qkv: [B, T, (heads + 2 * kv_heads) * D], the heads of q first, then those of k and of v;
    kv_heads: None, as many as heads. cos, sin: as for `rotary`. q: [B, heads, T, D]; k, v:
    [B, kv_heads, T, D]; they lie in one tensor [B, T, H, D]. Each pass is one op: backward
    writes the gradient of qkv itself. inplace: qkv may be that tensor, whose v is not copied: it
    must not be read any more. (Compiled code leaves it as it is.) TypeError or ValueError names an
    invalid argument.
    """
    checks.is_tensor("rotary_qkv", "qkv", qkv)
    kv_heads = heads if kv_heads is None else kv_heads
    count = heads + 2 * kv_heads
    if min(heads, kv_heads) < 1 or qkv.dim() != 3 or qkv.shape[2] % (2 * count) != 0:
        raise ValueError(
            f"rotary_qkv: qkv must be [B, T, (heads + 2 * kv_heads) * D], D even, for {heads} and "
            f"{kv_heads} heads, got shape {tuple(qkv.shape)}"
        )
    if inplace and qkv.is_leaf and qkv.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "rotary_qkv: qkv must be the result of a layer with inplace=True, got a leaf that "
            "requires grad; pass qkv.clone()"
        )
    inplace = inplace and qkv.stride(2) == 1 and not torch.compiler.is_compiling()
    x, tables = qkv.unflatten(2, (count, -1)).transpose(1, 2), _tables(cos, sin)
    if torch._C._are_functorch_transforms_active():
        q, k, v = x.split((heads, kv_heads, kv_heads), 1)
        turned = (rotary(t, *tables, interleaved=interleaved) for t in (q, k))
        return *turned, v
    settings = heads, kv_heads, bool(interleaved), bool(inplace)
    result: Any = apply("rotary", _RotaryQKV, x, *tables, *settings)
    return result
