"""The recipes with block formats: accuracy by derived bounds, what is saved, random rounding."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import for_each, nearest, normal, pairwise
from independent import assert_same_lists
from torch import nn
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec.functional import linear, norm_linear, operands
from mixprec.ops._reference.hadamard import BLOCK, hadamard
from mixprec.recipes import RECIPES, ROLES, Recipe
from mixprec.testing import sqnr

BLOCKS = tuple(name for name, recipe in RECIPES.items() if recipe.is_block)
# Elements of other formats, and two kinds of blocks in one product.
MIXES = (
    Recipe("mxfp6", "e3m2", "e2m3", "e3m2", *(True, "mx", "mx", "mx")),
    Recipe("w4a8", "e4m3", "e2m1", "e5m2", *(True, "mx", "nvfp4", "mx"), scale_mode="ceil"),
)
ALL = (*(RECIPES[name] for name in BLOCKS), *MIXES)


def leaf(t: torch.Tensor) -> torch.Tensor:
    return t.detach().requires_grad_()


def products(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, recipe: Recipe | None) -> list:
    """y and the gradients of x and w; of torch's linear without a recipe."""
    x, w = leaf(x), leaf(w)
    y = nn.functional.linear(x, w) if recipe is None else linear(x, w, recipe=recipe)
    return [y.detach(), *torch.autograd.grad(y, (x, w), g)]


# --- accuracy --------------------------------------------------------------------------------


def noise(role: str, recipe: Recipe) -> float:
    """The mean square error of an element over the mean square, at most: a step of eps times the
    power of two below it, as large as the element itself, errs by step^2 / 12 to nearest and by
    twice that stochastically. A scale rounded up to a power of two makes steps no larger."""
    steps = 12 if role not in recipe.stochastic_rounding else 6
    return getattr(recipe, role).eps ** 2 / steps


@for_each("one_signed", [False, True])
@for_each("recipe", ALL)
def test_products_against_fp32(recipe: Recipe, one_signed: bool) -> None:
    """Independent errors of two operands add up. Values of one sign add up faster than errors."""
    draw: Callable[..., torch.Tensor] = torch.rand if one_signed else torch.randn
    torch.manual_seed(0)
    tensors = draw(256, 160), draw(96, 160), draw(256, 96)
    got, want = products(*tensors, recipe), products(*tensors, None)
    gain = 10.0 if one_signed else 0.0
    for a, b, roles in zip(want, got, ("xw", "gw", "gx"), strict=True):
        least = -10 * math.log10(sum(noise(role, recipe) for role in roles))
        # Elements below the smallest normal one err more than that, by less than a decibel.
        assert sqnr(a, b) > least + gain - 1, (recipe.name, roles)


def test_hadamard_is_for_the_gradient_of_the_weight() -> None:
    """tests/modules/test_functional.py has its exact values."""
    x, w, g = normal((50, 64), torch.float32), torch.ones(48, 64), normal((50, 48), torch.float32)
    recipes = (replace(nearest("nvfp4"), hadamard=on) for on in (False, True))
    (*plain, of_w), (*rotated, of_w_rotated) = (products(x, w, g, recipe) for recipe in recipes)
    assert_same_lists(rotated, plain)
    assert not torch.equal(of_w, of_w_rotated)
    assert sqnr(of_w, of_w_rotated) > 12


@for_each("columns", [0, 1, 16, 37])
def test_hadamard_is_orthogonal(columns: int) -> None:
    a, b = (normal((rows, columns), torch.float32, seed=rows) for rows in (5, 7))
    ra, rb = hadamard(a), hadamard(b)
    assert ra.shape == (5, -(-columns // BLOCK) * BLOCK)
    torch.testing.assert_close(ra @ rb.t(), a @ b.t(), rtol=1e-5, atol=1e-5)
    q = hadamard(torch.eye(BLOCK))
    assert torch.equal(q @ q.t(), torch.eye(BLOCK))
    assert torch.equal(q.abs(), torch.full((BLOCK, BLOCK), 0.25))
    assert torch.equal(hadamard(a.bfloat16()), hadamard(a.bfloat16().float()))


# --- stochastic rounding -----------------------------------------------------------------------


def test_the_mean_of_stochastic_gradients_is_exact() -> None:
    """Of g rounded 400 times, within 5 standard deviations; nearest is biased by far more."""
    recipe = replace(RECIPES["mxfp4"], x="e4m3", w="e4m3")
    x, w = torch.eye(32), torch.eye(32)  # exact in E4M3
    g = torch.full((32, 32), 0.3)
    g[:, 0] = 6.0  # so that the scale is 1, and 0.3 lies between 0 and 0.5
    torch.manual_seed(0)
    found = torch.stack([products(x, w, g, recipe)[1] for _ in range(400)])
    deviation = 0.5 * math.sqrt(0.6 * 0.4 / (400 * 32 * 31))
    assert abs(float(found[..., 1:].mean()) - 0.3) < 5 * deviation
    assert set(found[..., 1:].unique().tolist()) == {0.0, 0.5}
    assert float(products(x, w, g, nearest(recipe))[1][:, 1:].mean()) == 0.5


@for_each("name", ["mxfp4", "nvfp4"])
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


def net(recipe: str | Recipe) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(24, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, 8)]
    return mixprec.convert(nn.Sequential(*layers), recipe)  # type: ignore[return-value]


def losses(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, forward: Callable
) -> list[float]:
    found = []
    for step in steps:
        x = normal((16, 24), torch.float32, seed=step)
        loss = (forward(x) - x[:, :8].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@for_each("name", ["mxfp4", "nvfp4"])
def test_a_resumed_run_and_a_checkpointed_one_go_on_with_the_same_bits(
    name: str, tmp_path: Path
) -> None:
    def start() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        model = net(name)
        return model, mixprec.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = start()
    torch.manual_seed(3)
    first = losses(model, optimizer, range(3), model)
    mixprec.save_checkpoint(tmp_path / "c", model=model, optimizer=optimizer)
    want = losses(model, optimizer, range(3, 6), model)
    again, its_optimizer = start()
    torch.manual_seed(9)
    mixprec.load_checkpoint(tmp_path / "c", model=again, optimizer=its_optimizer)
    assert losses(again, its_optimizer, range(3, 6), again) == want
    recomputed, another = start()
    torch.manual_seed(3)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(recomputed, x, use_reentrant=False)

    assert losses(recomputed, another, range(6), forward) == first + want


def test_compiled_with_stochastic_rounding(fresh_compiler: None) -> None:
    """fullgraph, forward and backward; the same random numbers where torch draws them as ever."""
    plain, again = net("nvfp4"), net("nvfp4")
    compiled = torch.compile(again, backend="aot_eager", fullgraph=True)
    for forward in (plain, compiled):
        torch.manual_seed(0)
        forward.eval()
        forward(normal((10, 24), torch.float32)).square().sum().backward()
    pairs = zip(again.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


# --- what is saved, shapes, training -----------------------------------------------------------


@for_each("recipe, kind", pairwise(ALL, ["linear", "1x1", "3x3", "norm_linear"]))
def test_codes_and_scales_are_what_is_saved(recipe: Recipe, kind: str) -> None:
    """x^T and w^T of a product, x and w of a convolution: never a decoded copy."""
    x_shape, w_shape = {
        "1x1": ((2, 5, 6, 7), (4, 5, 1, 1)),
        "3x3": ((2, 5, 6, 7), (4, 5, 3, 3)),
    }.get(kind, ((70, 33), (9, 33)))
    x, w = torch.randn(x_shape, requires_grad=True), torch.randn(w_shape, requires_grad=True)
    shapes = {
        "1x1": {"x": (5, 84), "w": (5, 4)},
        "3x3": {"x": (2, 210), "w": (4, 45)},
    }.get(kind, {"x": (33, 70), "w": (33, 9)})
    op = {"linear": linear, "norm_linear": norm_linear}.get(kind, mixprec.functional.conv2d)
    low: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        assert t.dtype not in (torch.bfloat16, torch.float16), "a decoded copy"
        low.extend([t] if t.dtype != torch.float32 else [])
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        op(x, w, recipe=recipe)
    want = 0
    for role, (rows, columns) in shapes.items():
        if recipe.hadamard and role == "x" and kind != "3x3":
            columns = -(-columns // BLOCK) * BLOCK
        per_byte = 2 if getattr(recipe, role).bits == 4 else 1
        size = 16 if getattr(recipe, f"{role}_granularity") == "nvfp4" else 32
        want += rows * (-(-columns // per_byte) + -(-columns // size))
    assert sum(t.nbytes for t in low) == want


@for_each("recipe", ALL)
def test_odd_shapes_and_empty_ones(recipe: Recipe) -> None:
    for rows, k, n in ((0, 5, 3), (4, 0, 3), (3, 7, 0), (1, 1, 1), (2, 17, 33), (33, 31, 15)):
        x, w, g = normal((rows, k), torch.bfloat16), torch.ones(n, k), torch.ones(rows, n)
        got = products(x, w, g.bfloat16(), recipe)
        for a, b in zip(got, products(x.float(), w, g, None), strict=True):
            assert a.shape == b.shape
            assert (a.float() - b).norm() <= 0.3 * b.norm() + 1e-6
    one = linear(torch.ones(16), torch.ones(4, 16), recipe=recipe)
    assert one.tolist() == [16.0] * 4


@for_each("name", BLOCKS)
def test_a_short_training(name: str) -> None:
    """The loss falls by as much as in FP32, less 2 % (8 bits) or 15 % (4 bits) of the first one."""
    final = []
    for recipe in (None, name):
        model = net("bf16") if recipe is None else net(recipe)
        model.eval()  # no dropout
        optimizer = mixprec.optim.AdamW(model.parameters(), lr=1e-2)
        found = losses(model, optimizer, range(60), model)
        assert found[-1] < 0.5 * found[0]
        final.append(found[-1] / found[0])
    assert final[1] < final[0] + (0.02 if RECIPES[name].is_fp8 else 0.15)


def test_statistics_of_a_cast_leave_the_random_numbers_alone() -> None:
    layer = mixprec.nn.Linear(48, 8, recipe="nvfp4")
    x = torch.randn(20, 48)
    x[0, :16] = 1e-3 * torch.arange(16)
    with mixprec.stats.Monitor(layer, every=1, sqnr=True) as monitor:
        before = torch.get_rng_state()
        layer(x)
        assert torch.equal(torch.get_rng_state(), before)
        monitor.step()
    monitor.flush()
    rows = {row["tensor"]: row for row in monitor.records[-1]["tensors"]}
    q = mixprec.quantize(x, "e2m1", granularity="nvfp4")
    kept = mixprec.dequantize(q)
    assert rows["x"]["sqnr"] == pytest.approx(float(sqnr(x, kept)))
    assert rows["x"]["underflow"] == int(((x != 0) & (kept == 0)).sum()) / x.numel()
    assert rows["x"]["scale_max"] > rows["x"]["scale_min"] > 0
    assert rows["x"]["overflow"] == 0


@for_each("role", ROLES)
def test_operands_are_cast_as_quantize_casts(role: str) -> None:
    """Rows of the tensor and of its transpose, in the recipe's format and scale mode."""
    x = normal((3, 7, 33), torch.float32)
    for recipe in (*map(nearest, BLOCKS), *MIXES):
        got = operands.cast(x, role, replace(recipe, hadamard=False), None, use_t=True)
        granularity = getattr(recipe, f"{role}_granularity")
        more = {"scale_mode": recipe.scale_mode} if granularity == "mx" else {}
        q = mixprec.quantize(
            x, getattr(recipe, role), transpose=True, granularity=granularity, **more
        )
        assert torch.equal(got.data.view(torch.uint8), q.data.flatten(0, -2).view(torch.uint8))
        assert torch.equal(got.data_t.view(torch.uint8), q.data_t.view(torch.uint8))
        for mine, theirs in (
            (got.scale_inv, q.scale_inv),
            (got.scale_inv_t, q.scale_inv_t),
        ):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
        assert (got.tensor_scale_inv is None) == (q.tensor_scale_inv is None)


def test_fused_modules_and_copies() -> None:
    """convert(fuse=True) casts the norm's FP32 output; deepcopy and reuse_weights keep the bits."""
    torch.manual_seed(0)
    layers = [nn.RMSNorm(32), nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)]
    model, x = nn.Sequential(*layers), torch.randn(18, 32)
    exact = model(x).detach()
    mixprec.convert(model, nearest("nvfp4"), fuse=True)
    y = model(x)
    assert sqnr(exact, y.detach()) > 12
    with mixprec.reuse_weights(model):
        assert torch.equal(copy.deepcopy(model)(x), y)
        assert torch.equal(model(x), y)
    y.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
