"""AveragedModel: averages of 16-bit weights, in FP32 and from their masters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import normal
from torch.optim import swa_utils

import mixprec
from mixprec.optim import AdamW, AveragedModel

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
@pytest.mark.parametrize("masters", ["fp32", "remainder16"])
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
        wide.load_state_dict(mixprec.optim.fp32_state_dict(model, optimizer))
        expected.update_parameters(wide)
    got, want = averaged.state_dict(), expected.state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)
    assert averaged.module[0].weight.dtype == torch.float32


def test_before_a_step_and_params_of_no_optimizer() -> None:
    model = torch.nn.Linear(4, 4).half()
    averaged = AveragedModel(model, [AdamW([model.weight])])
    averaged.update_parameters(model)
    assert torch.equal(averaged.module.weight, model.weight.float())
    assert torch.equal(averaged.module.bias, model.bias.float())
