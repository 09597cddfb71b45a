"""The FP32 weights that are trained: the first ones, fp32_state_dict, and AveragedModel."""

from __future__ import annotations

import copy
import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from cases import normal
from optimizers import LOW, Kind, Run, assert_same, kinds, master_of, through_a_file
from torch.optim import swa_utils

import mixprec
from mixprec import cast_parameters
from mixprec.optim import SGD, AdamW, AveragedModel, fp32_state_dict

STILL: dict[str, Any] = {"lr": 0.0, "weight_decay": 0.0}  # steps that move nothing


def linear(seed: int = 0) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(32, 16)


def stepped(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The masters after a step, then without gradients."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return list(fp32_state_dict(model, optimizer).values())


@pytest.mark.parametrize("cast_first", [True, False])
@pytest.mark.parametrize("kind", ["fp32", "remainder16", "remainder8"])
@pytest.mark.parametrize("dtype", LOW)
def test_nothing_is_lost_to_the_first_rounding(
    dtype: torch.dtype, kind: str, cast_first: bool
) -> None:
    model = linear()
    if cast_first:
        cast_parameters(model, dtype)
    optimizer = AdamW(model.parameters(), master_weights=kind, **STILL)
    cast_parameters(model, dtype)
    for got, want in zip(stepped(model, optimizer), linear().parameters(), strict=True):
        if kind != "fp32" and dtype == torch.bfloat16:
            # export_master moves a number that is halfway between two bf16 by one unit
            unit = 1e-6 if kind == "remainder16" else 2.0**-15
            torch.testing.assert_close(got, want.detach(), rtol=unit, atol=0)
        else:
            assert torch.equal(got, want)


def test_nothing_is_kept_where_it_is_not_asked_for_or_needed() -> None:
    rounded = linear().bfloat16().weight.float()
    cast = partial(cast_parameters, dtype=torch.bfloat16)
    frozen = linear().requires_grad_(False)
    for model in (cast(linear()), cast(frozen), cast(linear(), keep_masters=False)):
        kept = fp32_state_dict(model)["weight"]
        assert not torch.equal(kept, rounded) or model.weight.requires_grad
        cast(model, keep_masters=False)  # also afterwards
        assert torch.equal(fp32_state_dict(model)["weight"], rounded)
    for options in ({"master_weights": None}, {"stochastic_rounding": True}):
        model = cast(linear())
        assert torch.equal(fp32_state_dict(model)["weight"], linear().weight)
        AdamW(model.parameters(), **options)
        assert torch.equal(fp32_state_dict(model)["weight"], rounded)


class Net(torch.nn.Module):
    """Tied weights, buffers of 16 bits and integers, an fp32 norm, an fp16 param."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(11, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.gain = torch.nn.Parameter(normal((6,), torch.float32))
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", normal((4,), torch.float32))
        self.register_buffer("mask", torch.tensor([True, False]))


def low_net() -> Net:
    model = Net().bfloat16()
    model.gain.data = model.gain.data.half()
    model.norm.float()
    return model


@kinds
@pytest.mark.parametrize(("masters", "count"), [("auto", 1), ("remainder16", 2), (None, 2)])
def test_fp32_state_dict(kind: Kind, masters: str | None, count: int) -> None:
    """It loads into an FP32 model, which gets all bits, and into its own, which stays as it is."""
    model = low_net()
    params = list(model.parameters())
    runs = [
        Run(kind, ps, lr=1e-3, master_weights=masters)
        for ps in ([params] if count == 1 else [params[:2], params[2:]])
    ]
    optimizers = [run.optimizer for run in runs]
    own = copy.deepcopy(model.state_dict())
    low = {"embed.weight", "head.weight", "gain", "table"}
    for key, value in fp32_state_dict(model, optimizers).items():  # no masters yet
        assert torch.equal(value, own[key].float() if key in low else own[key])
    for run in runs:
        run.train(3)
    own, twins = copy.deepcopy((model.state_dict(), runs))
    state = fp32_state_dict(model, optimizers[0] if count == 1 else optimizers)
    assert list(state) == list(own)
    for key, value in state.items():
        assert value.dtype == (torch.float32 if key in low else own[key].dtype)
        assert not value.requires_grad
    assert torch.equal(state["table"], own["table"].float())
    assert state["head.weight"] is state["embed.weight"]
    masters_of = [zip(run.params, run.masters(), strict=True) for run in runs]
    trained = dict(itertools.chain(*masters_of))
    for key, p in model.named_parameters(remove_duplicate=False):
        assert torch.equal(state[key], trained[p])
        if masters is not None and p.dtype in LOW:
            assert not torch.equal(state[key], p.float())  # it holds what the param cannot
    wide = Net()
    wide.load_state_dict(through_a_file(state))
    assert_same(list(wide.state_dict().values()), list(state.values()))
    assert wide.head.weight is wide.embed.weight
    model.load_state_dict(state)
    for value in state.values():  # copies
        value.zero_()
    assert_same(list(model.state_dict().values()), list(own.values()))
    for run, twin in zip(runs, twins, strict=True):
        assert_same(run.train(3), twin.train(3))


@pytest.mark.parametrize("masters", ["auto", "remainder16", "remainder8"])
def test_an_fp32_state_dict_of_exact_ties_loads_into_its_own_model(masters: str) -> None:
    """A master halfway between two bf16 numbers, on either side of zero, of 1 and of 1.0078125.

    A master's param is the even one of the two, a remainder's the larger.
    """
    ulp = 2.0**-7
    model = torch.nn.Linear(4, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -1.0, 1 + ulp, -1 - ulp]]))
    optimizer = SGD(model.parameters(), lr=ulp / 2, master_weights=masters)
    want = model.weight.float() + ulp / 2 * model.weight.sign()
    model.weight.grad = -model.weight.detach().sign()
    optimizer.step()
    assert torch.equal(master_of(optimizer, model.weight), want)
    one = 1.0 if masters == "auto" else 1 + ulp
    param = torch.tensor([[one, -one, 1 + 2 * ulp, -1 - 2 * ulp]]).bfloat16()
    assert torch.equal(model.weight, param)
    model.load_state_dict(fp32_state_dict(model, optimizer))
    assert torch.equal(model.weight, param)
    assert torch.equal(master_of(optimizer, model.weight), want)


def test_an_fp32_state_dict_after_the_param_was_written() -> None:
    """And of a run that has diverged, which can still be saved and looked at."""
    model = low_net()
    run = Run(AdamW, list(model.parameters())).train()
    with torch.no_grad():
        model.gain[2] += 1
    with pytest.raises(ValueError, match=r"^fp32_state_dict: gain was written after the last step"):
        fp32_state_dict(model, run.optimizer)
    run.train()  # as it says
    state = fp32_state_dict(model, run.optimizer)
    assert torch.equal(state["gain"], master_of(run.optimizer, model.gain))
    with torch.no_grad():
        model.gain[0] = math.nan
    isnan = fp32_state_dict(model, run.train().optimizer)["gain"].isnan()
    assert isnan.tolist() == [True, *[False] * 5]


AVERAGES: dict[str, dict[str, Any]] = {
    "mean": {},
    "ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.999)},
    "avg_fn": {"avg_fn": swa_utils.get_ema_avg_fn(0.9), "use_buffers": True},
}


def model_of(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16))
    return model.append(mixprec.convert(torch.nn.Linear(16, 4), "bf16")).to(dtype)


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("masters", ["fp32", "remainder16", "remainder8"])
def test_the_average_is_that_of_the_masters(average: str, masters: str) -> None:
    """Torch's average of an FP32 model that holds the masters' values, in every bit."""
    model = model_of(torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=1e-4, master_weights=masters)
    averaged = AveragedModel(model, optimizer, **AVERAGES[average])
    wide = copy.deepcopy(model).float()
    expected = swa_utils.AveragedModel(wide, **AVERAGES[average])
    for step in range(5):
        model(normal((8, 8), torch.bfloat16, seed=step)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
        wide.load_state_dict(fp32_state_dict(model, optimizer))
        expected.update_parameters(wide)
    got, want = (dict(each.state_dict()) for each in (averaged, expected))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
