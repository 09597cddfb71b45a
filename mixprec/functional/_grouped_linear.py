"""grouped_linear: the linear layers of a mixture's experts, with gradients, in three calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .._context import context
from ..memory.running import keep_as_is
from ..ops._dispatch import autocast, checks, simulation
from ..ops._dispatch.library import saved_copy
from ..ops._dispatch.scaled_mm import Blocks
from ..ops._reference.gemm_scales import Operands, check_offs
from ..ops.block_operands import decode
from ..ops.gemm_grouped import gemm_grouped_accumulate_op, gemm_grouped_op
from ..recipes import Recipe
from . import _in_one_call
from ._arguments import check_output, check_state, main_grad_of, no_outliers
from ._derivatives import (
    Tensors,
    apply,
    differentiable,
    is_twice_differentiable,
    on_backend_of_forward,
)
from ._group_casts import cast_rows, cast_weights, in_one_call, space_apart
from ._linear import run_linear
from ._products import LOCAL, ROLES, Over, Product, clips, observe, saturate
from ._tensor_parallel import refuse_parts
from .operands import NOTHING, Delayed, Matrix, transposed

# What all experts compute of x [S, H], with the ends int32 [E] of the rows of each, and the expert
# int64 [S] of each row.
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def mixture(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, count: int, experts: Experts
) -> torch.Tensor:
    """Return y [T, H] = sum over j of weights[:, j] * expert index[:, j] of x.

    x: [T, H]; index, weights: [T, k], of `count` experts. An index of `count` or more is that of
    another rank's expert, whose part is 0 here. Sums are in the dtype of the weighted parts; y has
    x's.
    """
    k = index.shape[-1]
    chosen, order = torch.sort(index.reshape(-1), stable=True)
    ends = torch.searchsorted(chosen, torch.arange(count, device=x.device), right=True)
    inside = (chosen < count).unsqueeze(-1)
    y = experts(x[order // k], ends.to(torch.int32), chosen.clamp(max=count - 1))
    y = torch.where(inside, y * weights.reshape(-1)[order, None], 0.0)
    y = torch.empty_like(y).index_copy(0, order, y)
    return y.view(-1, k, y.shape[-1]).sum(1).to(x.dtype)


class _Gemms(NamedTuple):
    """The grouped products of a layer. Each is a @ b^T of a group."""

    recipe: Recipe
    name: str

    def run(
        self,
        kind: str,
        a: Matrix,
        b: Matrix,
        columns: int,
        offs: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """columns: of a and of each b."""
        result: torch.Tensor = gemm_grouped_op(
            *self._operands(kind, a, b, columns), offs, dtype, kind in self.recipe.fast_accum
        )
        return result

    def accumulate(
        self, total: torch.Tensor, a: Matrix, b: Matrix, columns: int, offs: torch.Tensor
    ) -> None:
        """total [E, N, K] += g^T @ x."""
        gemm_grouped_accumulate_op(total, *self._operands("grad_weight", a, b, columns), offs)

    def _operands(self, kind: str, a: Matrix, b: Matrix, columns: int) -> Operands:
        observe(kind, self.recipe, self.name)
        a_data, a_inv, b_data, b_inv = a.data, a.scale_inv, b.data, b.scale_inv
        if self.recipe.is_block:
            formats = [self.recipe.block_format(role) or "" for role in ROLES[kind]]
            a_data, b_data = (
                decode(Blocks(x.data.flatten(0, -2), x.scale_inv, None, fmt, columns))[0]
                for x, fmt in zip((a, b), formats, strict=True)
                if x.scale_inv is not None
            )
            b_data, a_inv, b_inv = b_data.view(*b.data.shape[:-1], columns), None, None
        if b_inv is not None and b_inv.dim() > 1:
            b_inv = b_inv.transpose(-1, -2)
        return Operands(a_data, b_data.transpose(-1, -2), a_inv, b_inv)


class _GroupedLinear(torch.autograd.Function):
    """y [S, N]: the rows of each group of x [S, K] @ its weight^T, of weight [E, N, K]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        offs: torch.Tensor,
        product: Product,
        recipe: Recipe,
        out_dtype: torch.dtype,
        grad_enabled: bool,
    ) -> torch.Tensor:
        ctx.recipe, ctx.backend, ctx.twice = recipe, context.backend, False
        if torch.compiler.is_compiling():  # where a write before the backward pass is not seen
            offs = saved_copy(offs)
        ctx.x_dtype, ctx.w_dtype, ctx.products = x.dtype, weight.dtype, (product,)
        need_x, need_w = ctx.needs_input_grad[:2]
        delayed, use_t, over = product.delayed, need_w and grad_enabled, product.over or LOCAL
        rows, qx, _ = cast_rows(
            x, "x", recipe, delayed, offs, use_t=use_t, record=grad_enabled, groups=over.x
        )
        qw = cast_weights(weight, recipe, use_t=need_x and grad_enabled, groups=over.w)
        saved_x = qx.for_backward if need_w else NOTHING
        saved_w = qw.for_backward if need_x else NOTHING
        ctx.own_t = qx.own_t is not None, qw.own_t is not None
        keep_as_is(offs, saved_x.scale_inv, *saved_w)
        ctx.save_for_backward(*saved_x, *saved_w, offs)
        gemms = _Gemms(recipe, product.name)
        return gemms.run("forward", rows, qw.matrix, x.shape[1], offs, out_dtype)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Tensors:
        return *_gradients(ctx, g), *[None] * 4


@on_backend_of_forward
@differentiable(lambda *_: ())  # never: ctx.twice is False
def _gradients(ctx: Any, saved: tuple[torch.Tensor, ...], g: torch.Tensor) -> Tensors:
    """Of x, weight and no bias, op by op."""
    x_t = transposed(Matrix(*saved[:3]), ctx.own_t[0])
    w_t = transposed(Matrix(*saved[3:6]), ctx.own_t[1])
    offs, product = saved[6], ctx.products[0]
    need_x, need_w = ctx.needs_input_grad[:2]
    gemms, grad_x, grad_w = _Gemms(ctx.recipe, product.name), None, None
    if need_x or need_w:
        groups = (product.over or LOCAL).g
        rows, qg, offs_t = cast_rows(
            g, "g", ctx.recipe, product.delayed, offs, use_t=need_w, groups=groups
        )
    if need_x:
        grad_x = gemms.run("grad_input", rows, w_t, g.shape[1], offs, ctx.x_dtype)
    if need_w:
        args = qg.matrix_t, x_t, space_apart(offs, g.shape[0]), offs_t
        if product.main_grad is None:
            grad_w = gemms.run("grad_weight", *args, ctx.w_dtype)
        else:
            gemms.accumulate(product.main_grad, *args)
    return grad_x, grad_w, None


def _loop(
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor,
    product: Product,
    recipe: Recipe,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """A product for each group. Waits for a GPU, to read offs."""
    ends, parts = offs.tolist(), []
    main_grad = product.main_grad
    for e, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        this = product._replace(main_grad=None if main_grad is None else main_grad[e])
        parts.append(run_linear(x[begin:end], weight[e], None, this, recipe, out_dtype, None))
    last = ends[-1] if ends else 0
    rest = x.new_zeros((x.shape[0] - last, weight.shape[1]), dtype=out_dtype)
    with autocast.disabled(x.device.type):  # which refuses the other type of 16 bits
        return torch.cat([*parts, rest])


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor,
    *,
    recipe: Recipe | str = "fp8",
    out_dtype: torch.dtype | None = None,
    name: str = "",
    delayed: Delayed | None = None,
    clipped: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return y [S, N]: `linear` of each group of rows of x with a weight of its own, in one call.

        y[offs[e - 1] : offs[e]] = linear(x[offs[e - 1] : offs[e]], weight[e]), 0 beyond offs[-1]

    x: [S, K], sorted by expert; weight: [E, N, K], of the experts; both fp32, bf16 or fp16. offs:
    int32 [E] on x's device, the ends of the groups, ascending; a group may be empty. The other
    arguments, gradients, weight.main_grad ([E, N, K]) and errors: as in `linear`. Each group and
    each weight has scales of its own, as in a loop over the experts; delayed scaling has one for
    all of x. No value of offs is read on the host, so a GPU is not waited for, except by recipes
    whose blocks or scales a group of unknown size does not allow ("nvfp4-1x16"; docs/recipes.md has
    the list), inside `twice_differentiable` and inside `simulate`: these run the loop.

    ValueError names offs that are not valid on a CPU. On a GPU an end below the one before, or
    beyond S, leads to values that are not defined, but to no access beyond the arguments.
    """
    state: dict[str, Any] = {"name": name, "delayed": delayed, "clipped": clipped}
    return run_grouped_linear(x, weight, offs, recipe=recipe, out_dtype=out_dtype, **state)


def run_grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor,
    over: Over | None = None,
    *,
    recipe: Recipe | str,
    out_dtype: torch.dtype | None = None,
    name: str,
    delayed: Delayed | None,
    clipped: torch.Tensor | None,
) -> torch.Tensor:
    """`grouped_linear` of the parts of x and weight that this rank has."""
    op, recipe = checks.of_layer("grouped_linear", name), Recipe.parse(recipe)
    refuse_parts(op, x, weight)
    checks.has_dtype(op, "x", x, checks.FLOATS, checks.CAST_X)
    checks.has_dtype(op, "weight", weight, checks.FLOATS, checks.CAST_WEIGHT)
    checks.has_dtype(op, "offs", offs, (torch.int32,))
    if weight.dim() != 3:
        raise ValueError(f"{op}: weight must be [E, N, K], got shape {tuple(weight.shape)}")
    if x.dim() != 2 or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"{op}: x must be [S, K] with K = {weight.shape[2]} as in weight [E, N, K], got shape "
            f"{tuple(x.shape)}"
        )
    for argument, t in (("weight", weight), ("offs", offs)):
        checks.on_device(op, argument, t, x.device, "x")
    checks.has_shape(op, "offs", offs, weight.shape[:1], "[E]")
    out_dtype = x.dtype if out_dtype is None else out_dtype
    check_output(op, weight, None, out_dtype, "[N]")
    no_outliers(op, recipe)
    check_state(op, recipe, delayed, clipped, x.device, "mixprec.convert")
    kept = delayed if recipe.is_delayed else None
    product = Product(main_grad_of(op, weight), kept, None, name, None, over)
    clip, simulated = clips(recipe, out_dtype), simulation.current()
    dtype = torch.float32 if clip else out_dtype
    each = simulated is not None or is_twice_differentiable() or not in_one_call(recipe)
    args, y = (x, weight, None, product, recipe, dtype, torch.is_grad_enabled()), None
    may = over is None or not recipe.is_scaled
    if may and not each and x.is_cpu and type(offs) is torch.Tensor:
        its = _in_one_call.kernels(x, weight, None, recipe, dtype)
        if its is not None:
            with contextlib.suppress(_in_one_call.CallFailed):  # what is wrong is said below
                y = _in_one_call.linear(*args, its, _gradients, offs)
    if y is None:
        check_offs(op, Operands(x, weight), offs)
        if each:
            y = _loop(x, weight, offs, product, recipe, dtype)
        else:
            y = apply(op, _GroupedLinear, x, weight, offs, *args[3:])
    return saturate(y, clipped) if clip else y
