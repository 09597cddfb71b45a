"""A convolution and its gradients by the vendor's kernels, with operands saved in FP8."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch

from .._context import context
from ..memory.running import keep_as_is
from ..ops._dispatch import autocast
from ..ops._reference import scale_layout
from ..ops._reference.block_formats import sizes
from ..ops.dequantize import dequantize_mx_op, dequantize_op
from ..recipes import Recipe
from . import operands
from ._derivatives import (
    Tensors,
    differentiable,
    is_twice_differentiable,
    on_backend_of_forward,
    result,
)
from ._products import Product, observe
from .operands import NOTHING, Delayed, Matrix, Operand

_aten = torch.ops.aten


def _slow() -> tuple[torch.dtype, ...]:
    """The dtypes whose convolutions torch does slowly on this CPU: bf16 where oneDNN lacks it."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    has_bf16 = supported is not None and supported()
    return (torch.float16,) if has_bf16 else (torch.float16, torch.bfloat16)


_SLOW = _slow()


def _in_fp32(t: torch.Tensor) -> bool:
    """Whether 16-bit operands like t are multiplied as FP32 copies, the result rounded once. On a
    CPU torch's fp16 convolution is 30 (forward) to 50 times (backward) slower than that, and its
    bf16 convolution without oneDNN's 26 to 92 and 6 times (8 and 32 images of 64 and 32 channels);
    that one sums gradients in bf16, too. (Recipes with clip_activations do it everywhere: no
    vendor's convolution gives FP32 sums of fp16.)"""
    return t.dtype in _SLOW and t.device.type == "cpu"


def _is_wrong(x: torch.Tensor, weight: torch.Tensor, geometry: Geometry) -> bool:
    """Whether oneDNN, as torch 2.13 has it, computes another output in bf16: of width 1, with a
    kernel and steps wider than that."""
    if geometry.transposed or x.device.type != "cpu":
        return False
    stride, padding, dilation = (part[-1] for part in geometry[:3])
    if weight.shape[-1] == 1 or stride == 1:
        return False
    reach = dilation * (weight.shape[-1] - 1) + 1
    return (x.shape[-1] + 2 * padding - reach) // stride == 0


def _reads_beyond(x: int, g: int, kernel: int, geometry: Geometry) -> bool:
    """Whether oneDNN, as torch 2.13 has it, reads beyond its tensors for gradients in bf16: some of
    a kernel's positions along the last dimension see padding alone. (Values are then arbitrary, or
    the process crashes.) x, g: sizes of that dimension."""
    if geometry.transposed:
        x, g = g, x
    stride, padding, dilation = (part[-1] for part in geometry[:3])
    for first in range(-padding, dilation * kernel - padding, dilation):  # of each position
        skipped = max(0, -(first // stride))  # steps that see the padding before x
        if skipped >= g or first + skipped * stride >= x:
            return True
    return False


class Geometry(NamedTuple):
    """The settings of a convolution, a number for each dimension of its points, in the order of the
    arguments of aten.convolution."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    def for_aten(self) -> tuple[Any, ...]:
        """With lists, which its schema has."""
        return tuple([*part] if isinstance(part, tuple) else part for part in self)


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by dimensions


def is_channels_last(t: torch.Tensor) -> bool:
    """Whether t [B, C, H, W] or [B, C, D, H, W] is channels_last and not also contiguous."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return False  # inside vmap torch does not say
    order = CHANNELS_LAST.get(t.dim())
    return order is not None and not t.is_contiguous() and t.is_contiguous(memory_format=order)


def _in_memory_order(t: torch.Tensor, granularity: str) -> bool:
    """Whether t is cast as [B, ..., C]. The order does not affect one scale per tensor or row;
    blocks of 128 are always those of [B, C, ...], so that values do not depend on strides."""
    return granularity in ("tensor", "row") and is_channels_last(t)


def encode(
    t: torch.Tensor, role: str, recipe: Recipe, delayed: Delayed | None, *, record: bool = True
) -> Operand:
    """Cast t for role "x", "w" or "g"; in FP8 as a matrix [first dimension, all the rest].

    `matrix` is for the first product that reads it, `matrix_t` for the other one, and the same
    unless that has a recipe of its own.
    """
    first, second = recipe.casts(role)
    plain = _encode(t, role, first, delayed, record)
    if recipe.backward and role != "g":
        t = Layout.both(t, role, recipe)[0].decode(plain)
    elif second == first:
        return Operand(plain, plain)
    other = _encode(t, role, second, delayed, record)
    return Operand(plain, other)


def _encode(
    t: torch.Tensor, role: str, recipe: Recipe, delayed: Delayed | None, record: bool
) -> Matrix:
    fmt = getattr(recipe, role)
    if fmt.bits == 16:
        return Matrix(t.to(fmt.dtype))
    if _in_memory_order(t, getattr(recipe, f"{role}_granularity")):
        t = t.movedim(1, -1)
    recipe = recipe.unrotated
    return operands.cast(t.flatten(1), role, recipe, delayed, use_t=False, record=record).matrix


class Layout(NamedTuple):
    """How `decode` restores the shape and layout of what `encode` was given."""

    shape: tuple[int, ...]
    channels_last: bool
    in_memory_order: bool
    block_format: str | None

    @property
    def order(self) -> torch.memory_format:
        return CHANNELS_LAST[len(self.shape)] if self.channels_last else torch.contiguous_format

    @staticmethod
    def both(t: torch.Tensor, role: str, recipe: Recipe) -> tuple[Layout, Layout]:
        """Of `matrix` and `matrix_t`."""
        first, second = (
            Layout(
                tuple(t.shape),
                is_channels_last(t),
                _in_memory_order(t, getattr(one, f"{role}_granularity")),
                one.block_format(role),
            )
            for one in recipe.casts(role)
        )
        return first, second

    def decode(self, cast: Matrix) -> torch.Tensor:
        """16-bit values unchanged; others as bf16, exact for scales that are powers of two."""
        if cast.scale_inv is None:
            return cast.data
        b, c, *points = self.shape
        if self.block_format is not None:
            columns, low = prod(self.shape[1:]), torch.bfloat16
            blocks = scale_layout.unswizzle(cast.scale_inv, b, sizes(self.block_format, columns)[1])
            wide = dequantize_mx_op(
                cast.data, blocks, cast.tensor_scale_inv, self.block_format, columns, low
            )
        else:
            wide = dequantize_op(cast.data, cast.scale_inv, torch.bfloat16)
        if self.in_memory_order:
            return wide.view(b, *points, c).movedim(-1, 1)
        wide = wide.view(self.shape)
        return wide.contiguous(memory_format=self.order)

    def nothing(self, like: torch.Tensor) -> torch.Tensor:
        """A placeholder for an operand of which a backward pass needs only the shape."""
        order = self.order
        return torch.empty(self.shape, dtype=like.dtype, device=like.device, memory_format=order)


def _second(ctx: Any, inputs: Any, grads: Tensors) -> Tensors:
    """The gradients of the inputs g, x and weight, for those of the gradients of x, weight and
    bias: by torch's second derivative of a convolution, in the recipe's 16-bit dtype."""
    (g, x, weight), (u, v, s) = inputs, grads
    dtype = ctx.recipe.dtype
    if _in_fp32(x.new_empty(0, dtype=dtype)):
        dtype = torch.float32
    u, v, s, *operands_ = (None if t is None else t.to(dtype) for t in (u, v, s, g, weight, x))
    mask = [True, x.requires_grad, weight.requires_grad]
    grads = _aten._convolution_double_backward.default(
        u, v, s, *operands_, *ctx.geometry.for_aten(), mask
    )
    return tuple(
        None if grad is None else grad.to(t.dtype)
        for grad, t in zip(grads, (g, x, weight), strict=True)
    )


class Convolution(torch.autograd.Function):
    """y [B, O, ...] = x [B, C, ...] * weight [O, C / groups, ...] + bias [O]; the weight of a
    transposed convolution is [C, O / groups, ...]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        product: Product,
        geometry: Geometry,
        recipe: Recipe,
        out_dtype: torch.dtype,
        grad_enabled: bool,
    ) -> torch.Tensor:
        main_grad, delayed, quantized_weight, name, *_ = product
        ctx.recipe, ctx.layer, ctx.geometry = recipe, name, geometry
        ctx.backend = context.backend
        x_layout, ctx.x_layout = Layout.both(x, "x", recipe)
        w_layout, ctx.w_layout = Layout.both(weight, "w", recipe)
        ctx.x_dtype, ctx.w_dtype = x.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        # Not saved with save_for_backward, because they are modified in place.
        ctx.delayed, ctx.main_grad = delayed, main_grad
        need_x, need_w = ctx.needs_input_grad[:2]
        qx = encode(x, "x", recipe, delayed, record=grad_enabled)
        qw = quantized_weight or encode(weight, "w", recipe, delayed, record=grad_enabled)
        saved_x = qx.matrix_t if need_w else NOTHING
        saved_w = qw.matrix_t if need_x else NOTHING
        ctx.twice = is_twice_differentiable()
        keep_as_is(*saved_x[1:], *saved_w)
        ctx.save_for_backward(*saved_x, *saved_w, *((x, weight) if ctx.twice else ()))
        a, b = x_layout.decode(qx.matrix), w_layout.decode(qw.matrix)
        if recipe.clip_activations or _in_fp32(a) or _is_wrong(a, b, geometry):
            a, b = a.float(), b.float()
        observe("forward", recipe, name)
        c = None if bias is None else bias.to(a.dtype)
        return result(_aten.convolution.default(a, b, c, *geometry.for_aten()), out_dtype)

    @staticmethod
    @on_backend_of_forward
    @differentiable(_second)
    def backward(ctx: Any, saved: tuple[torch.Tensor, ...], g: torch.Tensor) -> Tensors:
        x_saved, w_saved = Matrix(*saved[:3]), Matrix(*saved[3:6])
        need_x, need_w, need_bias = ctx.needs_input_grad[:3]
        grad_x = grad_w = grad_bias = None
        if need_x or need_w:
            qg, layouts = encode(g, "g", ctx.recipe, ctx.delayed), Layout.both(g, "g", ctx.recipe)
            first, second = ctx.recipe.casts("g")
            if first == second:
                wide = layouts[0].decode(qg.matrix)
                wide_x, wide_w = _gradients(ctx, wide, x_saved, w_saved, need_x, need_w)
            else:
                wide, other = layouts[0].decode(qg.matrix), layouts[1].decode(qg.matrix_t)
                wide_x, _ = _gradients(ctx, wide, x_saved, w_saved, need_x, False)
                _, wide_w = _gradients(ctx, other, x_saved, w_saved, False, need_w)
            grad_x = None if wide_x is None else wide_x.to(ctx.x_dtype)
            if wide_w is not None and ctx.main_grad is not None:
                ctx.main_grad.add_(wide_w)
            elif wide_w is not None:
                grad_w = wide_w.to(ctx.w_dtype)
        if need_bias:
            points = [d for d in range(g.dim()) if d != 1]
            grad_bias = g.sum(points, dtype=torch.float32).to(ctx.bias_dtype)
        return grad_x, grad_w, grad_bias, *[None] * 5


def _gradients(
    ctx: Any, g: torch.Tensor, x_saved: Matrix, w_saved: Matrix, need_x: bool, need_w: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Those of x and weight that are needed, for the values g."""
    if not need_x and not need_w:
        return None, None
    x = ctx.x_layout.decode(x_saved) if need_w else ctx.x_layout.nothing(g)
    w = ctx.w_layout.decode(w_saved) if need_x else ctx.w_layout.nothing(g)
    x_size, g_size, kernel = (t.shape[-1] for t in (x, g, w))
    if _in_fp32(g) or (g.is_cpu and _reads_beyond(x_size, g_size, kernel, ctx.geometry)):
        g, x, w = g.float(), x.float(), w.float()
    for kind, need in (("grad_input", need_x), ("grad_weight", need_w)):
        if need:
            observe(kind, ctx.recipe, ctx.layer)
    mask = [need_x, need_w, False]
    with autocast.disabled(g.device.type):  # which mixes up dtypes in grouped transposed ones
        grads = _aten.convolution_backward.default(g, x, w, None, *ctx.geometry.for_aten(), mask)
    return (grads[0] if need_x else None), (grads[1] if need_w else None)
