"""FP8 layers under torch.compile(backend="inductor"): checkpointed and accumulated, against eager.

Inductor fuses what lies between our ops into loops of its own. Where each operation there is exact
or rounds once (ReLU, an addition), all bits are equal to eager's, scales and histories too. Only
sums over many elements may be added up in another order: they differ by at most
(n - 1) * 2^-24 * sum |x| from the exact sum (Higham 2002, section 4.2), by twice that from each
other.

With layer norm and GELU, inputs of layers differ in their last bits, which decides between two
codes where an input lies beside a step of a cast. After some layers two runs agree only as far as
two independent roundings do: by sqrt(2) times the error of the casts themselves. Relative to the
root mean square, that error is at most q = s / sqrt(12), s = 2^-3 the largest distance of E4M3
codes and 2^-2 of E5M2's. The gradient of the first of four layers passes 12 casts to E4M3 (of x and
w) and four to E5M2; added up in squares: sqrt(2 * (12 * q_e4m3^2 + 4 * q_e5m2^2)) = 0.27. A
micro-batch that is lost or counted twice changes an accumulated gradient by more than 0.5.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Iterator

import pytest
import torch
from cases import normal
from test_fp8_composition import checkpointed
from torch import nn

import mixprec

WIDTH, MICRO_BATCHES = 32, 2
E4M3_ERROR, E5M2_ERROR = 2**-3 / math.sqrt(12), 2**-2 / math.sqrt(12)
TOLERANCE = math.sqrt(2 * (12 * E4M3_ERROR**2 + 4 * E5M2_ERROR**2))


@functools.cache
def no_compiler() -> str | None:
    """Why inductor cannot build its loops here; None if it can."""
    try:
        torch.compile(lambda x: x + 1, backend="inductor")(torch.zeros(3))
    except Exception as error:
        return f"inductor cannot compile for this CPU: {type(error).__name__}: {error}"[:300]
    return None


@pytest.fixture(autouse=True)
def inductor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:  # nothing compiled before this test is used
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
        torch._dynamo.reset()
        if reason := no_compiler():
            pytest.skip(reason)
        yield
        torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, norm: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.norm, self.act = norm, act
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def train(model: nn.Sequential, compiled: bool, steps: int) -> dict[str, torch.Tensor]:
    """What each step leaves: outputs, gradients, parameters, scales and histories, by name."""
    forward = checkpointed(model)
    if compiled:
        forward = torch.compile(forward, backend="inductor", fullgraph=True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    left: dict[str, torch.Tensor] = {}
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(MICRO_BATCHES):
            y = forward(normal((6, 5, WIDTH), torch.float32, seed=10 * step + i))
            y.backward(normal(y.shape, torch.float32, seed=10 * step + i + 5) / 64)
            left[f"{step}: y of {i}"] = y.detach()
        grads = {f"grad of {n}": p.grad for n, p in model.named_parameters() if p.requires_grad}
        optimizer.step()
        state = {**grads, **dict(model.named_parameters()), **dict(model.named_buffers())}
        left |= {f"{step}: {name}": t.detach().clone() for name, t in state.items()}
    return left


@pytest.mark.parametrize("recipe", ["fp8", "fp8-delayed", "fp8-rowwise"])
def test_every_bit_where_rounding_leaves_no_freedom(recipe: str) -> None:
    """Three steps; with biases, of which the sums that are their gradients are not trained on."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        blocks = (Block(nn.Identity(), nn.ReLU()) for _ in range(2))
        model = mixprec.convert(nn.Sequential(*blocks), recipe)
        for name, p in model.named_parameters():
            p.requires_grad_(not name.endswith("bias"))
        results.append(train(model, compiled, steps=3))
    eager, inductor = results
    assert eager.keys() == inductor.keys()
    assert any("amax_history" in name for name in eager) == (recipe == "fp8-delayed")
    assert not torch.equal(eager["0: 0.up.weight"], eager["2: 0.up.weight"])
    different = [name for name in eager if not torch.equal(eager[name], inductor[name])]
    assert not different


def test_sums_over_rows_within_their_bound() -> None:
    """The gradients of biases: each is the sum of g over 30 rows, twice, in some order."""
    eager, inductor = (
        train(nn.Sequential(mixprec.nn.Linear(WIDTH, WIDTH)), compiled, steps=1)[
            "0: grad of 0.bias"
        ]
        for compiled in (False, True)
    )
    given = [normal((30, WIDTH), torch.float32, seed=i + 5) / 64 for i in range(MICRO_BATCHES)]
    magnitude = torch.stack(given).abs().sum((0, 1))
    n = 30 * MICRO_BATCHES
    assert ((eager - inductor).abs() <= 2 * (n - 1) * 2**-24 * magnitude).all()
    assert (eager != 0).all()


def test_layer_norm_and_gelu_between_the_layers() -> None:
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        blocks = (Block(nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(2))
        results.append(train(mixprec.convert(nn.Sequential(*blocks), "fp8-delayed"), compiled, 2))
    eager, inductor = results
    for name, want in eager.items():
        if name.endswith(".scale"):  # powers of two, of the history, which is compared
            scale = inductor[name]
            assert ((scale > 0) & (scale == torch.exp2(torch.log2(scale).round()))).all()
        elif not name.endswith(".amax"):  # which starts anew
            error = ((inductor[name] - want).norm() / want.norm().clamp_min(1e-30)).item()
            assert error <= TOLERANCE, f"{name}: {error:.3g}"
