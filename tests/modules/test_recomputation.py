"""What a checkpoint computes again is what its forward pass computed, wherever backward is called,
and other code of a backward pass runs as without a region."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from cases import for_each
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec.nn.autocast import current_region
from mixprec.ops._dispatch import simulation


@contextlib.contextmanager
def several() -> Iterator[None]:
    with mixprec.autocast("fp16"), mixprec.simulate("h100"), mixprec.autocast():
        yield


REGIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": contextlib.nullcontext,
    "autocast": mixprec.autocast,
    "fp16": lambda: mixprec.autocast("fp16"),
    "off": lambda: mixprec.autocast(enabled=False),
    "simulate": lambda: mixprec.simulate("h100"),
    "compress_saved": lambda: mixprec.compress_saved("int8"),
    "several": several,
}
Function = Callable[[torch.Tensor], torch.Tensor]


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def normalized(x: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + 1) * x


def function(r: random.Random, layers: list[Any], reentrant: bool | None) -> Function:
    """Of random steps; those in a checkpoint, if reentrant is not None. Each layer is called once:
    gradients of several calls are rounded in the order in which they come."""
    chosen: list[Function] = []
    for _ in range(3):
        step = r.choice([softmax, normalized, layers.pop(), layers.pop(), layers.pop()])
        inside = REGIONS[r.choice(["none", *REGIONS])]

        def in_region(x: torch.Tensor, inside: Any = inside, step: Any = step) -> torch.Tensor:
            with inside():
                return step(x.bfloat16() if isinstance(step, nn.Module) else x)

        chosen.append(in_region)
    if r.random() < 0.3 and len(layers) > 20:
        chosen.insert(r.randrange(4), function(r, layers, reentrant))

    def run(x: torch.Tensor) -> torch.Tensor:
        for step in chosen:
            x = step(x)
        return x.float()

    if reentrant is None:
        return run
    return lambda x: checkpoint(run, x, use_reentrant=reentrant)


def gradients(run: Function, model: nn.Module, regions: Any, how: str) -> list[torch.Tensor]:
    around_forward, around_backward = regions
    x = torch.linspace(-3, 3, 4 * 32).view(4, 32).bfloat16().requires_grad_()
    with REGIONS[around_forward]():
        y = run(x * 1)
    grad = torch.linspace(-1, 2, y.numel()).view(y.shape)

    def backward() -> None:
        with REGIONS[around_backward]():
            if how == "Tensor.backward":
                y.backward(grad)
            else:
                torch.autograd.backward([y], [grad])

    if how == "thread":
        with ThreadPoolExecutor(1) as pool:
            pool.submit(backward).result()
    else:
        backward()
    found = [x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad(set_to_none=True)
    return [g for g in found if g is not None]


def compare(seed: int) -> None:
    r = random.Random(seed)
    torch.manual_seed(seed)
    kinds = r.choices([lambda: nn.Linear(32, 32), lambda: nn.LayerNorm(32)], [2, 1], k=40)
    model = nn.Sequential(*(kind() for kind in kinds)).bfloat16()
    mixprec.convert(model, r.choice(["bf16", "fp8", "fp8-rowwise"]))
    regions = r.choice([*REGIONS]), r.choice([*REGIONS])
    how = r.choice(["Tensor.backward", "autograd.backward", "thread"])
    first, *others = (
        gradients(function(random.Random(seed), [*model], reentrant), model, regions, how)
        for reentrant in (None, True, False)
    )
    for found in others:
        assert len(found) == len(first), (seed, regions, how)
        for a, b in zip(found, first, strict=True):
            assert torch.equal(a.nan_to_num(7), b.nan_to_num(7)), (seed, regions, how)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("around", ["forward", "backward"])
def test_twice_differentiable_is_that_of_the_forward_pass(around: str, reentrant: bool) -> None:
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    mixprec.convert(net, "fp8", fuse=True)
    start, none = torch.randn(16, 16), contextlib.nullcontext

    def gradient(checkpointed: bool) -> torch.Tensor:
        x, twice = start.clone().requires_grad_(), mixprec.functional.twice_differentiable
        with twice() if around == "forward" else none():
            y = checkpoint(net, x, use_reentrant=reentrant) if checkpointed else net(x)
        with twice() if around == "backward" else none():
            y.square().sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(True), gradient(False))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("count", [100, pytest.param(3000, marks=pytest.mark.exhaustive)])
def test_random_checkpoints_have_the_gradients_of_none(count: int) -> None:
    for seed in range(count):
        compare(seed)


class _Foreign(torch.autograd.Function):
    """Another library's reentrant checkpoint."""

    @staticmethod
    def forward(ctx: Any, run: Function, x: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


def test_layers_of_other_checkpoints_follow_the_region_of_backward() -> None:
    layer = mixprec.nn.Linear(32, 32, recipe="fp8").bfloat16()
    for name in ("fp16", "off", "simulate"):
        want = gradients(layer, layer, (name, name), "Tensor.backward")
        got = gradients(lambda x: _Foreign.apply(layer, x), layer, (name, name), "Tensor.backward")
        assert all(map(torch.equal, got, want)), name


class Meter(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@for_each("name", [name for name in REGIONS if name != "compress_saved"])
def test_other_code_of_a_backward_pass_is_left_alone(name: str) -> None:
    """Hooks run as without the region, and so do modes of the program, inside and outside of it."""
    x = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    seen: list[Any] = []
    inside = Meter()

    def hook(g: torch.Tensor) -> torch.Tensor:
        with inside:
            seen.append((g.sum().dtype, torch.zeros(1).device.type))
        with REGIONS["autocast"]():
            seen.append(g.sum().dtype)
        return g * 2

    x.register_hook(hook)
    outside = Meter()
    with outside, REGIONS[name]():
        (x * 3).sum().backward()
    assert seen == [(torch.bfloat16, "cpu"), torch.float32]
    assert {torch.Tensor.sum, torch.zeros} <= {*inside.seen}
    assert {torch.Tensor.backward, torch.zeros} & {*outside.seen} == {torch.Tensor.backward}
    with torch.device("meta"), REGIONS[name]():
        (x * 3).sum().backward()
    assert seen[-2:] == [(torch.bfloat16, "cpu"), torch.float32]
    assert (current_region(), simulation.current()) == (None, None)
