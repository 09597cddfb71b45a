"""Recurrent layers with gradients: the projection of the input in the formats of a recipe, the
products of the state in 16 bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._context import context
from ..memory.running import keep_as_is
from ..ops._dispatch import simulation
from ..ops.recurrent import recurrent as run_steps
from ..ops.recurrent import recurrent_backward
from ..recipes import Recipe
from ._arguments import main_grad_of
from ._derivatives import Tensors, apply, on_backend_of_forward
from ._linear import linear
from ._products import Gemms, WeightLike, clips, observe, saturate
from .operands import Delayed, Matrix

_NO_SECOND = (
    "recurrent layers with a recipe have no second derivatives (create_graph=True): run the "
    "forward pass inside mixprec.autocast(enabled=False), where they compute as torch's"
)
_NO_TRANSFORMS = (
    "torch.func: recurrent layers with a recipe have no transforms: run the forward pass inside "
    "mixprec.autocast(enabled=False), where they compute as torch's"
)


class Sequence(NamedTuple):
    """cell: "lstm", "gru", "tanh" or "relu"; batch_sizes: as in `mixprec.ops.recurrent`."""

    cell: str
    reverse: bool
    batch_sizes: torch.Tensor | None
    out_dtype: torch.dtype


def state_recipe(recipe: Recipe) -> Recipe:
    """That of the products of the state, in 16 bits: their errors repeat at every step."""
    return Recipe.parse("fp16" if recipe.dtype == torch.float16 else "bf16")


class _Recurrent(torch.autograd.Function):
    """out [N, H], h_n and c_n [B, H] from x [N, G * H], the projected input, and the weight of the
    state [G * H, H]; bias [H]: of the gate n of a GRU."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        h: torch.Tensor,
        c: torch.Tensor | None,
        sequence: Sequence,
        gemms: Gemms,
        main_grad: torch.Tensor | None,
        grad_enabled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        low = weight.to(gemms.recipe.dtype)
        ctx.save = grad_enabled and any(ctx.needs_input_grad)
        cell, reverse, batch_sizes, out_dtype = sequence
        observe("forward", gemms.recipe, gemms.name)
        out, h_n, c_n, h_prev, saved = run_steps(
            *(x, low, bias, h, c, batch_sizes, cell),
            reverse=reverse,
            save=ctx.save,
            out_dtype=out_dtype,
        )
        ctx.sequence, ctx.gemms, ctx.main_grad = sequence, gemms, main_grad
        ctx.backend, ctx.like_w = context.backend, WeightLike.of(weight)
        ctx.set_materialize_grads(False)
        keep_as_is(low, h_prev, saved)  # their errors would repeat too
        ctx.save_for_backward(low, h_prev, saved, batch_sizes)
        ctx.shape = h.shape
        return out, h_n, c_n

    @staticmethod
    @on_backend_of_forward
    def backward(
        ctx: Any,
        g: torch.Tensor | None,
        g_h: torch.Tensor | None,
        g_c: torch.Tensor | None,
    ) -> Tensors:
        low, h_prev, saved, batch_sizes = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(_NO_SECOND)
        gemms, (cell, reverse, _, _) = ctx.gemms, ctx.sequence
        _, need_w, need_bias, need_h, need_c = ctx.needs_input_grad[:5]
        g = saved.new_zeros(h_prev.shape) if g is None else g.float()
        g_h = saved.new_zeros(ctx.shape) if g_h is None else g_h
        g_c = None if cell != "lstm" else g_c
        observe("grad_input", gemms.recipe, gemms.name)
        dx, dgates, dh, dc = recurrent_backward(
            g, g_h, g_c, low, saved, batch_sizes, cell, reverse=reverse
        )
        dw = dbias = None
        if need_w:
            by_gate = Matrix(dgates.t(), None, None), Matrix(h_prev.t(), None, None)
            dw = gemms.grad_weight(*by_gate, ctx.like_w, ctx.main_grad)
        if need_bias:
            dbias = dgates[:, 2 * ctx.shape[1] :].sum(0, dtype=torch.float32)
        grads = dx, dw, dbias, dh if need_h else None, dc if need_c else None
        return *grads, *[None] * 4


def _biases(
    cell: str, b_ih: torch.Tensor | None, b_hh: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """In FP32: those that are added to the projected input, and that of the gate n of a GRU."""
    if b_ih is None or b_hh is None:
        return None, None
    b_ih, b_hh = b_ih.float(), b_hh.float()
    if cell != "gru":
        return b_ih + b_hh, None
    (i_r, i_z, i_n), (h_r, h_z, h_n) = b_ih.chunk(3), b_hh.chunk(3)
    return torch.cat([i_r + h_r, i_z + h_z, i_n]), h_n


def recurrent(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    h: torch.Tensor,
    c: torch.Tensor | None,
    sequence: Sequence,
    *,
    recipe: Recipe,
    name: str = "",
    delayed: Delayed | None = None,
    clipped: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (out [N, H] of out_dtype, h_n and c_n fp32 [B, H]): a layer in one direction.

    x: [N, K], the rows of all steps; weights: w_ih [G * H, K], w_hh [G * H, H] and, if there are
    biases, b_ih and b_hh [G * H]; all fp32, bf16 or fp16. h, c: [B, H].

        x' = q(x) @ q(w_ih)^T + biases     `linear` in `recipe`, FP32 result
        h_t, c_t = step(x'_t, h_{t-1} @ w_hh^T, c_{t-1})

    The products of h and their gradients take operands in `state_recipe(recipe)`, sums are FP32;
    the gates, the state and the gradients that pass through them are FP32. The gradient of w_hh is
    one product over all steps. Saved for backward, beside what `linear` saves: fp32, the gates and
    what the derivative of a step reads, 5 numbers a unit for an LSTM or a GRU, else 1; h_{t-1} and
    w_hh in 16 bits.
    """
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(_NO_TRANSFORMS)
    if torch.is_grad_enabled() and any(w.is_inference() and w.requires_grad for w in weights):
        raise RuntimeError("recurrent layers: parameters made in inference_mode have no gradients")
    w_ih, w_hh, *biases = weights
    bias, bias_n = _biases(sequence.cell, *(biases or (None, None)))
    projected = linear(
        *(x, w_ih, bias), recipe=recipe, out_dtype=torch.float32, name=name, delayed=delayed,
        clipped=clipped,
    )  # fmt: skip
    clip = clips(recipe, sequence.out_dtype)
    sequence = sequence._replace(out_dtype=torch.float32) if clip else sequence
    gemms = Gemms(state_recipe(recipe), name, simulation.current())
    tensors = projected, w_hh, bias_n, h.float(), None if c is None else c.float()
    grad_enabled = torch.is_grad_enabled()
    out, h_n, c_n = apply(
        "recurrent", _Recurrent, *tensors, sequence, gemms, main_grad_of("recurrent", w_hh),
        grad_enabled,
    )  # fmt: skip
    return saturate(out, clipped) if clip else out, h_n, c_n
