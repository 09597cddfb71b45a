"""Bad input to layers, recipes and checkpoints: a clear message, and nothing is corrupted.

What one op or one class refuses is tested beside it; here are whole models, in every recipe.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from cases import for_each, nearest, normal
from torch import nn

import mixprec
from mixprec import Recipe, convert
from mixprec.recipes import RECIPES
from mixprec.scaling import BUFFERS

IN, OUT = 24, 8
pytestmark = pytest.mark.filterwarnings("ignore:a model with an fp16 recipe")


def make(recipe: str | Recipe) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, 32), nn.ReLU(), nn.Linear(32, OUT))
    return convert(model, recipe)  # type: ignore[return-value]


def batch(seed: int, rows: int = 6) -> torch.Tensor:
    return normal((rows, IN), torch.float32, seed=seed)


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, gradients and buffers, those too that no state dict holds."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    grads = {f"grad of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {name: t.detach().clone() for name, t in {**named, **grads}.items()}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    different = [n for n in want if not torch.equal(got[n].nan_to_num(7), want[n].nan_to_num(7))]
    assert not different


@for_each("name", ["convert", "freeze", "reuse_weights", "unconvert", "update_scales"])
def test_what_is_not_a_model_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"^{name}: model must be a torch\.nn\.Module, got list"):
        getattr(mixprec, name)([nn.Linear(4, 4)]).__enter__()  # reuse_weights is a block


@for_each("recipe", RECIPES)
def test_a_batch_that_does_not_fit_changes_nothing(recipe: str) -> None:
    model = make(recipe)
    model(batch(0)).sum().backward()
    before = snapshot(model)
    for x in (torch.ones(2, 7), torch.ones(2, IN).int(), None):
        with pytest.raises((ValueError, TypeError), match=r"^linear \(0\): x must"):
            model(x)
    assert_same(snapshot(model), before)


X = torch.ones(2, 3, 6, 6)


@for_each(
    "layer, x, message",
    [
        (nn.Linear(4, 4), X, r"linear \(1\.0\): x must be .* K = 4 .* got shape"),
        (nn.Linear(6, 4), X.double(), r"linear \(1\.0\): x must .* cast it, as by x\.float"),
        (nn.Linear(6, 4).double(), X, r"linear \(1\.0\): weight must .* cast the model, as"),
        (nn.Conv2d(4, 4, 1), X, r"conv2d \(1\.0\): x must be .* C = 4 .* got shape"),
        (nn.Conv2d(3, 4, 1), X.int(), r"conv2d \(1\.0\): x must .* cast it, as by x\.float"),
    ],
)
def test_errors_name_the_layer(layer: nn.Module, x: torch.Tensor, message: str) -> None:
    model = convert(nn.Sequential(nn.ReLU(), nn.Sequential(copy.deepcopy(layer))), "bf16")
    with pytest.raises(ValueError, match=f"^{message}"):
        model[1](x)


# --- numbers that are none -----------------------------------------------------------------------


def step(
    model: nn.Module, optimizer: object, scaler: object, x: torch.Tensor, factor: float = 1.0
) -> torch.Tensor:
    y = model(x)
    scaler.scale(y.square().mean() * factor).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return y.detach()


@for_each("number", [math.nan, math.inf, -math.inf])
@for_each("where", ["x", "g"])
@for_each("recipe", RECIPES)
def test_a_batch_with_a_number_that_is_none(recipe: str, where: str, number: float) -> None:
    """It is seen in the output or in found_inf, costs one step, and the parameters are those of a
    run without that batch, to the bit. Delayed scaling records what was finite in it (x before an
    overflow in g) and nothing else."""
    runs = []
    for bad in (False, True):
        model = make(nearest(recipe))
        optimizer = mixprec.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = mixprec.GradScaler(init_scale=2.0**6, growth_interval=1000)
        for i in range(2):
            step(model, optimizer, scaler, batch(i))
        if bad:
            before, x = snapshot(model), batch(7)
            if where == "x":
                x[2, 3] = number
            y = step(model, optimizer, scaler, x, number if where == "g" else 1.0)
            finite = [where == "g" or row != 2 for row in range(6)]
            assert y.isfinite().all(1).tolist() == finite, "no other row than the one that it is in"
            assert scaler.last_step_skipped
            after, rows = snapshot(model), ["xg".index(role) for role in {"g", where}]
            for state in (before, after):
                state |= {n: t[rows] for n, t in state.items() if n.endswith(BUFFERS[:2])}
            assert_same(after, before)
        assert int(scaler.skipped) == bad
        for i in range(2, 4):
            step(model, optimizer, scaler, batch(i))
        runs.append(snapshot(model))
    without, with_bad = runs
    for state in runs:
        assert all(t.isfinite().all() for n, t in state.items() if n.endswith("amax_history"))
    different = {n for n in without if not torch.equal(without[n], with_bad[n])}
    assert all(n.endswith(BUFFERS[:2]) for n in different), different


# --- checkpoints ---------------------------------------------------------------------------------


@for_each(
    "key, wrong, message",
    [
        ("2.scale", torch.ones(4), r"2\.scale must have shape \(2,\) .* got \(4,\), torch.float32"),
        ("2.scale", torch.ones(2).int(), r"2\.scale must have .* got \(2,\), torch.int32"),
        ("2.amax_history", torch.ones(2, 4), r"shape \(2, 16\) .* recipe fp8-delayed.* \(2, 4\)"),
        ("2.scale", torch.tensor([1, math.nan]), r"2\.scale must be 0 or between .* got \[nan\]"),
        ("2.scale", torch.tensor([math.inf, 1]), r"2\.scale must be 0 or between .* got \[inf\]"),
        ("2.scale", torch.tensor([1e-45, 0]), r"2\.scale must be 0 or between .* file is damaged"),
        ("2.scale", [1.0], "got <class 'list'>"),
        ("2.amax_history", torch.full((2, 16), math.inf), r"finite, 0 or more, got \[inf, inf,"),
        ("2.amax_history", torch.full((2, 16), -1.0), r"must be finite, 0 or more, got \[-1\.0,"),
        ("2.weight", torch.ones(8, 31), r"size mismatch for 2\.weight.*\[8, 31\].*\[8, 32\]"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_model_trains_on(
    key: str, wrong: torch.Tensor, message: str
) -> None:
    """What does not fit is not loaded, the rest is; no scale is left that belongs to neither."""
    model = make("fp8-delayed")
    optimizer, scaler = mixprec.optim.AdamW(model.parameters()), mixprec.GradScaler()
    for i in range(2):
        step(model, optimizer, scaler, batch(i))
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict({**state, key: wrong})
    for name, value in model.state_dict().items():
        reset = name == key and "weight" not in key  # as before the first step
        assert torch.equal(value, torch.zeros_like(value) if reset else state[name]), name
    step(model, optimizer, scaler, batch(2))
    assert not scaler.last_step_skipped
    after = model.state_dict()
    assert all(t.isfinite().all() for t in after.values())
    assert all((after[f"{layer}.scale"] > 0).all() for layer in "02")
