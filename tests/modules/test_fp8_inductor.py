"""FP8 layers under torch.compile(backend="inductor"): checkpointed and accumulated, against eager.

Inductor fuses what lies between our ops into loops of its own. Where each operation there is exact
or rounds once (ReLU, an addition), all bits are equal to eager's, scales and histories too. Only
the gradients of biases, sums over many elements, may be added up in another order: they differ by
at most (n - 1) * 2^-24 * sum |x| from the exact sum (Higham 2002, section 4.2), by twice that from
each other.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch
from cases import normal
from test_fp8_composition import checkpointed
from torch import nn

import mixprec

WIDTH, ROWS, MICRO_BATCHES = 32, 30, 2


@functools.cache
def no_compiler() -> str | None:
    """Why inductor cannot build its loops here; None if it can."""
    try:
        torch.compile(lambda x: x + 1, backend="inductor")(torch.zeros(3))
    except Exception as error:
        return f"inductor cannot compile for this CPU: {type(error).__name__}: {error}"[:300]
    return None


@pytest.fixture(autouse=True)
def inductor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # and nothing from its cache
    if reason := no_compiler():
        pytest.skip(reason)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def train(recipe: str, compiled: bool) -> dict[str, torch.Tensor]:
    """What each step leaves: outputs, gradients, weights, scales and histories, by name. Biases are
    not trained."""
    torch.manual_seed(0)
    model = mixprec.convert(nn.Sequential(Block(), Block()), recipe)
    forward = checkpointed(model)
    if compiled:
        forward = torch.compile(forward, backend="inductor", fullgraph=True)
    weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    left: dict[str, torch.Tensor] = {}
    for step in range(3):
        model.zero_grad()
        for i in range(MICRO_BATCHES):
            y = forward(normal((ROWS, WIDTH), torch.float32, seed=10 * step + i))
            y.backward(normal(y.shape, torch.float32, seed=10 * step + i + 5) / 64)
            left[f"{step}: y of {i}"] = y.detach()
        grads = {f"grad of {n}": p.grad for n, p in model.named_parameters()}
        optimizer.step()
        state = {**grads, **dict(model.named_parameters()), **dict(model.named_buffers())}
        left |= {f"{step}: {name}": t.detach().clone() for name, t in state.items()}
    return left


@pytest.mark.parametrize("recipe", ["fp8", "fp8-delayed", "fp8-rowwise"])
def test_every_bit_where_rounding_leaves_no_freedom(recipe: str) -> None:
    eager, inductor = (train(recipe, compiled) for compiled in (False, True))
    assert eager.keys() == inductor.keys()
    assert any("amax_history" in name for name in eager) == (recipe == "fp8-delayed")
    assert not torch.equal(eager["0: 0.up.weight"], eager["2: 0.up.weight"])
    for step in range(3):  # of the last layer, whose g is given
        name, n = f"{step}: grad of 1.down.bias", ROWS * MICRO_BATCHES
        given = [normal((ROWS, WIDTH), torch.float32, 10 * step + i + 5) / 64 for i in (0, 1)]
        bound = 2 * (n - 1) * 2**-24 * torch.cat(given).abs().sum(0)
        assert ((eager[name] - inductor[name]).abs() <= bound).all()
    different = {name for name in eager if not torch.equal(eager[name], inductor[name])}
    assert not {name for name in different if not re.search("grad of .*bias", name)}
