"""The three products of a linear layer with the operands of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..formats import FP16
from ..ops._dispatch.scaled_mm import Blocks
from ..ops._reference.gemm_scales import Operands
from ..ops.block_operands import unpacked
from ..ops.gemm import accumulate, accumulate_blocks, run_blocks
from ..ops.gemm import run as gemm
from ..recipes import OUTLIERS, Recipe
from .operands import Delayed, Matrix, Operand

# Called before each product, for audit: kind ("forward", "grad_input" or "grad_weight"), recipe,
# name of the layer.
listeners: list[Callable[[str, Recipe, str], None]] = []


def is_observed() -> bool:
    return bool(listeners)


def observe(kind: str, recipe: Recipe, name: str) -> None:
    """Report a GEMM that is about to run."""
    if not torch.compiler.is_compiling():  # whose graphs audit reads
        for listener in listeners:
            listener(kind, recipe, name)


class _Saturate(torch.autograd.Function):
    """fp16(y) for y in FP32, with +-65504 where a finite y would become Inf."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, clipped: torch.Tensor | None) -> torch.Tensor:
        rounded = y.to(torch.float16)
        over = rounded.isinf() & y.isfinite()
        ctx.save_for_backward(over)
        if clipped is not None:
            clipped.add_(over.sum())  # on the device: no host sync
        return torch.where(over, rounded.clamp(-FP16.max, FP16.max), rounded)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (over,) = ctx.saved_tensors
        return g.masked_fill(over, 0.0), None


def clips(recipe: Recipe, out_dtype: torch.dtype) -> bool:
    """Whether the output is computed in FP32 first, to be saturated."""
    return recipe.clip_activations and out_dtype == torch.float16


def saturate(y: torch.Tensor, clipped: torch.Tensor | None) -> torch.Tensor:
    """y (fp32) in fp16, rounded once: finite values beyond the largest, 65504, become +-65504 and
    are counted in `clipped` (int64 []); Inf and NaN stay. The gradient is 0 where it was clipped.
    """
    return _Saturate.apply(y, clipped)


def split(t: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """t [..., K] with 0 in these columns, and the columns [M, k] in bf16."""
    part = t.index_select(-1, indices).to(torch.bfloat16)
    return t.index_fill(-1, indices, 0.0), part.reshape(-1, indices.shape[0])


def add(total: torch.Tensor, x: torch.Tensor, w: torch.Tensor, name: str, on: str | None) -> None:
    """total [M, N] += x [M, k] @ w [N, k]^T, in FP32."""
    observe("forward", OUTLIERS, name)
    accumulate(total, Operands(x, w.t()), on)


def put(
    gemms: Gemms,
    main_grad: torch.Tensor | None,
    g: torch.Tensor,
    indices: torch.Tensor,
    input_and_w: tuple[torch.Tensor | None, torch.Tensor | None],
    weight_and_x: tuple[torch.Tensor | None, torch.Tensor | None],
) -> None:
    """Compute these columns of the gradient of a layer's input [M, K] from w [N, k], and of its
    weight [N, K], or of main_grad, from x [M, k], where there are these."""
    _, name, simulated = gemms
    rows = g.to(torch.bfloat16).reshape(-1, g.shape[-1])
    (grad_x, w), (grad_w, x) = input_and_w, weight_and_x
    if grad_x is not None and w is not None:
        observe("grad_input", OUTLIERS, name)
        columns = gemm(Operands(rows, w), None, grad_x.dtype, False, simulated)
        grad_x.index_copy_(1, indices, columns)
    if x is None:
        return
    observe("grad_weight", OUTLIERS, name)
    dtype = torch.float32 if grad_w is None else grad_w.dtype
    columns = gemm(Operands(rows.t(), x), None, dtype, False, simulated)
    if grad_w is not None:
        grad_w.index_copy_(1, indices, columns)
    elif main_grad is not None:
        main_grad.index_add_(1, indices, columns)


class Over(NamedTuple):
    """Over which dimensions of a mesh each operand is sharded: (mesh, dimension)."""

    x: list[Any]
    w: list[Any]
    g: list[Any]


LOCAL = Over([], [], [])


class Product(NamedTuple):
    """A linear layer, beside its weight and bias: see the arguments of `linear`. over: of the parts
    of a tensor-parallel layer."""

    main_grad: torch.Tensor | None = None
    delayed: Delayed | None = None
    quantized_weight: Operand | None = None
    name: str = ""
    outliers: torch.Tensor | None = None
    over: Over | None = None


class WeightLike(NamedTuple):
    """The dtype of a weight, and whether its columns are contiguous: its gradient is made with the
    same strides, because autograd copies one with others."""

    dtype: torch.dtype
    by_columns: bool

    @staticmethod
    def of(weight: torch.Tensor) -> WeightLike:
        return WeightLike(weight.dtype, weight.stride(0) == 1 and weight.stride(1) > 1)


ROLES = {"forward": ("x", "w"), "grad_input": ("g", "w"), "grad_weight": ("g", "x")}


def _t(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.t()


class Gemms(NamedTuple):
    """Those of a layer. name: for `listeners`; simulated: the GPU of a `simulate` block."""

    recipe: Recipe
    name: str
    simulated: str | None

    def forward(
        self, x: Matrix, w: Matrix, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """x [M, K] @ w^T + bias."""
        if bias is not None and bias.dtype == torch.float64:
            bias = bias.float()
        return self._run("forward", x, w, bias, dtype)

    def grad_input(self, g: Matrix, w_t: Matrix, dtype: torch.dtype) -> torch.Tensor:
        """g [M, N] @ w, from w_t [K, N]."""
        return self._run("grad_input", g, w_t, None, dtype)

    def add_grad_input(self, total: torch.Tensor, g: Matrix, w_t: Matrix) -> None:
        """total [M, K] += g @ w."""
        self._add("grad_input", total, g, w_t)

    def grad_weight(
        self, g_t: Matrix, x_t: Matrix, like: WeightLike, main_grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        """g^T @ x, from g_t [N, M] and x_t [K, M]; or None where it is added to main_grad."""
        if main_grad is None:
            # Scales that are not powers of two would multiply in the other order, and round.
            recipe = self.recipe.product("grad_weight")
            exact = recipe.power_of_two_scale and not recipe.is_block
            by_columns = like.by_columns and exact
            return self._run("grad_weight", g_t, x_t, None, like.dtype, by_columns)
        self._add("grad_weight", main_grad, g_t, x_t)
        return None

    def _run(
        self,
        kind: str,
        a: Matrix,
        b: Matrix,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        by_columns: bool = False,
    ) -> torch.Tensor:
        """a @ b^T + bias. by_columns: as (b @ a^T)^T, which has the same sums; without a bias."""
        observe(kind, self.recipe, self.name)
        recipe = self.recipe.product(kind)
        fast = kind in recipe.fast_accum
        if recipe.is_block:
            return run_blocks(*self._blocks(kind, a, b), bias, dtype, fast, self.simulated)
        if by_columns:
            return gemm(_operands(b, a), None, dtype, fast, self.simulated).t()
        return gemm(_operands(a, b), bias, dtype, fast, self.simulated)

    def _add(self, kind: str, total: torch.Tensor, a: Matrix, b: Matrix) -> None:
        """total += a @ b^T"""
        observe(kind, self.recipe, self.name)
        if self.recipe.product(kind).is_block:
            accumulate_blocks(total, *self._blocks(kind, a, b), self.simulated)
        else:
            accumulate(total, _operands(a, b), self.simulated)

    def _blocks(self, kind: str, a: Matrix, b: Matrix) -> tuple[Blocks, Blocks]:
        recipe = self.recipe.product(kind)
        formats = [recipe.block_format(role) or "" for role in ROLES[kind]]
        # Rows of an odd length end with half a byte of zeros, in both operands or in one.
        columns = min(unpacked(m.data, fmt) for m, fmt in zip((a, b), formats, strict=True))
        return _with(a, formats[0], columns), _with(b, formats[1], columns)


def _with(m: Matrix, fmt: str, columns: int) -> Blocks:
    assert m.scale_inv is not None, "all block formats have it"
    return Blocks(m.data, m.scale_inv, m.tensor_scale_inv, fmt, columns)


def _operands(a: Matrix, b: Matrix) -> Operands:
    """Those of a @ b^T."""
    return Operands(a.data, b.data.t(), a.scale_inv, _t(b.scale_inv))


def grad_bias(g: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum of g over its rows, in FP32."""
    rows = g.unsqueeze(0) if g.dim() == 1 else g.flatten(0, -2)
    plain = type(g) is torch.Tensor or torch.compiler.is_compiling()
    if plain and g.is_cpu and g.dtype.itemsize == 2:
        # torch's sum would write all of g in FP32 first.
        ones = torch.ones((1, rows.shape[0]), dtype=g.dtype)
        return gemm(Operands(ones, rows), None, torch.float32, False, None)[0].to(dtype)
    return rows.sum(0, dtype=torch.float32).to(dtype)
