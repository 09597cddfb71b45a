"""The recipes with block formats: random rounding, Hadamard's matrix, and what is saved."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from cases import for_each, nearest, normal, pairwise
from independent import assert_same_lists
from layer_cases import BLOCK_MIXES, leaf, saved_tensors

import mixprec
from mixprec import functional
from mixprec.functional import operands
from mixprec.ops._reference.block_formats import BLOCK, hadamard
from mixprec.ops.dequantize_mx import dequantize_mx_op
from mixprec.recipes import RECIPES, Recipe
from mixprec.testing import sqnr

ALL = (*(recipe for recipe in RECIPES.values() if recipe.is_block), *BLOCK_MIXES)


def products(
    x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, recipe: Recipe
) -> list[torch.Tensor]:
    """y and the gradients of x and w."""
    x, w = leaf(x), leaf(w)
    y = functional.linear(x, w, recipe=recipe)
    return [y.detach(), *torch.autograd.grad(y, (x, w), g)]


def test_the_mean_of_stochastic_gradients_is_exact() -> None:
    """Of g rounded 400 times, within 5 standard deviations; nearest is biased by far more."""
    recipe = replace(RECIPES["mxfp4"], x="e4m3", w="e4m3")
    x, w = torch.eye(32), torch.eye(32)  # exact in E4M3
    g = torch.full((32, 32), 0.3)
    g[:, 0] = 6.0  # so that the scale is 1, and 0.3 lies between 0 and 0.5
    found = torch.stack([products(x, w, g, recipe)[1] for _ in range(400)])
    deviation = 0.5 * math.sqrt(0.6 * 0.4 / (400 * 32 * 31))
    assert abs(float(found[..., 1:].mean()) - 0.3) < 5 * deviation
    assert set(found[..., 1:].unique().tolist()) == {0.0, 0.5}
    assert float(products(x, w, g, nearest(recipe))[1][:, 1:].mean()) == 0.5


@for_each("name", ["mxfp4", "nvfp4-1x16"])
def test_torchs_seed_determines_the_rounding(name: str) -> None:
    x, w, g = normal((40, 33), torch.float32), normal((9, 33), torch.float32), torch.randn(40, 9)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(products(x, w, g, RECIPES[name]))
    assert_same_lists(runs[1], runs[0])
    assert torch.equal(runs[2][0], runs[0][0]), "x and w are rounded to nearest"
    assert not torch.equal(runs[2][1], runs[0][1])
    assert not torch.equal(runs[2][2], runs[0][2])


def test_a_matrix_and_its_rotated_transpose_are_rounded_independently() -> None:
    """The errors of elements at one place in memory: correlated if they had the same random bits,
    and otherwise by 5 standard deviations of that of 2^14 pairs at most."""
    g, errors = normal((128, 128), torch.float32), []
    cast = operands.cast(g, "g", RECIPES["nvfp4-1x16"], None, use_t=True)
    for matrix, exact in ((cast.matrix, g), (cast.matrix_t, hadamard(g.t()))):
        rounded = dequantize_mx_op(*matrix, "nvfp4", 128, torch.float32)
        errors.append(((rounded - exact) * exact.sign()).flatten())
    assert abs(float(torch.corrcoef(torch.stack(errors))[0, 1])) < 5 * 2**-7


SAVED = {  # shapes of x and weight, and of the matrices that are saved for each
    "linear": ((70, 33), (9, 33), (33, 70), (33, 9)),
    "norm_linear": ((70, 33), (9, 33), (33, 70), (33, 9)),
    "1x1": ((2, 5, 6, 7), (4, 5, 1, 1), (5, 84), (5, 4)),
    "3x3": ((2, 5, 6, 7), (4, 5, 3, 3), (2, 210), (4, 45)),
}


@for_each("recipe, kind", pairwise(ALL, list(SAVED)))
def test_codes_and_scales_are_what_is_saved(recipe: Recipe, kind: str) -> None:
    """x^T and w^T of a product, x and w of a convolution: never a decoded copy."""
    x_shape, w_shape, *saved = SAVED[kind]
    x, w = torch.randn(x_shape, requires_grad=True), torch.randn(w_shape, requires_grad=True)
    op = getattr(functional, kind, functional.conv2d)
    with saved_tensors() as found:
        op(x, w, recipe=recipe)
    low = [t for t in found if t.dtype != torch.float32]
    assert not {torch.bfloat16, torch.float16} & {t.dtype for t in low}, "a decoded copy"
    want = 0
    for role, (rows, columns) in zip("xw", saved, strict=True):
        if recipe.hadamard and role == "x" and kind != "3x3":
            columns = -(-columns // BLOCK) * BLOCK
        per_byte = 2 if getattr(recipe, role).bits == 4 else 1
        size = 16 if getattr(recipe, f"{role}_granularity") == "nvfp4" else 32
        want += rows * (-(-columns // per_byte) + -(-columns // size))
    assert sum(t.nbytes for t in low) == want


def test_statistics_of_a_cast_leave_the_random_numbers_alone() -> None:
    layer = mixprec.nn.Linear(48, 8, recipe="nvfp4-1x16")
    x = torch.randn(20, 48)
    x[0, :16] = 1e-3 * torch.arange(16)
    with mixprec.stats.Monitor(layer, every=1, sqnr=True) as monitor:
        before = torch.get_rng_state()
        layer(x)
        assert torch.equal(torch.get_rng_state(), before)
        monitor.step()
    monitor.flush()
    (row,) = (row for row in monitor.records[-1]["tensors"] if row["tensor"] == "x")
    kept = mixprec.dequantize(mixprec.quantize(x, "e2m1", granularity="nvfp4"))
    assert row["sqnr"] == pytest.approx(float(sqnr(x, kept)))
    assert row["underflow"] == int(((x != 0) & (kept == 0)).sum()) / x.numel()
    assert row["scale_max"] > row["scale_min"] > 0
    assert row["overflow"] == 0
