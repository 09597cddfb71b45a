"""Weights that are cast once for several passes, and weight gradients that go to main_grad."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from cases import for_each, nearest, normal, pairwise
from independent import assert_same_lists
from test_fp8_composition import EVERY, NAMED, batch, compiled, make, train
from torch import nn

import mixprec
from mixprec.functional import operands
from mixprec.nn import Linear
from mixprec.nn.reuse_weights import reuse_weights
from mixprec.recipes import RECIPES
from mixprec.testing import sqnr

pytestmark = pytest.mark.filterwarnings("ignore:a model with an fp16 recipe")


def casts_of_weights(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many casts there were, each time that it is called."""
    cast = Mock(wraps=operands.cast)
    monkeypatch.setattr(operands, "cast", cast)
    return lambda: sum(call.args[1] == "w" for call in cast.call_args_list)


@for_each("recipe, kind", EVERY)
def test_each_weight_is_cast_once_a_step(
    recipe: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = make(recipe, kind), make(recipe, kind)
    if kind == "mlp":
        for each in (plain, model):
            each[1].up.weight = each[0].up.weight  # tied
    expected, count = train(plain, micro_batches=3), casts_of_weights(monkeypatch)
    assert_same_lists(train(model, micro_batches=3, around=reuse_weights), expected)
    if kind == "mlp":
        assert count() == 3 * 4, "steps times layers"
    elif RECIPES[recipe].is_scaled:
        assert count() == 3 * 5
        assert model[0].wide._quantized_weight is None


def test_cast_weights_are_freed_when_the_block_ends() -> None:
    model = make("fp8")
    with contextlib.suppress(KeyError), reuse_weights(model):
        data = weakref.ref(model[0].up._quantized_weight.operand.matrix.data)
        with reuse_weights(model):  # the outermost counts
            pass
        assert data() is not None
        raise KeyError
    gc.collect()
    assert data() is None
    assert model[0].up._quantized_weight is None


def test_without_grad_mode_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("fp8")
    count = casts_of_weights(monkeypatch)
    with torch.no_grad(), reuse_weights(model), mixprec.use_backend("cpp"):  # op by op
        model(batch(0))
        model(batch(1))
    assert count() == 8
    with reuse_weights(model), torch.no_grad():  # and what is kept may be read without
        model(batch(0))
    assert count() == 12


def test_a_weight_that_changes_inside_the_block_is_noticed() -> None:
    ours, fused = mixprec.optim.AdamW, partial(torch.optim.SGD, lr=1e-3, fused=True)
    for kind, first, cls in (("mlp", "up", ours), ("cnn", "stem", ours), ("mlp", "up", fused)):
        model = make("fp8", kind)
        optimizer = cls(model.parameters())
        with reuse_weights(model):
            model(batch(0, kind)).sum().backward()
            optimizer.step()  # which leaves the versions of the params as they are, if fused
            with pytest.raises(RuntimeError, match=rf"weight of 0\.{first} was changed inside the"):
                model(batch(0, kind))
        model(batch(0, kind))
    with reuse_weights(model):
        for p in model.parameters():
            p.data = p.data.clone()
        with pytest.raises(RuntimeError, match="was changed inside the"):
            model(batch(0, kind))


def test_another_weight_that_stands_in_is_cast_itself() -> None:
    layer = Linear(8, 8, bias=False)
    other = {"weight": torch.ones(8, 8)}
    x = torch.ones(2, 8)
    with reuse_weights(layer):
        y = torch.func.functional_call(layer, other, (x,))
    assert y.tolist() == [[8.0] * 8] * 2


def test_a_parametrization_is_not_evaluated_for_nothing() -> None:
    """Attention keeps no weight; a power iteration of spectral norm would change results."""
    plain = nn.MultiheadAttention(8, 2, bias=False)
    norm = nn.utils.parametrizations.spectral_norm(plain, "in_proj_weight")
    model = mixprec.convert(norm, "bf16")
    before = copy.deepcopy(model.state_dict())
    with reuse_weights(model):
        pass
    assert_same_lists(list(model.state_dict().values()), list(before.values()))


@for_each("fuse", [False, True])
def test_a_parametrization_is_evaluated_once_a_pass(fuse: bool) -> None:
    """As in torch: the power iterations of spectral norm are as many."""
    linear = nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32))
    plain = nn.Sequential(nn.LayerNorm(32), linear)
    model, x = mixprec.convert(copy.deepcopy(plain), "bf16", fuse=fuse), torch.ones(4, 32)
    with reuse_weights(model):
        model(x).sum().backward()
    plain(x)
    assert_same_lists(list(model.state_dict().values()), list(plain.state_dict().values()))


# --- main_grad ---------------------------------------------------------------------------------


LAYERS = {  # and shapes of an input
    "linear": (lambda: nn.Linear(64, 32), (15, 64)),
    "1x1": (lambda: nn.Conv2d(16, 8, 1), (2, 16, 6, 5)),
    "3x3": (lambda: nn.Conv2d(16, 8, 3), (2, 16, 6, 5)),
}


@pytest.mark.parametrize(
    ("recipe", "kind", "compile"),
    [
        *((*case, False) for case in pairwise(NAMED, list(LAYERS))),
        *((recipe, "linear", True) for recipe in ("bf16", "fp8", "fp8-delayed", "nvfp4-1x16")),
    ],
)
def test_main_grad_takes_the_weight_gradients(recipe: str, kind: str, compile: bool) -> None:
    make, shape = LAYERS[kind]
    plain = mixprec.cast_parameters(mixprec.convert(make(), nearest(recipe)), torch.bfloat16)
    main = copy.deepcopy(plain)
    main.weight.main_grad = torch.zeros_like(main.weight, dtype=torch.float32)
    forward = compiled(main) if compile else main
    exact = torch.zeros(main.weight.shape)
    for i in range(3):
        x = normal(shape, torch.bfloat16, seed=i)
        y = plain(x)
        exact += torch.autograd.grad(y, plain.weight, torch.ones_like(y))[0].float()
        forward(x).backward(torch.ones_like(y))
    assert main.weight.grad is None
    assert main.bias.grad is not None
    if RECIPES[recipe].x.bits > 4:  # sums of so few bits may be exact in bf16
        assert not torch.equal(main.weight.main_grad, main.weight.main_grad.bfloat16().float())
    assert sqnr(exact, main.weight.main_grad) > 45  # bf16's rounding of the three
    before = main.weight.detach().clone()
    mixprec.optim.AdamW(main.parameters()).step()
    assert not torch.equal(before, main.weight)


def test_main_grad_gives_way_to_a_gradient_that_is_there() -> None:
    """Under DDP, whose hooks need it: mixprec's own writes main_grad and leaves grad in place."""
    layer = Linear(8, 8)
    for wrong, match in (
        (torch.zeros(8, 8).bfloat16(), "weight.main_grad must have dtype float32, got"),
        (torch.zeros(8), "weight.main_grad must have shape weight's shape"),
        ([1.0], "weight.main_grad must be a torch.Tensor, got list"),
    ):
        layer.weight.main_grad = wrong
        with pytest.raises((ValueError, TypeError), match=match):
            layer(torch.ones(2, 8))
    del layer.weight.main_grad
    layer(torch.ones(2, 8)).sum().backward()
    layer.weight.main_grad = torch.zeros(8, 8)
    layer(torch.ones(2, 8)).sum().backward()
    assert layer.weight.main_grad.count_nonzero() == 0
    assert layer.weight.grad.flatten()[0] == 4.0
