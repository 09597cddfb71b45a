"""linear and conv2d as tests call them, and the numbers that an operand stands for once cast."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

import mixprec
from mixprec import functional
from mixprec.functional.operands import Delayed
from mixprec.ops._reference.hadamard import hadamard
from mixprec.ops.delayed_scales import UNUSED
from mixprec.recipes import Recipe

# Elements of other formats, and two kinds of blocks in one product.
BLOCK_MIXES = (
    Recipe("mxfp6", "e3m2", "e2m3", "e3m2", *(True, "mx", "mx", "mx"), scale_mode="even"),
    Recipe("w4a8", "e4m3", "e2m1", "e5m2", *(True, "mx", "nvfp4", "mx"), scale_mode="ceil"),
)


def leaf(t: torch.Tensor) -> torch.Tensor:
    return t.detach().requires_grad_()


def unused_scales() -> Delayed:
    return Delayed(torch.zeros(2), torch.tensor(UNUSED), torch.tensor(UNUSED))


def _with_state(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """With scales that have not been used yet, where the recipe wants some, and with a seed: each
    backward pass rounds stochastically in the same way."""

    def call(*args: object, recipe: str | Recipe = "fp8", **options: object) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            torch.manual_seed(0)
        if Recipe.parse(recipe).is_delayed:
            options["delayed"] = unused_scales()
        return function(*args, recipe=recipe, **options)

    return call


linear, conv2d = _with_state(functional.linear), _with_state(functional.conv2d)

# The function, and shapes of x and weight that fit.
OPS = {
    "linear": (linear, (6, 16), (8, 16)),
    "1x1": (conv2d, (2, 4, 6, 5), (8, 4, 1, 1)),
    "3x3": (conv2d, (2, 4, 6, 5), (8, 4, 3, 3)),
}


def value(t: torch.Tensor, role: str, recipe: Recipe, *, transposed: bool = False) -> torch.Tensor:
    """The numbers that a tensor stands for once it is cast, [rows, columns] in FP64.

    transposed: as an operand of the GEMM that sums over its rows, where scales lie along these.
    """
    fmt, granularity = getattr(recipe, role), getattr(recipe, f"{role}_granularity")
    rows = t.detach().reshape(math.prod(t.shape[:-1]), t.shape[-1])
    if fmt.bits == 16:
        return rows.to(fmt.dtype).double()
    rows = rows.t() if transposed else rows
    if transposed and recipe.hadamard and role != "w":
        rows = hadamard(rows)
    options = {"power_of_two_scale": recipe.power_of_two_scale, "granularity": granularity}
    if granularity == "mx":
        options["scale_mode"] = recipe.scale_mode
    cast = mixprec.dequantize(mixprec.quantize(rows, fmt, **options)).double()
    return cast.t() if transposed else cast
