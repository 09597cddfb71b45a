"""LSTM, GRU and RNN: the same function as torch's, by a recipe; what convert leaves."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from cases import for_each
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec.functional import observed

K, H, T, B = 24, 32, 7, 6
KINDS = (nn.LSTM, nn.GRU, nn.RNN)
# The least SQNR in dB of results and gradients, as of a linear layer with operands of that format.
BARS = {"fp16": 55.0, "bf16": 38.0, "fp8": 18.0, "fp8-delayed": 18.0, "mxfp8": 18.0}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"bidirectional": True, "num_layers": 2, "dropout": 0.3},
    {"bias": False, "batch_first": True},
    {"num_layers": 3, "bidirectional": True, "bias": False},
)
INPUTS = ("batch", "sequence", "packed", "sorted")


def module(kind: type[nn.RNNBase], recipe: str = "bf16", **options: Any) -> Any:
    torch.manual_seed(0)
    return mixprec.convert(kind(K, H, **options), recipe)


def x_of(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (T, B, K)), generator=torch.Generator().manual_seed(1))


def given(form: str, plain: nn.RNNBase, state: bool) -> tuple[Any, Any, list[torch.Tensor]]:
    """An input, a state at the start, and the leaves of both."""
    lengths = [T, T, 5, 3, 3, 1] if form == "sorted" else [3, T, 1, 5, 3, T]
    batch = (B, T, K) if plain.batch_first else (T, B, K)
    if form in ("packed", "sorted"):
        leaves = [x_of(n, K).requires_grad_() for n in lengths]
        x: Any = pack_sequence(leaves, enforce_sorted=form == "sorted")
    else:
        x = x_of(*(batch if form == "batch" else (T, K))).requires_grad_()
        leaves = [x]
    if not state:
        return x, None, leaves
    count = plain.num_layers * (2 if plain.bidirectional else 1)
    shape = (count, H) if form == "sequence" else (count, B, H)
    states = [x_of(*shape).requires_grad_() for _ in range(2 if plain.mode == "LSTM" else 1)]
    return x, tuple(states) if len(states) == 2 else states[0], leaves + states


def results(layer: nn.Module, x: Any, hx: Any, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(2)
    y, states = layer(x, hx)
    out = [y.data if isinstance(y, PackedSequence) else y]
    out += states if isinstance(states, tuple) else [states]
    loss = sum((o.float() * x_of(*o.shape)).sum() for o in out)
    # Retained: the history of a packed input, which several layers take.
    return out + list(torch.autograd.grad(loss, [*leaves, *layer.parameters()], retain_graph=True))


def sqnr(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    error = (got - want).square().sum().item()
    return 10 * math.log10(want.square().sum().item() / error) if error else math.inf


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@for_each("form, i", [(form, i) for i, form in enumerate(INPUTS * 2)])
def test_computes_what_torch_does(kind: type[nn.RNNBase], form: str, i: int) -> None:
    """Of every form of input, with every option; dropout draws the same numbers."""
    for j, (recipe, bar) in enumerate(BARS.items()):
        options = OPTIONS[(i + j + i // 4) % 4]
        if kind is nn.RNN and j % 2:
            options = options | {"nonlinearity": "relu"}
        plain = kind(K, H, **options)
        ours = mixprec.convert(copy.deepcopy(plain), recipe)
        assert type(ours) is getattr(mixprec.nn, kind.__name__)
        args = given(form, plain, state=(i + j) % 2 == 0)
        want, got = results(plain, *args), results(ours, *args)
        for a, b in zip(got, want, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
            least = bar / (3 if "nonlinearity" in options else 1)  # ReLU cuts off others
            assert not b.any() or sqnr(a, b) > least, (recipe, options, sqnr(a, b))
        with mixprec.autocast(enabled=False):
            for a, b in zip(results(ours, *args), want, strict=True):
                assert torch.equal(a, b)


@for_each("kind", KINDS)
def test_outliers_and_large_gradients(kind: type[nn.RNNBase]) -> None:
    """One feature a thousand times the others; fp16 gradients overflow to Inf, not to a number."""
    plain = kind(K, H)
    x = x_of().mul_(torch.where(torch.arange(K) == 3, 1000.0, 1.0)).requires_grad_()
    want = results(plain, x, None, [x])
    for recipe, bar in {"bf16": 35.0, "fp16": 50.0, "fp8-rowwise": 15.0}.items():
        got = results(mixprec.convert(copy.deepcopy(plain), recipe), x, None, [x])
        assert sqnr(got[0], want[0]) > bar
        assert all(a.isfinite().all() for a in got)
    ours = mixprec.convert(copy.deepcopy(plain), "fp16")
    (ours(x_of())[0].sum() * 1e9).backward()
    assert not ours.weight_hh_l0.grad.isfinite().all()
    assert not ours.weight_ih_l0.grad.isfinite().all()


def test_which_products_use_which_formats() -> None:
    layer, seen = mixprec.convert(nn.ModuleDict({"rnn": nn.GRU(K, H)}), "fp8")["rnn"], []
    with observed(lambda kind, name, a, b: seen.append((kind, a, b, name))):
        layer(x_of().requires_grad_())[0].sum().backward()
    low = [(kind, "bf16", "bf16", "rnn") for kind in ("forward", "grad_input", "grad_weight")]
    assert seen[:4] == [("forward", "e4m3", "e4m3", "rnn"), *low]
    assert seen[4:] == [(k, "e5m2", "e4m3", "rnn") for k in ("grad_input", "grad_weight")]


def test_dtypes_and_autocast() -> None:
    for kind in KINDS:
        layer, x = module(kind), x_of()
        with torch.autocast("cpu", torch.bfloat16):
            y, states = layer(x)
        states = states if isinstance(states, tuple) else (states,)
        assert {t.dtype for t in (y, *states)} == {torch.bfloat16}
        assert layer(x.half())[0].dtype == torch.float16
        low = layer.bfloat16()
        low(x.bfloat16())[0].sum().backward()
        assert {p.grad.dtype for p in low.parameters()} == {torch.bfloat16}


def test_modes_copies_checkpoints_and_regions() -> None:
    for kind in KINDS:
        layer, x = module(kind, "fp8", num_layers=2), x_of().requires_grad_()
        want = layer(x)[0]
        (dx,) = torch.autograd.grad(want.sum(), x)
        stored = io.BytesIO()
        torch.save(layer, stored)
        stored.seek(0)
        copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
        for one in (*copies, torch.load(stored, weights_only=False)):
            assert type(one) is type(layer)
            assert torch.equal(one(x)[0], want)
        with torch.no_grad():
            assert torch.equal(layer(x)[0], want)
        with torch.inference_mode(), mixprec.reuse_weights(layer):
            assert torch.equal(layer(x)[0], want)
        for reentrant in (False, True):
            y = checkpoint(lambda x, layer=layer: layer(x)[0], x, use_reentrant=reentrant)
            x.grad = None
            y.sum().backward()
            assert torch.equal(x.grad, dx)
        with mixprec.compress_saved("int8"):
            y = layer(x)[0]
        assert sqnr(torch.autograd.grad(y.sum(), x)[0], dx) > 25
        with mixprec.autocast("bf16"):
            y = layer(x)[0]
        bf16 = mixprec.convert(copy.deepcopy(layer), "bf16")
        assert torch.equal(y, bf16(x)[0])
        layer(x)[0].relu_().sum().backward()


def test_delayed_scales_are_shared() -> None:
    layer, x = module(nn.LSTM, "fp8-delayed", num_layers=2), x_of()
    layer(x)[0].sum().backward()
    assert layer.amax == x.abs().amax()
    mixprec.update_scales(layer)
    assert (layer.scale > 0).all()
    assert layer(x)[0].isfinite().all()
    assert layer.state_dict().keys() - nn.LSTM(K, H, 2).state_dict().keys() == {
        "amax_history", "scale", "amax", "grad_amax",
    }  # fmt: skip
    layer.load_state_dict(nn.LSTM(K, H, 2).state_dict())
    assert type(mixprec.unconvert(layer)) is nn.LSTM
    assert layer.state_dict().keys() == nn.LSTM(K, H, 2).state_dict().keys()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_that_are_computed_or_replaced() -> None:
    for norm in (nn.utils.weight_norm, nn.utils.parametrizations.weight_norm):
        plain = norm(nn.GRU(K, H), "weight_hh_l0")
        want = plain(x_of())[0]
        ours = mixprec.convert(plain, "bf16")
        assert sqnr(ours(x_of())[0], want) > 38
        ours(x_of())[0].sum().backward()
        assert all(p.grad is not None for p in ours.parameters())
    layer = module(nn.LSTM)
    doubled = {name: 2 * p.detach() for name, p in layer.named_parameters()}
    y = torch.func.functional_call(layer, doubled, (x_of(),))[0]
    layer.load_state_dict(doubled)
    assert torch.equal(y, layer(x_of())[0])


def test_main_grads() -> None:
    layer = module(nn.GRU)
    layer(x_of())[0].sum().backward()
    grads = {name: p.grad for name, p in layer.named_parameters()}
    for p in layer.parameters():
        p.grad, p.main_grad = None, torch.ones_like(p)
    layer(x_of())[0].sum().backward()
    for name in ("weight_ih_l0", "weight_hh_l0"):
        weight = getattr(layer, name)
        assert weight.grad is None
        torch.testing.assert_close(weight.main_grad, grads[name] + 1)


@for_each("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_main_grads_of_biases_and_parameters_of_inference_mode(kind: type[nn.RNNBase]) -> None:
    layer, x = mixprec.convert(kind(4, 8), "bf16"), torch.randn(3, 2, 4)
    for p in layer.parameters():
        p.main_grad = torch.zeros_like(p)
    layer(x)[0].square().sum().backward()
    assert all(p.grad is None and p.main_grad.any() for p in layer.parameters())
    with torch.inference_mode():
        layer = kind(4, 8)
    with pytest.raises(RuntimeError, match="made in inference_mode have no gradients"):
        mixprec.convert(layer, "bf16")(x)


def test_states_that_are_infinite() -> None:
    """0 * Inf is NaN, and the gradient of a ReLU passes a NaN, as in torch."""
    for kind, at in ((nn.LSTM, 1), (nn.GRU, 0)):
        layer, x = kind(1, 2), torch.zeros(1, 1, 1)
        with torch.no_grad():
            for p in layer.parameters():
                p.zero_()
            layer.bias_ih_l0[2 * at : 2 * at + 2] = -200.0  # the gate that multiplies the state
        state = torch.full((1, 1, 2), torch.inf)
        with torch.no_grad():
            layer.weight_hh_l0[-2:] = -1.0 if kind is nn.GRU else 0.0
        hx = (torch.zeros(1, 1, 2), state) if kind is nn.LSTM else state
        want = layer(x, hx)[0]
        got = mixprec.convert(layer, "bf16")(x, hx)[0]
        assert torch.equal(want.isnan(), got.isnan())
        assert want.isnan().any()
    layer = nn.RNN(2, 1, nonlinearity="relu")
    x = torch.tensor([[[torch.nan, 1.0]]], requires_grad=True)
    (want,) = torch.autograd.grad(layer(x)[0].sum(), x)
    (got,) = torch.autograd.grad(mixprec.convert(layer, "bf16")(x)[0].sum(), x)
    torch.testing.assert_close(got, want, rtol=0.01, atol=0.01)


def test_compiled() -> None:
    torch._dynamo.reset()
    layer, x = module(nn.LSTM, num_layers=2), x_of().requires_grad_()
    compiled = torch.compile(layer, backend="aot_eager")
    y, (h, c) = compiled(x)
    want, (want_h, want_c) = layer(x)
    for a, b in ((y, want), (h, want_h), (c, want_c)):
        torch.testing.assert_close(a, b)
    grads = [torch.autograd.grad(t.sum(), [x, *layer.parameters()]) for t in (y, want)]
    torch.testing.assert_close(*grads)


class Own(nn.GRU):
    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x)[0]


class Same(nn.GRU):
    """Without a forward pass of its own."""


@pytest.mark.filterwarnings("ignore:convert")
def test_what_is_left_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    parts = {"projected": nn.LSTM(K, H, proj_size=3), "own": Own(K, H), "same": Same(K, H)}
    model = mixprec.convert(nn.ModuleDict(parts), "bf16")
    text = capsys.readouterr().err
    assert "(projected: proj_size is not supported)" in text
    assert "(own: it has a forward pass of its own)" in text
    assert isinstance(model["same"], mixprec.nn.GRU)
    assert isinstance(model["same"], Same)
    assert not isinstance(model["projected"], mixprec.nn.Layer)
    with pytest.raises(ValueError, match="LSTM: proj_size is not supported"):
        mixprec.nn.LSTM(K, H, proj_size=3)


def test_errors() -> None:
    layer, x = module(nn.LSTM), x_of()
    for bad in (x[..., :3], x[:0], x[0, 0], x.double(), x[None]):
        with pytest.raises(ValueError, match=r"^LSTM: input must"):
            layer(bad)
    assert layer(x[:, :0])[0].shape == (T, 0, H)
    with pytest.raises(RuntimeError, match=r"c_0 must have shape \(1, 6, 32\), got \(1, 6, 3\)"):
        layer(x, (torch.zeros(1, B, H), torch.zeros(1, B, 3)))
    y = layer(x.requires_grad_())[0]
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    params = dict(layer.named_parameters())
    with pytest.raises(RuntimeError, match=r"torch\.func: recurrent layers"):
        torch.func.grad(lambda p: torch.func.functional_call(layer, p, (x,))[0].sum())(params)
