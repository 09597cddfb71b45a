"""mixprec.lean: what it prepares, what it prints, and that it trains."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from models import Model
from torch import nn
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec.lean_training import FIDELITIES


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64))


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return y.float().square().mean()


BYTES = {"high": 14, "balanced": 8.03, "small": 7.03}  # of a parameter, gradient and state


@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_it_trains(fidelity: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Alike in each fidelity; parameters and states are as the table of the docstring says."""
    model = make()
    same, optimizer = mixprec.lean(model, 1e-2, fidelity=fidelity, max_grad_norm=1.0)
    assert same is model
    assert "of the bytes" in capsys.readouterr().out
    x = torch.randn(128, 64).bfloat16()
    losses = []
    for _ in range(20):
        loss = loss_of(model(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    weight = model[0].weight
    state = optimizer.state[weight]
    per_element = sum(t.nbytes for t in (weight, weight.grad, *state.values())) / weight.numel()
    assert per_element == pytest.approx(BYTES[fidelity], abs=0.01)
    assert model[2].weight.dtype == torch.float32
    assert type(model[0]) is mixprec.nn.Linear
    assert optimizer.max_grad_norm == 1.0


def test_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Computed from the parameters it is what is measured with a batch, but for the activations."""
    for batch in (None, torch.randn(64, 64)):
        mixprec.lean(make(), batch=batch, loss=loss_of)
    mixprec.lean(make(), verbose=False)
    tables = re.split(r" of the bytes of (.*)\n", capsys.readouterr().out)
    assert tables[1::2] == ["parameters, gradients and optimizer state", "what a step keeps"]
    assert tables[4] == ""
    rows = [
        dict(line.split("  ", 1) for line in t.splitlines() if "  " in line) for t in tables[:4:2]
    ]
    computed, measured = ({k: v.split() for k, v in row.items()} for row in rows)
    for name in ("parameters", "gradients", "optimizer: exp_avg", "optimizer: remainder"):
        assert computed[name] == measured[name], name
    assert "saved: linear" in measured
    assert not [name for name in computed if name.startswith(("saved", "peak"))], "not measured"


def test_checkpointed_blocks() -> None:
    """They keep their inputs alone, and have the gradients of a model without compression."""
    x = torch.randn(128, 64).bfloat16()
    model, optimizer = mixprec.lean(nn.Sequential(make(), make()), verbose=False)
    for block in model:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    assert set(mixprec.memory_report(model, optimizer, x, loss_of).saved) == {"other"}
    plain = nn.Sequential(make(), make())
    mixprec.convert(mixprec.cast_parameters(plain, torch.bfloat16), "bf16", fuse=True)
    for net in (model, plain):
        loss_of(net(x)).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    # Around the model, a checkpoint has no effect.
    model, optimizer = mixprec.lean(make(), verbose=False)
    around = Model(lambda self, x: checkpoint(self.a, x, use_reentrant=False), a=model)
    reports = [mixprec.memory_report(net, optimizer, x, loss_of) for net in (model, around)]
    assert reports[0].saved == reports[1].saved


def test_bad_input_changes_nothing() -> None:
    model = make()
    for settings, message in (
        ({"fidelity": "tiny"}, 'lean: fidelity must be one of "high", "balanced", "small", got'),
        ({"recipe": "fp7"}, "fp7"),
        ({"lr": -1.0}, "AdamW: lr must be"),
    ):
        with pytest.raises(ValueError, match=message):
            mixprec.lean(model, **settings)
        assert model[0].weight.dtype == torch.float32
        assert type(model[0]) is nn.Linear
