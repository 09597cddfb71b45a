"""convert(fuse=True): a tensor that several layers of a module take is cast once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from layer_cases import WIDTH, converted, equal, gradients, saved_tensors
from torch import nn

import mixprec
from mixprec._context import context
from mixprec.functional import operands
from mixprec.ops import linear_pass
from mixprec.recipes import RECIPES


class Three(nn.Module):
    """What attention does with its input, and something in between."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, n, bias=n < WIDTH) for n in (WIDTH, 16, 16))
        self.between: Callable[[torch.Tensor], object] = torch.numel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x)
        self.between(x)
        return torch.cat((q, self.k(x) * self.v(x)), dim=-1)


def both(recipe: str) -> tuple[Any, Any, torch.Tensor]:
    torch.manual_seed(0)
    return *converted(Three(), recipe), torch.randn(2, 35, WIDTH)


def step(model: nn.Module, x: torch.Tensor) -> tuple[dict[str, torch.Tensor], int]:
    """The output and the gradients, and how many bytes were saved for backward."""
    torch.manual_seed(1)  # of stochastic rounding
    with saved_tensors() as saved:
        results = gradients(model, x)
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in saved)}
    return results, sum(storages.values())


def casts_of(model: nn.Module, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many layers' inputs one call of the model casts."""
    cast, one = Mock(wraps=operands.cast), Mock(wraps=linear_pass.linear_forward)
    with monkeypatch.context() as patch:
        patch.setattr(operands, "cast", cast)
        patch.setattr(linear_pass, "linear_forward", one)
        model(x)
    in_one_call = sum(call.args[0].dtype == torch.float32 for call in one.call_args_list)
    return in_one_call + sum(call.args[1] == "x" for call in cast.call_args_list)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_same_bits_and_fewer_bytes(recipe: str) -> None:
    plain, fused, x = both(recipe)
    for _ in range(2):  # with delayed scales, once with the first ones and once with the next
        (expected, before), (got, after) = step(plain, x), step(fused, x)
        assert equal(got, expected)
        # The copy of x is kept once, and not three times.
        kept = 0 if RECIPES[recipe].is_delayed else 2 * x.numel() * RECIPES[recipe].x.bits // 8
        assert after <= before - kept
    assert all(map(torch.equal, plain.buffers(), fused.buffers()))


def test_what_the_log_says_and_compiled_code(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="mixprec"):
        _, fused, x = both("bf16")
    assert "layers with one input share its cast in Three (1)" in caplog.text
    assert "whose forward passes are not known: Three (1)" in caplog.text
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), fused(x))


def in_mode(mode: Any) -> Callable[[Any, torch.Tensor], object]:
    def between(model: Any, x: torch.Tensor) -> None:
        with mode():
            model.k(x)

    return between


def double(x: torch.Tensor) -> None:
    x.data = x.data * 2  # the memory of the data before is used again by the next one


# What happens between the calls of q and of k and v, and how many of the calls cast x. (Random
# programs have more: writes to views, modes, regions, threads, checkpoints.)
BETWEEN: dict[str, tuple[Callable[[Any, torch.Tensor], object], int]] = {
    "nothing": (lambda model, x: None, 1),
    "a layer again": (lambda model, x: model.k(x), 1),
    "a write": (lambda model, x: x.mul_(2), 2),
    "data at the same address": (lambda model, x: (double(x), double(x)), 2),
    "another recipe": (in_mode(lambda: mixprec.autocast("fp8")), 2),
    "hooks": (in_mode(lambda: torch.autograd.graph.saved_tensors_hooks(id, id)), 2),
    "a view of x": (lambda model, x: model.k(x.view_as(x)), 2),
}


@pytest.mark.parametrize("what", BETWEEN)
def test_each_layer_computes_from_what_it_is_given(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    between, casts = BETWEEN[what]
    plain, fused, x = both("bf16")
    outputs = []
    for model in (plain, fused):
        given = x.clone()
        model.between = lambda x, model=model: between(model, x)
        outputs.append(model(given))
    assert torch.equal(*outputs)
    assert casts_of(fused, x.clone(), monkeypatch) == casts


def test_nothing_is_shared_where_a_write_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fused, x = both("bf16")
    with torch.inference_mode():
        assert casts_of(fused, x.clone(), monkeypatch) == 3
    with torch.utils._python_dispatch._disable_current_modes():
        assert casts_of(fused, x, monkeypatch) == 1
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert casts_of(fused, x, monkeypatch) == 3
    assert casts_of(mixprec.convert(fused, "bf16"), x, monkeypatch) == 3, "not fused any more"


def test_nothing_is_left_after_an_exception() -> None:
    plain, fused, x = both("bf16")
    fused.between = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fused(x)
    fused.between = torch.numel
    assert torch.equal(fused(x), plain(x))
    assert context.casts == []
