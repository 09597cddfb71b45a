"""convert(fuse=True): layers that take one tensor cast it once."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import name
from torch import nn

import mixprec
from mixprec.nn._shared_input import children_that_share
from mixprec.recipes import RECIPES
from mixprec.testing import sqnr

WIDTH = 48


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


class Branches(Three):
    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        q = self.q(x)
        if other is None:
            return self.k(x) + self.v(x)
        x = x + 1
        return q + self.k(x) + self.v(other) + self.norm(x, 1) + self.other(x=x)


class Reassigned(Three):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x)
        x = self.k(x)
        y, z = self.v(x), self.w(x)
        if self.done:
            return y
        return [self.o(i) for i in (x, y, z)] + [q, self.u(x)]


def both(recipe: str) -> tuple[Any, Any, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Three(), torch.randn(2, 35, WIDTH)
    plain = mixprec.convert(copy.deepcopy(model), recipe)
    return plain, mixprec.convert(model, recipe, fuse=True), x


def step(model: nn.Module, x: torch.Tensor) -> tuple[dict[str, torch.Tensor], int]:
    """The output and the gradients, and how many bytes were saved for backward."""
    saved: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    x = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    y.square().mean().backward()
    found = {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in model.named_parameters()}}
    model.zero_grad()
    mixprec.update_scales(model)
    return found, sum(saved.values())


def test_which_calls_share() -> None:
    expected = {
        Three: [["q", "between", "k", "v"]],
        Branches: [],
        Reassigned: [["q", "k"], ["v", "w"]],
    }
    for kind, groups in expected.items():
        assert children_that_share(kind.forward) == groups, kind.__name__
    assert children_that_share(torch.numel) == [], "no source"


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r not in ("mxfp4", "nvfp4")], ids=name)
def test_the_same_bits_but_for_the_gradient_of_the_input(recipe: str) -> None:
    plain, fused, x = both(recipe)
    for _ in range(2):  # with delayed scales, once with the first ones and once with the next
        (expected, before), (got, after) = step(plain, x), step(fused, x)
        for key in expected.keys() - {"x"}:
            assert torch.equal(got[key], expected[key]), key
        assert float(sqnr(expected["x"], got["x"])) > 45
        # The 16-bit copy of x is kept once, and not three times; so are its codes.
        assert after <= before - 2 * x.numel() * RECIPES[recipe].x.bits // 8
    for a, b in zip(plain.buffers(), fused.buffers(), strict=True):
        assert torch.equal(a, b)


def test_what_the_log_says_and_unconvert(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="mixprec"):
        _, fused, x = both("bf16")
        assert "fused one cast for q, k, v (1)" in caplog.text
        y = fused(x)
        for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
            assert torch.equal(other(x), y)
        assert torch.equal(torch.compile(fused, backend="aot_eager", fullgraph=True)(x), y)
        assert type(mixprec.unconvert(fused)) is Three
        fused.k = nn.Identity()
        mixprec.convert(fused, "bf16", fuse=True, overrides={"v": "fp8"})
    assert "not fused: q, because of different recipes (bf16, fp8)" in caplog.text


def test_each_layer_computes_from_what_it_is_given() -> None:
    """Whatever happens between the calls."""
    changes: dict[str, Callable[[Any], object]] = {
        "the input in place": lambda m: setattr(m, "between", lambda x: x.mul_(2)),
        "a weight": lambda m: setattr(m, "k", nn.Linear(WIDTH, 16)),
        "a hook": lambda m: m.k.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],)),
        "a hook on the first": lambda m: m.q.register_forward_hook(lambda _, i, y: 2 * y),
        "a layer calls another": lambda m: setattr(m, "between", lambda x: m.v(x)),
        "no layer": lambda m: setattr(m, "k", nn.Identity()),
    }
    for what, change in changes.items():
        plain, fused, x = both("bf16")
        for model in (plain, fused):
            torch.manual_seed(1)
            change(model)
        if what == "no layer":
            x = x[..., :16].repeat(1, 1, 3)
            plain.v = fused.v = nn.Identity()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(fused(x.clone()), plain(x.clone())), what
    plain, fused, x = both("bf16")
    assert torch.equal(fused.k(x), plain.k(x)), "a layer alone"
    with mixprec.autocast(enabled=False):
        assert torch.equal(fused(x), plain(x))
    fused.between = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fused(x)
    fused.between = torch.numel
    assert torch.equal(fused(2 * x), plain(2 * x)), "after an exception"
