"""Results do not depend on what a program sets for all of torch: default dtype, default device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import mixprec
from mixprec.ops._dispatch.op import OPS


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


STATES = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
}


@pytest.fixture(params=STATES)
def state(request: pytest.FixtureRequest) -> Any:
    return STATES[request.param]


@pytest.mark.parametrize("name", OPS)
def test_kernels_agree_with_their_references(name: str, state: Any) -> None:
    op = OPS[name]
    with state():
        found = op.difference(op.handle("cpp"), "cpu")
    assert found is None


def train(
    dtype: torch.dtype,
    recipe: str,
    kind: type[torch.optim.Optimizer] = mixprec.optim.AdamW,
    region: Callable[[], Any] = contextlib.nullcontext,
) -> list[Any]:
    """Four steps, of which the second overflows, with the optimizer and the scaler in the region;
    everything that is to stay the same."""
    torch.manual_seed(0)
    cpu: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    model = torch.nn.Sequential(torch.nn.Linear(32, 16, **cpu), torch.nn.Linear(16, 8, **cpu))
    model = mixprec.cast_parameters(mixprec.convert(model, recipe), dtype)
    options = {"momentum": 0.9} if kind is mixprec.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=1e-2, max_grad_norm=1.0, **options)
    scaler = mixprec.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(4):
        x = torch.randn(4, 32, **cpu).to(dtype)
        x[0, 0] = torch.inf if step == 1 else x[0, 0]
        scaler.scale(model(x).float().square().mean()).backward()
        with region():
            if step == 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            mixprec.update_scales(model)
            optimizer.zero_grad()
    norm = optimizer.grad_norm
    assert norm is not None
    assert int(optimizer.skipped) == int(scaler.skipped) == 1
    states = [t for s in optimizer.state.values() for t in s.values()]
    return [*model.state_dict().values(), *states, scaler.get_scale(), norm.item()]


@pytest.mark.parametrize("recipe", ["fp16", "fp8-delayed"])
@pytest.mark.parametrize("name", ["float64", "bfloat16", "meta"])
def test_training_gives_the_same_bits(name: str, recipe: str) -> None:
    dtype = torch.float16 if recipe == "fp16" else torch.bfloat16
    expected = train(dtype, recipe)
    with STATES[name]():
        found = train(dtype, recipe)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
