"""convert(fuse=True): what is fused, what runs as it is, and everything that must stay."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from layer_cases import (
    WIDTH,
    converted,
    equal,
    feed_forward,
    gradients,
    model_and_batch,
    saved_tensors,
)
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import mixprec
from mixprec._context import context
from mixprec.functional import operands
from mixprec.nn import MLPSpec, NormSpec, register_fusion
from mixprec.ops import linear_pass
from mixprec.recipes import RECIPES
from mixprec.testing import sqnr


class Called(nn.GELU):
    """Without a forward pass of its own, but what calls it."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().__call__(x)


class Fivefold(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 5 * super().forward(x)


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "another layer": lambda m: m.__setitem__(1, nn.Linear(WIDTH, 64)),
    "a layer less": lambda m: m.__delitem__(0),
    "a layer more": lambda m: m.insert(0, nn.Tanh()),
    "8-bit weights": mixprec.freeze,
    "a forward of its own": lambda m: setattr(m[2], "forward", torch.tanh),
    "a hook on a layer": lambda m: m[1].register_forward_hook(lambda module, inputs, y: 2 * y),
    "a hook on an activation": lambda m: m[2].register_forward_hook(lambda module, x, y: 2 * y),
    "another class": lambda m: setattr(m, "__class__", Fivefold),
    "an activation of another class": lambda m: setattr(m[2], "__class__", Called),
}


@pytest.mark.parametrize("what", CHANGES)
def test_modules_that_are_replaced_or_patched_after_fusing_are_used(what: str) -> None:
    plain, fused = converted(feed_forward(hidden=64))
    x = torch.randn(3, WIDTH)
    assert not torch.equal(fused(x), plain(x)), "the roundings of fused layers"
    for model in (plain, fused):
        torch.manual_seed(1)
        CHANGES[what](model)
    assert torch.equal(fused(x), plain(x))


def test_slices_regions_and_a_patched_class_run_the_modules_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, fused = converted(feed_forward())
    x = torch.randn(3, WIDTH)
    assert torch.equal(fused[:2](x), plain[:2](x))
    with mixprec.autocast(enabled=False):
        assert torch.equal(fused(x), plain(x))
    handle = fused[1].register_forward_hook(lambda *_: None)
    assert torch.equal(fused(x), plain(x))
    handle.remove()
    assert not torch.equal(fused(x), plain(x))
    with torch.no_grad():
        plain[3].weight.zero_(), fused[3].weight.zero_()
    assert torch.equal(fused(x), plain(x)), "the bias"
    forward = nn.Sequential.forward
    monkeypatch.setattr(nn.Sequential, "forward", lambda self, x: 10 * forward(self, x))
    assert torch.equal(fused(x), plain(x))


def test_a_norm_of_two_dimensions_runs_as_it_is() -> None:
    plain, fused = converted(nn.Sequential(nn.LayerNorm((5, WIDTH)), nn.Linear(WIDTH, 64)))
    x = torch.randn(5, WIDTH)
    assert torch.equal(fused(x), plain(x))


def test_modes_of_the_program_see_torchs_functions() -> None:
    class Log(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.add(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    seen: set[str] = set()
    model, x = model_and_batch()
    plain, fused = converted(model)
    with Log():
        y = fused(x)
    assert {"scaled_dot_product_attention", "layer_norm", "gelu"} <= seen
    assert torch.equal(y, plain(x))


def test_names_parameters_and_state_stay_and_unconvert_restores_the_classes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, x = model_and_batch()
    kinds, keys = [type(m) for m in model.modules()], list(model.state_dict())
    with caplog.at_level(logging.INFO, logger="mixprec"):
        mixprec.convert(model, "bf16", fuse=True)
    assert "norm, linear, activation, linear (2)" in caplog.text
    assert "whose forward passes are not known: Attention (2)" in caplog.text
    assert list(model.state_dict()) == keys
    assert type(model[0].mlp) is nn.Sequential
    y = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), y)
    mixprec.convert(model, "bf16")  # again, without fuse
    assert not torch.equal(model(x), y)
    mixprec.convert(model, "bf16", fuse=True)
    assert torch.equal(model(x), y)
    mixprec.unconvert(model)
    assert [type(m) for m in model.modules()] == kinds
    assert not any("forward" in vars(m) for m in model.modules())


def test_what_is_not_fused_is_listed_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[0].register_forward_hook(lambda *_: None)
    with caplog.at_level(logging.INFO, logger="mixprec"):
        mixprec.convert(model, "bf16", fuse=True)
    reason = "fused nothing; not fused: 0, because of hooks on a layer, norm or activation"
    assert reason in caplog.text


class Norm(nn.Module):
    """The user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.eps = nn.Parameter(torch.rand(WIDTH)), 1e-3

    @staticmethod
    def mean_square(x: torch.Tensor) -> torch.Tensor:
        return x.square().mean(-1, keepdim=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.mean_square(x) + self.eps).rsqrt() * self.g


class Feed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.act = norm, nn.GELU()
        self.a, self.b = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.b(self.act(self.a(given)))


class Child(Feed):
    pass


def test_a_registered_class_is_fused_and_only_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    register_fusion(Norm, lambda m: NormSpec(WIDTH, m.eps, m.g))
    register_fusion(Feed, lambda m: MLPSpec((m.a,), m.act, m.b))
    x = torch.randn(9, WIDTH)
    for kind, expected in ((Feed, "FusedMLP"), (Child, "FusionScope")):
        model = nn.Sequential(Norm(), kind(Norm()))
        exact = copy.deepcopy(model)(x)
        mixprec.convert(model, "bf16", fuse=True)
        assert [type(m.forward.__self__).__name__ for m in model] == ["FusedNorm", expected]
        assert float(sqnr(exact, model(x))) > 40
        assert torch.equal(model[1](given=x), model[1](x))
        with pytest.raises(TypeError, match="unexpected keyword"):
            model[1](x=x)
        model[0].eps = 10.0  # read in each pass
        assert model(x).norm() < 0.9 * exact.norm()
    with monkeypatch.context() as patch:
        patch.setattr(Norm, "mean_square", staticmethod(torch.zeros_like))
        torch.testing.assert_close(model[0](x), x * model[0].g / 10**0.5, msg="another method")
    monkeypatch.setattr(Norm, "forward", lambda self, x: 3 * x)
    assert torch.equal(model[0](x), 3 * x), "its forward pass was replaced"
    with pytest.raises(TypeError, match="kind must be a subclass"):
        register_fusion(F.gelu, lambda m: "gelu")
    with pytest.raises(TypeError, match="describe must be callable"):
        register_fusion(Norm, "gelu")


def test_convert_finishes_or_leaves_the_model_as_it_was() -> None:
    class Bad(nn.Identity):
        pass

    model, x = feed_forward().append(Bad()), torch.randn(3, WIDTH)
    names, expected = [type(m) for m in model.modules()], model(x)
    register_fusion(Bad, lambda m: 7)
    with pytest.raises(TypeError, match="describe of Bad must return"):
        mixprec.convert(model, "fp8-delayed", fuse=True)
    assert [type(m) for m in model.modules()] == names
    assert torch.equal(model(x), expected)
    register_fusion(Bad, lambda m: None)
    mixprec.convert(model, "fp8-delayed", fuse=True, saved="int8")
    model(x).sum().backward()
    state, y = copy.deepcopy(model.state_dict()), model(x)
    register_fusion(Bad, lambda m: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mixprec.convert(model, "fp16", fuse=True)
    assert torch.equal(model(x), y)
    assert all(map(torch.equal, state.values(), model.state_dict().values()))


AROUND = (nullcontext, mixprec.autocast, lambda: torch.autocast("cpu", torch.bfloat16))


def end(norm: nn.Module, x: torch.Tensor, around: Callable[[], Any]) -> object:
    try:
        with around():
            y = norm(x)
    except (RuntimeError, IndexError, ValueError) as error:
        return str(error)
    return y.dtype, y.shape


NORMS = (
    nn.LayerNorm(WIDTH),
    nn.LayerNorm(WIDTH, elementwise_affine=False),
    nn.LayerNorm(WIDTH, bias=False).bfloat16(),
    nn.RMSNorm(WIDTH),
    nn.RMSNorm(WIDTH, elementwise_affine=False),
)


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_fused_norms_raise_and_return_what_torchs_do(norm: nn.Module) -> None:
    inputs = [torch.randn(s) for s in ((3, WIDTH), (WIDTH,), (0, WIDTH), (3, 8), ())]
    inputs += [inputs[0].to(d) for d in (torch.bfloat16, torch.float16, torch.float64)]
    inputs += [torch.randint(9, (3, WIDTH))]
    _, (_, fused) = converted(nn.ModuleList([nn.Linear(2, 2), copy.deepcopy(norm)]))
    for x in inputs:
        for around in AROUND:
            assert end(fused, x, around) == end(norm, x, around), (x.dtype, x.shape)


class Copied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.k = nn.Linear(WIDTH, 8), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * self.k

    def clone(self) -> nn.Module:
        other = type(self)()
        vars(other).update({k: v for k, v in vars(self).items() if not k.startswith("_")})
        other.load_state_dict(self.state_dict())
        return other


def test_copies_of_all_kinds_compute_from_what_they_hold() -> None:
    x = torch.randn(3, WIDTH)
    model = mixprec.convert(Copied(), "bf16", fuse=True)
    y, clone, shallow = model(x), model.clone(), copy.copy(model)
    shallow.k = 4.0
    assert torch.equal(shallow(x), 2 * y)
    assert torch.equal(copy.deepcopy(shallow)(x), 2 * y)
    with torch.no_grad():
        model.a.weight.zero_()
    torch.testing.assert_close(clone(x), y, rtol=0.02, atol=0.02)
    clone(x).sum().backward()
    assert clone.a.weight.grad is not None
    for forward in (model.forward, model.forward.__func__):
        assert torch.equal(MethodType(forward, model)(x), model(x)), "as accelerate binds it"


# A tensor that several layers of a module take is cast once


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


@pytest.mark.parametrize("recipe", [name for name, r in RECIPES.items() if not r.backward])
def test_the_same_bits_and_fewer_bytes(recipe: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="mixprec"):
        plain, fused, x = both(recipe)
    assert "layers with one input share its cast in Three (1)" in caplog.text
    for _ in range(2):  # with delayed scales, once with the first ones and once with the next
        (expected, before), (got, after) = step(plain, x), step(fused, x)
        assert equal(got, expected)
        # The copy of x is kept once, and not three times.
        kept = 0 if RECIPES[recipe].is_delayed else 2 * x.numel() * RECIPES[recipe].x.bits // 8
        assert after <= before - kept
    assert all(map(torch.equal, plain.buffers(), fused.buffers()))


# What happens between the calls of q and of k and v, and how many of the calls cast x. (Random


def test_nothing_is_shared_where_a_write_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fused, x = both("bf16")
    with torch.inference_mode():
        assert casts_of(fused, x.clone(), monkeypatch) == 3
    with torch.utils._python_dispatch._disable_current_modes():
        assert casts_of(fused, x, monkeypatch) == 1
    with FlopCounterMode(display=False):
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
