"""Masters, remainders and stochastic rounding; gradients in FP32 for 16-bit params."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import name, normal
from optimizers import (
    LOW,
    MIXES,
    Kind,
    all_dtypes,
    assert_same,
    kinds,
    parameters,
    set_grads,
    tensors,
    train,
)

import mixprec
from mixprec.nn import Linear
from mixprec.optim import SGD, Adam, AdamW, Lion


@kinds
def test_what_a_state_holds(kind: Kind) -> None:
    for mix in MIXES:
        params = all_dtypes()
        optimizer = kind(params, **mix)
        train(optimizer, params, 2)
        for p in params:
            state = {k: t.dtype for k, t in optimizer.state[p].items()}
            assert state.pop("step") == torch.float32
            want = {"master": torch.float32} if p.dtype in LOW and mix["master_weights"] else {}
            if p.dtype == torch.bfloat16 and mix["stochastic_rounding"]:
                want = {}
            elif p.dtype == torch.bfloat16 and mix["master_weights"] == "remainder16":
                want = {"remainder": torch.int16}
            assert {k: state.pop(k, None) for k in want} == want
            real = torch.float64 if p.dtype == torch.float64 else mix["state_dtype"]
            assert set(state.values()) <= {real}
            assert state.keys() <= {"exp_avg", "exp_avg_sq", "momentum_buffer"}
            matrices = [t for t in optimizer.state[p].values() if t.dim() == 2]
            assert all(t.stride() == p.stride() for t in matrices)


def drift(kind: Callable, dtype: torch.dtype, n: int = 4096, **options: Any) -> float:
    """How far n ones come in 100 steps of 1e-4, much less than half a unit of a 16-bit number."""
    p = torch.nn.Parameter(torch.ones(n, dtype=dtype))
    optimizer = kind([p], lr=1e-4, weight_decay=0.0, **options)
    p.grad = torch.ones_like(p)
    for _ in range(100):
        optimizer.step()
    return 1.0 - p.detach().double().mean().item()


@pytest.mark.parametrize("kind", [AdamW, Adam, SGD, Lion], ids=name)
def test_tiny_updates_are_lost_without_masters(kind: Callable) -> None:
    """Why masters exist. The last rounding is half a unit of the param.

    Stochastic rounding keeps them on average. Each element moves by a whole number of units
    u = 2^-8: in a step by one unit with probability 1e-4 / u. So 100 steps have the variance
    1e-2 * u, and the mean of 4,096 elements is within 5 of its own deviations.
    """
    for dtype in LOW:
        half = torch.finfo(dtype).eps / 4
        assert drift(kind, dtype, n=4, master_weights=None) == 0.0
        for mode in ("auto", "fp32", "remainder16"):
            assert drift(kind, dtype, n=4, master_weights=mode) == pytest.approx(1e-2, abs=half)
    deviation = math.sqrt(1e-2 * 2.0**-8 / 4096)
    for free in ("auto", None):
        got = drift(kind, torch.bfloat16, master_weights=free, stochastic_rounding=True)
        assert got == pytest.approx(1e-2, abs=5 * deviation)
        assert got != pytest.approx(1e-2, abs=1e-9)  # and it is random


RANDOM = [{"stochastic_rounding": True}, {"state_dtype": torch.bfloat16}]
RANDOM += [RANDOM[0] | RANDOM[1]]


@kinds
@pytest.mark.parametrize("mix", RANDOM, ids=name)
def test_the_seed_decides_every_bit(kind: Kind, mix: dict) -> None:
    runs = []
    for seed in (0, 0, 1, 2**32, 2**63 - 1):
        params = parameters(torch.bfloat16, [(33,), (129,), (7, 5)])
        optimizer = kind(params, lr=0.01, seed=seed, **mix)
        torch.manual_seed(seed)  # torch's own generator has no part in it
        train(optimizer, params)
        runs.append(tensors(optimizer, params))
    assert_same(runs[0], runs[1])
    for run in runs[2:]:
        assert any(not torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(runs[3], runs[4], strict=True))


@kinds
@pytest.mark.parametrize("mix", RANDOM[2:], ids=name)
def test_noise_depends_on_a_params_place_only(kind: Kind, mix: dict) -> None:
    """Not on the groups, on who else has a gradient, nor on groups that are added later."""
    shapes = [(65,)] * 4
    runs = []
    for run in range(4):
        params = parameters(torch.bfloat16, shapes)
        groups: Any = params[:3]
        if run == 1:
            groups = [{"params": params[:1]}, {"params": params[1:3]}]
        optimizer = kind(groups, lr=0.01, **mix)
        for step in range(4):
            set_grads(params, step)
            if run == 2:
                params[1].grad = None
            if run == 3 and step == 2:
                optimizer.add_param_group({"params": params[3]})
            optimizer.step()
        runs.append(tensors(optimizer, [params[0], params[2]]))
    for run in runs[1:]:
        assert_same(run, runs[0])


def test_two_params_and_two_steps_get_different_noise() -> None:
    """The same numbers twice: where they are rounded differs."""
    params = [torch.nn.Parameter(torch.ones(512, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = SGD(params, lr=2.0**-9, stochastic_rounding=True)
    seen = set()
    for _ in range(2):
        for p in params:
            p.data.fill_(1.0)
            p.grad = torch.ones_like(p)
        optimizer.step()
        seen |= {tuple(p.tolist()) for p in params}
    assert len(seen) == 4


@kinds
@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_micro_batches_add_up_in_fp32(kind: Kind, dtype: torch.dtype) -> None:
    p, other = (torch.nn.Parameter(normal((40,), dtype)) for _ in range(2))
    optimizer, expected = kind([p], lr=0.01, grad_dtype=torch.float32), kind([other], lr=0.01)
    parts = [normal((40,), dtype, seed=50 + i) * 0.37 for i in range(6)]
    total, low = torch.zeros(40), torch.zeros(40, dtype=dtype)
    for part in parts:
        (p * part).sum().backward()
        total += part.float()
        low += part
    assert p.grad.dtype == torch.float32
    assert torch.equal(p.grad, total)
    assert not torch.equal(total, low.float())
    other.main_grad = total
    optimizer.step()
    expected.step()
    assert_same(tensors(optimizer, [p]), tensors(expected, [other]))
    optimizer.zero_grad()
    (p * 2).sum().backward()
    assert p.grad.dtype == torch.float32


def test_a_gradient_that_is_there_already_makes_way_for_fp32_ones() -> None:
    """An optimizer that is made after a backward pass, or again; params that are added."""
    p, added = (torch.nn.Parameter(torch.ones(3, dtype=d)) for d in LOW)
    AdamW([p], grad_dtype=torch.float32)
    p.sum().backward()
    AdamW([p], grad_dtype=torch.float32).add_param_group({"params": [added]})
    (p.sum() + added.sum()).backward()
    assert torch.equal(p.grad, torch.full((3,), 2.0))
    assert torch.equal(added.grad, torch.ones(3))


def test_torchs_scaler_clips_fp16_params_whose_gradients_are_fp32() -> None:
    """It refuses to unscale FP16 gradients, which is what trainers call before they clip."""
    params = [torch.nn.Parameter(normal((40,), torch.float16)) for _ in range(2)]
    optimizers = [AdamW([params[0]], grad_dtype=torch.float32), AdamW([params[1]])]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for p in params:
        scaler.scale((p.float() * 3).sum()).backward()
    scaler.unscale_(optimizers[0])
    assert torch.nn.utils.clip_grad_norm_(params[0], 1.0).item() == pytest.approx(3 * 40**0.5)
    before = params[0].detach().clone()
    scaler.step(optimizers[0])
    assert not torch.equal(before, params[0])
    with pytest.raises(ValueError, match="FP16"):
        scaler.unscale_(optimizers[1])


def test_main_grad_may_be_more_exact_than_a_gradient_of_16_bits() -> None:
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    p.main_grad = torch.tensor([1 + 2.0**-20])
    optimizer = SGD([p], lr=1.0)
    optimizer.step()
    assert optimizer.state[p]["master"].item() == -(1 + 2.0**-20)


def test_zero_grad_clears_main_grad() -> None:
    params = parameters(torch.bfloat16)
    optimizer = AdamW(params)
    set_grads(params, 0)
    for p in params[1:]:
        p.main_grad = p.grad.float()
    buffers = [p.main_grad for p in params[1:]]
    optimizer.zero_grad(set_to_none=False)
    assert not any(p.grad.any() for p in params)
    for p, buffer in zip(params[1:], buffers, strict=True):
        assert p.main_grad.data_ptr() == buffer.data_ptr()
        assert not buffer.any()
    optimizer.zero_grad()
    assert all(p.grad is None and getattr(p, "main_grad", None) is None for p in params)
    assert not hasattr(params[0], "main_grad")
    optimizer.step()  # nothing to do
    assert not optimizer.state


@pytest.mark.parametrize("of_model", [False, True], ids=["optimizer", "model"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zeros"])
def test_a_loop_with_main_grad_and_either_zero_grad(of_model: bool, set_to_none: bool) -> None:
    """A layer adds to main_grad in the same buffer, which model.zero_grad() does not see; the other
    one gets a fresh buffer for each step. The second step is skipped."""
    layer, fresh = (Linear(16, 8).bfloat16() for _ in range(2))
    fresh.load_state_dict(layer.state_dict())
    layer.weight.main_grad = buffer = torch.zeros(8, 16)
    optimizers = [SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (layer, fresh)]
    for step in range(4):
        x = normal((4, 16), torch.bfloat16, seed=step) * (math.inf if step == 1 else 1)
        fresh.weight.main_grad = torch.zeros(8, 16)
        for module, optimizer in zip((layer, fresh), optimizers, strict=True):
            module(x).float().square().mean().backward()
            optimizer.step()
        assert layer.weight.main_grad is buffer
        assert not buffer.any()
        (layer if of_model else optimizers[0]).zero_grad(set_to_none)
        optimizers[1].zero_grad()
    assert optimizers[0].skipped == optimizers[1].skipped == 1
    both = zip(optimizers, (layer, fresh), strict=True)
    same = (tensors(each, list(module.parameters())) for each, module in both)
    assert_same(*same)


def test_grad_dtype_outlives_a_cast() -> None:
    """A trainer may cast a model whose optimizer is there already."""
    layer = torch.nn.Linear(8, 4)
    optimizer = AdamW(layer.parameters(), grad_dtype=torch.float32)
    mixprec.cast_parameters(layer, torch.bfloat16)
    for _ in range(2):
        optimizer.zero_grad()
        layer(normal((2, 8), torch.bfloat16)).float().sum().backward()
        assert layer.weight.grad.dtype == torch.float32


def test_gradients_from_elsewhere_are_added_to_main_grad() -> None:
    """Those of an embedding tied to the layer; the whole gradient, in each of two passes."""
    embedding, head = torch.nn.Embedding(8, 16), Linear(16, 8, bias=False, recipe="bf16")
    head.weight = embedding.weight
    tokens = torch.tensor([1, 5, 5])
    head(embedding(tokens)).square().sum().backward()
    want, head.weight.grad = 2 * head.weight.grad, None
    head.weight.main_grad = torch.zeros(8, 16)
    for _ in range(2):
        head(embedding(tokens)).square().sum().backward()
    assert head.weight.grad is None
    torch.testing.assert_close(head.weight.main_grad, want)


def test_a_main_grad_beside_a_grad_goes_with_the_step() -> None:
    """DDP makes it in every backward pass; the layer must not add to that of the step before."""
    p = torch.nn.Parameter(torch.ones(4).bfloat16())
    p.grad, p.main_grad = torch.ones(4).bfloat16(), torch.ones(4)
    SGD([p], lr=0.1).step()
    assert p.main_grad is None
