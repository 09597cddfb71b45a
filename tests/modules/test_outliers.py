"""Recipes with outliers: input features that all three products of a layer read in bf16."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import for_each
from independent import assert_same_bits, assert_same_lists
from layer_cases import leaf, saved_tensors
from models import Model
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec import functional
from mixprec.nn import Layer
from mixprec.recipes import Recipe

NAMES = ("fp8", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4", "fp8+gi-bf16+gw-mxfp8")
K, N, M = 96, 48, 64
FEW = torch.tensor([3, 17, 95])
OTHERS = torch.ones(K, dtype=torch.bool).index_fill_(0, FEW, False)
Grads = tuple[torch.Tensor, ...]


def nearest(name: str, outliers: float = 0.0) -> Recipe:
    """The recipe without stochastic rounding, whose random numbers depend on the order of casts."""
    settings = Recipe.parse(name).to_dict() | {"stochastic_rounding": [], "outliers": outliers}
    return Recipe.from_dict(settings)


def operands(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, w, bias, g = (torch.randn(s) for s in ((2, M // 2, K), (N, K), (N,), (2, M // 2, N)))
    x[..., FEW] *= 100
    return [t.to(dtype) for t in (x, w, bias, g)]


def results(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, **more: Any) -> Grads:
    x, w = leaf(x), leaf(w)
    y = functional.linear(x, w, **more)
    return y.detach(), *torch.autograd.grad(y, (x, w), g.to(y.dtype))


@for_each("name", NAMES)
@for_each("dtype", [torch.float32, torch.bfloat16])
def test_is_one_layer_of_the_outliers_and_one_of_the_rest(name: str, dtype: torch.dtype) -> None:
    x, w, bias, g = operands(dtype)
    rest = x.index_fill(-1, FEW, 0), w.index_fill(1, FEW, 0)
    wide = {"out_dtype": torch.float32}
    low = results(*rest, g, recipe=nearest(name), bias=bias, **wide)
    high = results(x[..., FEW], w[:, FEW], g, recipe="bf16", **wide)
    y, dx, dw = results(x, w, g, bias=bias, recipe=nearest(name, 0.03), outliers=FEW)
    rtol = 2.0**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(y, (low[0] + high[0]).to(dtype), rtol=rtol, atol=1e-3)
    for got, of_low, of_high in ((dx, low[1], high[1]), (dw, low[2], high[2])):
        assert_same_bits(got[..., OTHERS], of_low[..., OTHERS])
        torch.testing.assert_close(got[..., FEW], of_high, rtol=rtol, atol=1e-3)


def test_keeps_the_outliers_in_bf16() -> None:
    x, w, _, _ = map(leaf, operands())
    with saved_tensors() as saved:
        functional.linear(x, w, recipe="fp8+outliers-0.03", outliers=FEW)
    shapes = {tuple(t.shape): t.dtype for t in saved if t.dim() == 2}
    assert shapes[M, 3] == shapes[N, 3] == torch.bfloat16
    assert shapes[M, K] == shapes[N, K] == torch.float8_e4m3fn


def test_the_buffer_may_be_written_between_forward_and_backward() -> None:
    want, model = step(mlp()), mlp()
    x = leaf(X)
    y = model(x)
    model[0].outliers.zero_()
    y.square().sum().backward()
    assert x.grad is not None
    assert_same_bits(x.grad, want[1])


def test_finite_values_beside_ones_that_are_not() -> None:
    """Inf in a feature reaches the output, and no other sample."""
    x, w, _, g = operands()
    for feature in (3, 5):
        x[0, 1, feature] = torch.inf
        y, _, dw = results(x, w, g, recipe="fp8-rowwise+outliers-0.03", outliers=FEW)
        bad = ~y.isfinite()
        assert bad[0, 1].all()
        assert int(bad.sum()) == N
        assert not dw[:, feature].isfinite().any()
        x[0, 1, feature] = 1.0


X = torch.randn(32, K, generator=torch.Generator().manual_seed(3))
X[:, FEW] *= 50


def mlp(name: str = "fp8-rowwise+outliers-0.03", fuse: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(K, N), nn.GELU(), nn.Linear(N, K)
    model = nn.Sequential(*layers)
    mixprec.convert(model, name, fuse=fuse)
    mixprec.choose_outliers(model, [X])
    return model


def step(model: nn.Module, x: torch.Tensor = X) -> Grads:
    x = leaf(x)
    torch.manual_seed(1)
    y = model(x)
    y.square().sum().backward()
    assert x.grad is not None
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return y.detach(), x.grad, *grads


@for_each("name", ["fp8-rowwise+outliers-0.03", "mxfp4+outliers-0.03", "fp8-delayed+outliers-0.1"])
def test_modules_the_same_bits(name: str) -> None:
    """Copied, fused (which it is not), checkpointed, with a weight cast once, compiled."""
    plain = step(mlp(name))
    again = Model(lambda self, x: checkpoint(self.a, x, use_reentrant=False), a=mlp(name))
    compiled: Any = torch.compile(mlp(name), backend="aot_eager", fullgraph=True)
    for model in (copy.deepcopy(mlp(name)), mlp(name, fuse=True), again, compiled):
        assert_same_lists(step(model), plain)
    with mixprec.reuse_weights(model := mlp(name)):
        assert_same_lists(step(model), plain)


def test_compiled_one_after_another() -> None:
    """A float that differs between models would be symbolic from the second one on."""
    for name in ("fp8-rowwise+outliers-0.03", "fp8-rowwise+outliers-0.1", "fp8-rowwise", "fp8"):
        model = mixprec.convert(nn.Sequential(nn.Linear(K, N)), name)
        if "outliers" in name:
            mixprec.choose_outliers(model, [X])
        compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert_same_lists(step(compiled), step(model))


def test_frozen_parts_and_main_grad() -> None:
    model = mlp()
    want = step(model)
    for p in model.parameters():
        p.main_grad = torch.ones_like(p)  # type: ignore[attr-defined]
    assert_same_bits(step(model)[1], want[1])
    for p, grad in zip((model[0].weight, model[2].weight), (want[2], want[4]), strict=True):
        assert p.grad is None
        torch.testing.assert_close(p.main_grad, grad + 1)  # type: ignore[union-attr]
    model = mlp()
    assert_same_bits(step(model.requires_grad_(False))[1], want[1])
    x = model(X)  # no gradient of the input either
    assert not x.requires_grad


def test_choose_finds_what_was_planted() -> None:
    model = nn.Sequential(nn.Linear(K, N))
    with torch.no_grad():
        model[0].weight[:, 40] *= 30
    mixprec.convert(model, "mxfp8+outliers-0.04").train()
    state = torch.get_rng_state()
    assert mixprec.choose_outliers(model, [X, X * 2]) == {"0": [3, 17, 40, 95]}
    assert torch.equal(torch.get_rng_state(), state)
    assert model[0].outliers.nonzero()[:, 0].tolist() == [3, 17, 40, 95]
    x = X.clone()
    x[:, [3, 50]] = X[:, [50, 3]]
    assert mixprec.choose_outliers(model, lambda: [x]) == {"0": [17, 40, 50, 95]}


def test_state_dicts() -> None:
    model = mlp()
    state = model.state_dict()
    other = mixprec.convert(mixprec.unconvert(mlp()), "fp8-rowwise+outliers-0.03")
    with pytest.raises(RuntimeError, match=r"0: recipe fp8-rowwise\+outliers-0\.03 has outl"):
        other(X)
    assert "0.outliers" not in other.state_dict()
    other.load_state_dict(state)
    assert_same_lists(step(other), step(model))
    plain = mixprec.scaling.plain_state_dict(model)
    mixprec.unconvert(mlp()).load_state_dict(plain)
    mixprec.convert(mixprec.unconvert(mlp()), "fp8").load_state_dict(state)
    other.load_state_dict(plain)  # which has no indices: those here stay
    assert torch.equal(other[0].outliers, model[0].outliers)
    for wrong in (torch.ones(3), 1):
        with pytest.raises(RuntimeError, match=r"0\.outliers must have shape \(96,\)"):
            other.load_state_dict(state | {"0.outliers": wrong})
    assert torch.equal(other[0].outliers, model[0].outliers)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, K))
        mixprec.convert(empty, "fp8-rowwise+outliers-0.03")
    empty.load_state_dict(state, assign=True)
    assert_same_bits(empty(X), model(X))


@for_each("compiled", [False, True])
def test_checkpoints_of_a_model_that_has_none_yet(compiled: bool, tmp_path: Path) -> None:
    model = mlp()
    mixprec.save_checkpoint(tmp_path / "a.pt", model=model)
    other: Any = mixprec.convert(mixprec.unconvert(mlp()), "fp8-rowwise+outliers-0.03")
    other = torch.compile(other, backend="eager") if compiled else other
    mixprec.load_checkpoint(tmp_path / "a.pt", model=other)
    assert_same_bits(other(X), model(X))


def test_averages_and_changes_while_weights_are_kept() -> None:
    """No index is there twice, and a cast weight is that of the outliers that it was cast for."""
    model = mlp()
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for _ in range(20):
        mean.update_parameters(model)
    torch.testing.assert_close(mean(X), model(X))
    moved = X.roll(1, 1)
    mixprec.choose_outliers(other := mlp(), [moved])
    with mixprec.reuse_weights(model):
        model(X)
        mixprec.choose_outliers(model, [moved])
        assert_same_bits(model(moved), other(moved))
    model[0].outliers = torch.ones(3)
    with pytest.raises(RuntimeError, match="a number for each of the 96 input features"):
        model(X)


def test_other_layers_get_the_rest_of_the_recipe() -> None:
    parts = {"conv": nn.Conv2d(3, 8, 1), "linear": nn.Linear(8, 8)}
    model = nn.ModuleDict({**parts, "attention": nn.MultiheadAttention(8, 2)})
    mixprec.convert(model, "fp8+gw-bf16+outliers-0.1")
    found = {n: m.recipe.name for n, m in model.named_modules() if isinstance(m, Layer)}
    own = "fp8+gw-bf16+outliers-0.1"
    assert found.pop("linear") == found.pop("attention.out_proj") == own
    assert [*found.values()] == ["fp8+gw-bf16"] * 2
    assert not any(m._is_override for m in model.modules() if isinstance(m, Layer))
    with pytest.raises(ValueError, match="Conv2d: recipe must have no outliers"):
        model["conv"].recipe = "fp8+outliers-0.1"  # type: ignore[assignment]


def test_errors() -> None:
    x, w, _, _ = operands()
    name, linear = "fp8+outliers-0.1", functools.partial(functional.linear, x, w)
    tokens = torch.zeros(x.shape[:-1], dtype=torch.int64)
    none = "must have no outliers"
    calls: tuple[tuple[Any, str], ...] = (
        (lambda: linear(recipe=name), "must be given as `outliers`"),
        (lambda: linear(outliers=FEW), "outliers must be None"),
        (
            lambda: linear(recipe=name, outliers=torch.tensor([2, 2])),
            r"different indices of the 96 features, got \[2, 2\]",
        ),
        (lambda: functional.matmul(x, w.t(), recipe=name), "must be given"),
        (lambda: functional.norm_linear(x, w, recipe=name), none),
        (lambda: functional.mlp(x, w, w.t(), act="gelu", recipe=name), none),
        (lambda: functional.conv2d(x[None], w.view(2, 2, 24, 48), recipe=name), none),
        (lambda: functional.linear_cross_entropy(x, w, tokens, recipe=name), none),
        (lambda: mixprec.autocast(name), none),
        (lambda: mixprec.choose_outliers(nn.Linear(4, 4), [x]), "got none"),
        (lambda: mixprec.choose_outliers(mlp(), []), "at least one"),
        (lambda: mixprec.choose_outliers(mlp(), [X * torch.inf]), "'0' must be finite"),
        (lambda: mixprec.audit(mlp(), X, what_if=name), "recipe without outliers"),
        (lambda: Recipe.parse("fp8+outliers-1"), "below 1"),
        (lambda: Recipe.parse("bf16+outliers-0.1"), "bf16 operands have no scale"),
    )
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()


def test_names() -> None:
    for name, same in (
        ("mxfp4+outliers-0.01", "MXFP4+outliers-.01"),
        ("fp8+gw-bf16+outliers-0.05", "fp8+outliers-0.05+gw-bf16"),
    ):
        recipe = Recipe.parse(name)
        assert recipe.name == name
        assert recipe == Recipe.parse(same)
        assert Recipe.from_dict(recipe.to_dict()) == recipe
        assert recipe.without_outliers == Recipe.parse(name.rpartition("+")[0])
        assert recipe.product("forward") == Recipe.parse(name.partition("+")[0])
    assert Recipe.parse("mxfp4+outliers-0.01").outlier_count(101) == 2
    assert Recipe.parse("mxfp4+outliers-0.07").outlier_count(100) == 7
