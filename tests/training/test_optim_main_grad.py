"""Gradients in FP32 of 16-bit params: grad_dtype, and main_grad, which layers set."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from cases import for_each, name, normal
from optimizers import LOW, Kind, assert_same, kinds, parameters, set_grads, tensors
from torch import nn

import mixprec
from mixprec.nn import Linear
from mixprec.optim import SGD, AdamW


@kinds
@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_micro_batches_add_up_in_fp32(kind: Kind, dtype: torch.dtype) -> None:
    p, other = (torch.nn.Parameter(normal((40,), dtype)) for _ in range(2))
    optimizer, expected = kind([p], lr=0.01, grad_dtype=torch.float32), kind([other], lr=0.01)
    parts = [normal((40,), dtype, seed=50 + i) * 0.37 for i in range(6)]
    for part in parts:
        (p * part).sum().backward()
    total = sum(part.float() for part in parts)
    assert p.grad.dtype == torch.float32
    assert torch.equal(p.grad, total)
    assert not torch.equal(total, sum(parts).float())
    other.main_grad = total
    optimizer.step()
    expected.step()
    assert_same(tensors(optimizer, [p]), tensors(expected, [other]))
    optimizer.zero_grad()
    (p * 2).sum().backward()
    assert p.grad.dtype == torch.float32


def test_a_gradient_that_is_there_already_makes_way_for_fp32_ones() -> None:
    """An optimizer that is made after a backward pass, or again; params that are added, or frozen
    at first."""
    p, added, frozen = (torch.nn.Parameter(torch.ones(3, dtype=d)) for d in (*LOW, LOW[0]))
    AdamW([p, frozen.requires_grad_(False)], grad_dtype=torch.float32)
    p.sum().backward()
    AdamW([p], grad_dtype=torch.float32).add_param_group({"params": [added]})
    (p.sum() + added.sum()).backward()
    assert torch.equal(p.grad, torch.full((3,), 2.0))
    assert torch.equal(added.grad, torch.ones(3))
    frozen.requires_grad_()
    for _ in range(300):
        frozen.sum().backward()
    assert torch.equal(frozen.grad, torch.full((3,), 300.0))  # 256 in BF16


def test_grad_dtype_outlives_casts_and_copies() -> None:
    """Which lose what is set on a param: a trainer may cast a model whose optimizer is there."""
    layer = torch.nn.Linear(8, 4)
    optimizer = AdamW(layer.parameters(), grad_dtype=torch.float32)
    mixprec.cast_parameters(layer, torch.bfloat16)
    run = (layer, optimizer)
    for layer, optimizer in (run, run, copy.deepcopy(run), pickle.loads(pickle.dumps(run))):
        optimizer.zero_grad()
        layer(normal((2, 8), torch.bfloat16)).float().sum().backward()
        assert layer.weight.grad.dtype == torch.float32


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


def test_main_grad_counts_before_grad_and_goes_with_the_step() -> None:
    """It may be more exact; DDP makes one beside grad in every backward pass, and the layer must
    not add to that of the step before."""
    alone, beside = (torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)) for _ in range(2))
    beside.grad = torch.ones(1).bfloat16()
    for p in (alone, beside):
        p.main_grad = torch.tensor([1 + 2.0**-20])
    optimizer = SGD([alone, beside], lr=1.0)
    optimizer.step()
    assert [s["master"].item() for s in optimizer.state.values()] == [-(1 + 2.0**-20)] * 2
    assert (alone.main_grad.item(), beside.main_grad) == (0.0, None)


def test_torchs_scaler_does_not_see_main_grad() -> None:
    """An overflow there would be skipped step after step, at a scale that grows."""
    params = [torch.nn.Parameter(torch.ones(8).bfloat16()) for _ in range(2)]
    optimizer, scaler = SGD(params, lr=0.1), torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    params[0].main_grad, params[1].grad = torch.full((8,), torch.inf), torch.ones(8).bfloat16()
    with pytest.raises(RuntimeError, match="its overflow not reduce the scale"):
        scaler.step(optimizer)
    del params[0].main_grad
    scaler.step(optimizer)


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
    assert_same(*(tensors(each, list(module.parameters())) for each, module in both))


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


@for_each("order", ["hook", "after", "both", "late"])
@for_each("make", [lambda: nn.Linear(8, 8), lambda: nn.Conv2d(8, 8, 3)])
def test_hooks_on_a_weight_with_main_grad(order: str, make: Callable[[], nn.Module]) -> None:
    """they get the gradient that they get without main_grad, which has the sum of the results"""

    def run(main_grad: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        torch.manual_seed(0)
        layer = mixprec.convert(make(), "bf16").bfloat16()
        weight, seen = layer.weight, []
        mask = torch.rand_like(weight) > 0.5
        x = torch.randn(4, 8, 5, 5 if weight.dim() == 4 else 8, dtype=torch.bfloat16)
        if main_grad:
            weight.main_grad = torch.zeros(weight.shape)
        if order == "late":
            layer(x).sum().backward()
            weight.main_grad = torch.zeros(weight.shape) if main_grad else None
            weight.grad = None
        if order != "after":
            weight.register_hook(lambda g: seen.append(g.clone()) or g * mask)
        if order != "hook":
            weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * mask))
        total = torch.zeros(weight.shape)
        for _ in range(2):
            layer(x).float().square().mean().backward()
            if not main_grad:
                total += weight.grad.float()
            weight.grad = None
        return weight.main_grad if main_grad else total, seen

    (got, mine), (want, theirs) = run(True), run(False)
    assert torch.equal(got, want)
    assert len(mine) == (0 if order == "after" else 2)
    assert all(map(torch.equal, mine, theirs))


def test_a_grad_beside_a_main_grad_is_said_once() -> None:
    p = nn.Parameter(torch.ones(4).bfloat16())
    optimizer = SGD([p], lr=1.0)
    p.grad, p.main_grad = torch.ones_like(p), torch.zeros(4)
    with pytest.warns(UserWarning, match=r"1 params, .* shape \(4,\), have a grad beside"):
        optimizer.step()
    assert torch.equal(p, torch.ones_like(p))
    p.main_grad = torch.zeros(4)
    optimizer.step()
