"""The first master is the FP32 value that cast_parameters rounded, not the rounded one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizers import LOW

from mixprec import cast_parameters
from mixprec.optim import AdamW, fp32_state_dict

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


def keeps_values(model: torch.nn.Module) -> bool:
    return any(vars(p) for p in model.parameters())


@pytest.mark.parametrize("cast_first", [True, False])
@pytest.mark.parametrize("kind", ["fp32", "remainder16"])
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
        if kind == "remainder16" and dtype == torch.bfloat16:
            # export_master moves a number that is halfway between two bf16 by one unit
            torch.testing.assert_close(got, want.detach(), rtol=1e-6, atol=0)
        else:
            assert torch.equal(got, want)
    assert not keeps_values(model), "taken, and no longer kept"


def test_the_first_remainders_hold_ties_too() -> None:
    """Values halfway between two BF16 numbers, which the param has rounded to even."""
    bits = torch.arange(0x3F80, 0x4080, dtype=torch.int32) << 16 | 0x8000
    model = torch.nn.Linear(16, 16, bias=False)
    with torch.no_grad():
        model.weight.copy_(bits.view(torch.float32).view(16, 16))
    cast_parameters(model, torch.bfloat16)
    optimizer = AdamW(model.parameters(), master_weights="remainder16")
    kept = fp32_state_dict(model, optimizer)["weight"].view(torch.int32).flatten()
    assert (kept - bits).abs().max() <= 1


def test_a_checkpoint_before_the_first_step_holds_them() -> None:
    model = cast_parameters(linear(), torch.bfloat16)
    optimizer = AdamW(model.parameters(), **STILL)
    other = cast_parameters(linear(), torch.bfloat16, keep_masters=False)
    resumed = AdamW(other.parameters(), **STILL)
    resumed.load_state_dict(optimizer.state_dict())
    for each in ((model, optimizer), (other, resumed)):
        assert torch.equal(stepped(*each)[0], linear().weight)


def test_weights_that_are_loaded_afterwards_are_what_counts() -> None:
    loaded = linear(seed=1).bfloat16()
    model = cast_parameters(linear(), torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    (weight, _) = stepped(model, AdamW(model.parameters(), **STILL))
    assert torch.equal(weight, loaded.weight.float())


def test_nothing_is_kept_where_it_is_not_asked_for_or_needed() -> None:
    frozen = linear().requires_grad_(False)
    for model, options in ((linear(), {"keep_masters": False}), (frozen, {})):
        assert not keeps_values(cast_parameters(model, torch.bfloat16, **options))
    model = cast_parameters(linear(), torch.bfloat16)
    assert keeps_values(model)
    optimizer = AdamW(model.parameters(), master_weights=None)
    assert not any("master" in s for s in optimizer.state.values())
    assert not keeps_values(model)
