"""linear_cross_entropy: the loss of a head, without the logits in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from .._context import context
from ..memory.running import keep_as_is
from ..ops._dispatch import autocast, checks, simulation
from ..ops.cross_entropy import COLUMNS, cross_entropy_backward_op, cross_entropy_op
from ..recipes import Recipe
from . import operands
from ._arguments import check_output, main_grad_of, no_outliers
from ._derivatives import Tensors, apply, on_backend_of_forward
from ._linear import check_input
from ._products import Gemms, Product, WeightLike, grad_bias
from ._tensor_parallel import refuse_parts
from .operands import Matrix, Operand

REDUCTIONS = ("none", "mean", "sum")


class Loss(NamedTuple):
    """How the loss is computed of logits: see the arguments of `linear_cross_entropy`."""

    ignore_index: int
    reduction: str
    label_smoothing: float
    z_loss: float
    softcap: float  # 0: none

    def check(self, op: str) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueError(
                f'{op}: reduction must be "none", "mean" or "sum", got {self.reduction!r}'
            )
        if type(self.ignore_index) is not int:
            raise TypeError(f"{op}: ignore_index must be an int, got {self.ignore_index!r}")
        for name in ("label_smoothing", "z_loss", "softcap"):
            if not isinstance(value := getattr(self, name), (int, float)):
                raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(
                f"{op}: label_smoothing must be between 0 and 1, got {self.label_smoothing}"
            )
        for name in ("z_loss", "softcap"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(
                    f"{op}: {name} must be finite and 0 or more, got {getattr(self, name)}"
                )

    def reduced(self, rows: torch.Tensor, valid: torch.Tensor, classes: int) -> Tensors:
        """The loss, and the logsumexp of each row, from the statistics of the rows."""
        maximum, total, picked, sums = rows.unbind(1)
        logsumexp = maximum + total.log()
        losses = logsumexp - (1.0 - self.label_smoothing) * picked
        if self.label_smoothing > 0:
            losses = losses - self.label_smoothing / classes * sums
        if self.z_loss > 0:
            losses = losses + self.z_loss * logsumexp.square()
        losses = torch.where(valid, losses, 0.0)
        if self.reduction == "none":
            return losses, logsumexp
        loss = losses.sum()
        return loss if self.reduction == "sum" else loss / valid.sum(), logsumexp


def cross_entropy(logits: torch.Tensor, target: torch.Tensor, how: Loss) -> torch.Tensor:
    """The same loss of logits [..., V], as torch computes it."""
    how.check("cross_entropy")
    logits, labels = logits.reshape(-1, logits.shape[-1]).float(), target.reshape(-1)
    logits = how.softcap * (logits / how.softcap).tanh() if how.softcap > 0 else logits
    losses = torch.nn.functional.cross_entropy(
        logits,
        labels,
        ignore_index=how.ignore_index,
        reduction="none",
        label_smoothing=how.label_smoothing,
    )
    valid = labels != how.ignore_index
    if how.z_loss > 0:
        squares = how.z_loss * logits.logsumexp(-1).square()
        losses = losses + torch.where(valid, squares, 0.0)
    if how.reduction == "none":
        return losses.view(target.shape)
    return losses.sum() if how.reduction == "sum" else losses.sum() / valid.sum()


_OP = "linear_cross_entropy"
_NO_SECOND = (
    f"{_OP}: its gradients have no derivative (create_graph=True); for a second derivative use "
    "torch.nn.functional.cross_entropy of torch.nn.functional.linear"
)
TILE = 2048  # classes whose logits exist at a time, a multiple of the blocks of all recipes
_FP16_SCALE = 2.0**10  # gradients of logits are at most 1; FP16 then holds 2^-34


def _tiles(classes: int) -> Iterator[slice]:
    return (slice(i, min(i + TILE, classes)) for i in range(0, classes, TILE))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        product: Product,
        recipe: Recipe,
        how: Loss,
        grad_enabled: bool,
        simulated: str | None,
    ) -> torch.Tensor:
        ctx.recipe, ctx.backend, ctx.how = recipe, context.backend, how
        ctx.gemms = Gemms(recipe, product.name, simulated)
        ctx.x_shape, ctx.x_dtype, ctx.main_grad = x.shape, x.dtype, product.main_grad
        classes = weight.shape[0]
        labels = target.reshape(-1)
        use_t = ctx.needs_input_grad[1] and grad_enabled
        qx = operands.cast_input(x, recipe, None, use_t=use_t, grad_enabled=grad_enabled)
        rows = x.new_zeros((labels.shape[0], COLUMNS), dtype=torch.float32)
        rows[:, 0] = -torch.inf
        rows[:, 2] = torch.nan  # the loss of a target that is in no tile
        for tile in _tiles(classes):
            qw = operands.cast(weight[tile], "w", recipe, None, use_t=False)
            logits = _logits(ctx.gemms, qx.matrix, qw.matrix, bias, tile)
            rows = cross_entropy_op(logits, labels, rows, tile.start, how.softcap)
        valid = labels != how.ignore_index
        loss, logsumexp = how.reduced(rows, valid, classes)
        assert loss is not None
        keep_as_is(*qx.matrix, *qx.matrix_t, logsumexp)
        # The factor of each row's gradient: NaN for a target that is not a class.
        known = (labels >= 0) & (labels < classes)
        factor = torch.where(known, valid.float(), torch.nan)
        factor = factor / valid.sum() if how.reduction == "mean" else factor
        factor = torch.where(valid, factor, 0.0)
        ctx.save_for_backward(*qx.matrix, *qx.matrix_t, weight, bias, labels, logsumexp, factor)
        # A copy: results that are views could not be changed in place.
        return loss.view(target.shape).clone() if how.reduction == "none" else loss

    @staticmethod
    @on_backend_of_forward
    def backward(ctx: Any, g: torch.Tensor) -> Tensors:
        *saved, weight, bias, labels, logsumexp, factor = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(_NO_SECOND)
        how, recipe, gemms = ctx.how, ctx.recipe, ctx.gemms
        qx = Operand(Matrix(*saved[:3]), Matrix(*saved[3:]))
        need_x, need_w, need_bias = ctx.needs_input_grad[:3]
        classes, k = weight.shape
        is_16_bits = all(one.g.bits == 16 for one in recipe.casts("g"))
        g_dtype = recipe.dtype if is_16_bits else torch.float32
        g = g.reshape(-1).float() if how.reduction == "none" else g.float()
        row_grad = torch.where(factor == 0, 0.0, g * factor)  # of ignored rows, g may be NaN
        row_weight, scale = _normalized(row_grad, logsumexp, how.z_loss, g_dtype)
        grad_x: Any = None
        grad_w: Any = None
        grad_b: Any = None
        if need_x:
            grad_x = weight.new_zeros((labels.shape[0], k), dtype=torch.float32)
        if need_w and ctx.main_grad is None:
            grad_w = torch.empty_like(weight)
        if need_bias:
            grad_b = torch.empty_like(bias)
        for tile in _tiles(classes):
            qw = operands.cast(weight[tile], "w", recipe, None, use_t=need_x)
            logits = _logits(gemms, qx.matrix, qw.matrix, bias, tile)
            grad_logits = cross_entropy_backward_op(
                logits, labels, logsumexp, row_weight, tile.start, classes, how.label_smoothing,
                how.z_loss, how.softcap, g_dtype,
            )  # fmt: skip
            del logits
            if need_bias:
                grad_b[tile] = grad_bias(grad_logits, torch.float32) * scale
            if not need_x and not need_w:
                continue
            qg = operands.cast(grad_logits, "g", recipe, None, use_t=need_w)
            del grad_logits
            if need_x:
                gemms.add_grad_input(grad_x, qg.matrix, qw.matrix_t)
            if need_w:
                total = None if ctx.main_grad is None else ctx.main_grad[tile]
                part = _grad_weight(gemms, qg.matrix_t, qx.matrix_t, scale, weight.dtype, total)
                if grad_w is not None:
                    grad_w[tile] = part
        if grad_x is not None:
            grad_x = (grad_x * scale).to(ctx.x_dtype).view(ctx.x_shape)
        return grad_x, grad_w, grad_b, *[None] * 6


def _logits(
    gemms: Gemms, x: Matrix, w: Matrix, bias: torch.Tensor | None, tile: slice
) -> torch.Tensor:
    return gemms.forward(x, w, None if bias is None else bias[tile], torch.float32)


def _normalized(
    row_grad: torch.Tensor, logsumexp: torch.Tensor, z_loss: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """row_grad [N] as row weights * scale, so that gradients of logits in dtype are below 1 times
    what FP16 needs in order to hold small probabilities: 1 / N would underflow there."""
    size = row_grad.abs()
    if z_loss > 0:
        size = torch.where(size == 0, 0.0, size * (1.0 + 2.0 * z_loss * logsumexp.abs()))
    size = torch.where(size.isfinite(), size, 0.0)  # Inf and NaN stay in their rows
    largest = size.amax() if size.shape[0] > 0 else size.sum()
    scale = torch.where(largest > 0, largest, 1.0)
    up = _FP16_SCALE if dtype == torch.float16 else 1.0
    return row_grad / scale * up, scale / up


def _grad_weight(
    gemms: Gemms,
    g_t: Matrix,
    x_t: Matrix,
    scale: torch.Tensor,
    dtype: torch.dtype,
    total: torch.Tensor | None,
) -> torch.Tensor | None:
    """g^T @ x * scale of a tile; or None where it is added to total."""
    # Block formats have no place for the scale, and cuBLAS takes none for operands of 16 bits.
    if gemms.recipe.product("grad_weight").is_block or g_t.data.is_cuda:
        part = gemms.grad_weight(g_t, x_t, WeightLike(torch.float32, False), None)
        assert part is not None
        if total is None:
            return part * scale
        total.add_(part * scale)
        return None
    scale_inv = scale if g_t.scale_inv is None else g_t.scale_inv * scale
    return gemms.grad_weight(Matrix(g_t.data, scale_inv), x_t, WeightLike(dtype, False), total)


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Recipe,
    how: Loss,
) -> None:
    checks.is_tensor(_OP, "weight", weight)
    if weight.dim() != 2:
        raise ValueError(f"{_OP}: weight must be [V, K], got shape {tuple(weight.shape)}")
    check_input(x, weight, _OP)
    check_output(_OP, weight, bias, torch.float32, "[V]")
    checks.has_dtype(_OP, "target", target, (torch.int64,))
    checks.has_shape(_OP, "target", target, x.shape[:-1], "x's shape without its last dimension")
    checks.on_device(_OP, "target", target, x.device, "x")
    no_outliers(_OP, recipe)
    if recipe.is_delayed or recipe.clip_activations:
        raise ValueError(f"{_OP}: recipe must keep no state, got {recipe.name}")
    how.check(_OP)
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_targets(target, weight.shape[0], how.ignore_index)


def _check_targets(target: torch.Tensor, classes: int, ignore_index: int) -> None:
    if type(target) is not torch.Tensor or torch._C._are_functorch_transforms_active():
        return
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if wrong.any():
        raise IndexError(
            f"{_OP}: target must be in [0, {classes}) or {ignore_index}, "
            f"got {int(target[wrong][0])}"
        )


def _recipe_for(x: torch.Tensor) -> Recipe:
    """The 16 bits of torch.autocast, or else those of x; bf16 for FP32."""
    dtype = x.dtype
    if autocast.is_on(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    return Recipe.parse("fp16" if dtype == torch.float16 else "bf16")


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    recipe: Recipe | str | None = None,
) -> torch.Tensor:
    """Return the cross entropy of logits = q(x) @ q(weight)^T + bias, which are never all stored.

        loss = logsumexp - (1 - label_smoothing) * logits[target]
               - label_smoothing / V * sum(logits) + z_loss * logsumexp^2

    x: [..., K], any strides; weight: [V, K], of V classes; both fp32, bf16 or fp16. target: int64
    [...], classes in [0, V). bias: [V], fp32, bf16, fp16 or fp64. The loss is fp32: [...] with
    reduction "none", 0 where the target is ignore_index; their "sum"; or the "mean" over all other
    targets, NaN if there are none. softcap: c * tanh(logits / c) takes the place of the logits.
    recipe: a name or a Recipe without state, as in `linear`; None: "fp16" where torch.autocast, or
    outside of it x, has that dtype, else "bf16".

    Logits are computed for some thousand classes at a time, in FP32, and again in backward, which
    keeps x, weight and the logsumexp of each row. Their gradients are rounded to the recipe's
    format before they are multiplied by the loss's own gradient and 1 / N, so that FP16 holds
    them; sums are FP32, and the gradients of x, weight and bias are rounded once to their dtypes. A
    weight with main_grad gets its gradient there, as in `linear`. Gradients that are not required
    are not computed. A second derivative raises RuntimeError, a target that is not a class
    IndexError; in compiled code and on a GPU the loss and the gradients are then NaN. TypeError or
    ValueError names another invalid argument.

    Sources: Cut Your Losses in Large-Vocabulary Language Models (Wijmans et al., 2025) for tiles of
    classes; PaLM (Chowdhery et al., 2022) for z_loss; Gemma 2 (2024) for softcap.
    """
    checks.is_tensor(_OP, "x", x)
    recipe = _recipe_for(x) if recipe is None else Recipe.parse(recipe)
    cap = 0.0 if softcap is None else softcap
    how = Loss(ignore_index, reduction, label_smoothing, z_loss, cap)
    return run_linear_cross_entropy(x, weight, target, bias, recipe, how)


def run_linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Recipe,
    how: Loss,
    name: str = "",
) -> torch.Tensor:
    """`linear_cross_entropy`; name: of the layer, for audit."""
    refuse_parts(_OP, x, weight)
    _check(x, weight, target, bias, recipe, how)
    product = Product(main_grad_of(_OP, weight), name=name)
    grad, simulated = torch.is_grad_enabled(), simulation.current()
    return apply(
        _OP, _LinearCrossEntropy, x, weight, bias, target, product, recipe, how, grad, simulated
    )
