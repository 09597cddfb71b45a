"""Whole layers on a GPU: each recipe against the CPU, without host syncs, in graphs, compiled."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from cases import nearest
from emulated.agreement import assert_bits
from on_gpu import FAKE_DEVICE, has_kernels, needs_kernels
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mixprec
from mixprec.ops import linear_pass
from mixprec.recipes import RECIPES
from mixprec.testing import sqnr

CURRENT = [name for name, recipe in RECIPES.items() if not recipe.is_delayed]


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    """-2 to 2: exact in every format, and so are their scales and the sums of some dozens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).float()


def layers(kind: str, recipe: str) -> tuple[nn.Module, torch.Tensor]:
    """A layer with small integers for weights, and an input for it. Without stochastic rounding,
    for which devices draw different numbers."""
    settings = nearest(recipe)
    if kind == "linear":
        layer, x = mixprec.nn.Linear(48, 32, recipe=settings), integers(5, 24, 48)
    else:
        kernel, padding = (1, 0) if kind == "conv1x1" else (3, 1)
        layer = mixprec.nn.Conv2d(16, 32, kernel, padding=padding, recipe=settings)
        x = integers(2, 16, 7, 9)
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.copy_(integers(*p.shape, seed=i + 1))
    return layer, x


def passed(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """y, the gradient of x and those of the parameters, all on the CPU."""
    x = x.clone().requires_grad_()
    y = layer(x)
    g = integers(*y.shape, seed=9).to(y)
    grads = torch.autograd.grad(y, [x, *layer.parameters()], g)
    return [t.detach().cpu() for t in (y, *grads)]


@pytest.mark.parametrize("kind", ["linear", "conv1x1", "conv3x3"])
@pytest.mark.parametrize("recipe", filter(has_kernels, CURRENT))
def test_small_integers_are_exact(
    recipe: str, kind: str, kernels: str, device: torch.device
) -> None:
    layer, x = layers(kind, recipe)
    with mixprec.use_backend("cpp"):
        want = passed(copy.deepcopy(layer), x)
    assert_bits(passed(layer.to(device), x.to(device)), want)


@pytest.mark.parametrize("kind", ["linear", "conv1x1", "conv3x3"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_random_numbers_are_those_of_the_cpu_but_for_the_order_of_sums(
    recipe: str, kind: str, device: torch.device
) -> None:
    """Casts are the same bit for bit; sums in another order differ in FP32's last bits, and what
    is rounded to 16 bits on the way, as by a convolution, in those."""
    layer, x = layers(kind, recipe)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(generator=torch.Generator().manual_seed(1))
    x = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    want = passed(copy.deepcopy(layer), x)
    got = passed(layer.to(device), x.to(device))
    for i, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        assert mine.dtype == theirs.dtype
        assert sqnr(theirs, mine) >= 45, f"tensor {i}"


class Seen(TorchDispatchMode):
    """Something that is to see each op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("recipe", [name for name in RECIPES if not RECIPES[name].is_block])
def test_a_pass_in_one_call_is_that_op_by_op(
    recipe: str, main_grad: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, results = [], []
    for name in ("linear_forward", "linear_backward"):
        op = Mock(wraps=getattr(linear_pass, name))
        op.side_effect = lambda *_, name=name: [DEFAULT, passes.append(name)][0]
        monkeypatch.setattr(linear_pass, name, op)
    for mode in (nullcontext(), Seen()):
        generator = torch.Generator().manual_seed(0)
        layer = mixprec.nn.Linear(64, 48, recipe=recipe, dtype=torch.bfloat16)
        with torch.no_grad():
            for p in layer.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))
        layer, found = layer.to(device), []
        if main_grad:
            layer.weight.main_grad = torch.ones(48, 64, device=device)
        for _ in range(2):
            x = torch.randn(2, 8, 64, generator=generator).to(device, torch.bfloat16)
            x.requires_grad_()
            with mode:
                y = layer(x)
                y.backward(torch.randn(y.shape, generator=generator).to(y))
            found += [y.detach(), x.grad, *layer.buffers()]
            mixprec.update_scales(layer)
        grads = [layer.weight.grad, layer.bias.grad, getattr(layer.weight, "main_grad", None)]
        results.append([*found, *(g for g in grads if g is not None)])
    assert_bits(*([t.cpu() for t in each] for each in results))
    # Torch's products add to main_grad in a call of their own.
    assert passes.count("linear_forward") == 2
    assert passes.count("linear_backward") == 2 or main_grad


@pytest.mark.parametrize(
    ("recipe", "want"), [("fp8", [(3, 6), (4, 5)]), ("fp8-delayed", [(3, 6), (3, 5)])]
)
def test_how_many_launches_and_allocations_a_pass_has(
    recipe: str,
    want: list[tuple[int, int]],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The casts, each with its transpose, and the products, which are ours here."""
    if not FAKE_DEVICE:
        pytest.skip("launches are counted by the fake device")
    ours = linear_pass.Kernels(0, k_major=True)
    monkeypatch.setattr(linear_pass, "kernels", lambda *_: ours)
    shim = ctypes.CDLL(str(Path(mixprec.__file__).with_name("_C_cuda.so")))
    counted = ctypes.c_int64.in_dll(shim, "gpu_on_cpu_kernels")

    def count(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, tuple[int, int]]:
        allocated = lambda: torch.cuda.memory_stats()["allocation.all.allocated"]  # noqa: E731
        before = counted.value, allocated()
        result = call()
        return result, (counted.value - before[0], allocated() - before[1])

    layer = mixprec.nn.Linear(64, 48, bias=False, recipe=recipe, dtype=torch.bfloat16).to(device)
    x = torch.ones(32, 64, dtype=torch.bfloat16, device=device).requires_grad_()
    for _ in range(2):  # the first compares kernels with their references
        y, forward = count(lambda: layer(x))
        g = torch.ones_like(y)
        _, backward = count(lambda y=y, g=g: torch.autograd.grad(y, [x, layer.weight], g)[0])
    assert [forward, backward] == want


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(torch.relu(self.up(x))))


def made(recipe: str, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = mixprec.convert(Net(), recipe).to(device)
    return model, mixprec.optim.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)


def inputs(device: torch.device, count: int = 4) -> list[torch.Tensor]:
    """Larger from step to step, so that delayed scales move."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(32, 64, generator=generator).to(device) * 2.0**i for i in range(count)]


def state(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_waits_for_nothing(recipe: str, device: torch.device, only_cuda: None) -> None:
    needs_kernels(recipe)
    model, optimizer = made(recipe, device)
    for step, x in enumerate(inputs(device)):
        if step >= 2:  # the first steps make state, and compare kernels with their references
            torch.cuda.set_sync_debug_mode("error")
        try:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(t.isfinite().all() for t in state(model))


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8-delayed", "fp8-rowwise", "fp8-block"])
def test_a_step_replays_in_a_graph(recipe: str, device: torch.device, only_cuda: None) -> None:
    results = []
    for captured in (False, True):
        model, optimizer = made(recipe, device)
        fed = torch.empty_like(inputs(device)[0])

        def step(model: nn.Module = model, optimizer: object = optimizer, x=fed) -> None:
            optimizer.zero_grad(set_to_none=False)
            model(x).square().mean().backward()
            optimizer.step()

        graph, (first, second, *rest) = torch.cuda.CUDAGraph(), inputs(device, 6)
        stream = torch.cuda.Stream()
        for x in (first, second):
            fed.copy_(x)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                step()
            torch.cuda.synchronize()
        if captured:
            with torch.cuda.graph(graph, stream=stream):
                step()
        for x in rest:
            fed.copy_(x)
            graph.replay() if captured else step()
            torch.cuda.synchronize()
        results.append(state(model))
    assert_bits(*results)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8", "fp8-delayed"])
def test_compiles_fullgraph(recipe: str, device: torch.device) -> None:
    """The losses agree; their last bits are the compiler's affair."""
    losses = []
    for compiled in (False, True):
        model, optimizer = made(recipe, device)
        torch._dynamo.reset()
        inductor = device.type == "cuda" and not FAKE_DEVICE
        backend = "inductor" if inductor else "aot_eager"
        run = torch.compile(model, fullgraph=True, backend=backend) if compiled else model
        losses.append([])
        for x in inputs(device):
            loss = run(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_delayed_scales_are_those_of_the_cpu(device: torch.device) -> None:
    """The amax of x, which no product touches, and what follows from it."""
    scales = []
    for where in (torch.device("cpu"), device):
        layer, _ = layers("linear", "fp8-delayed")
        layer.to(where)
        for largest in (3.0, 0.5, float("inf"), 7.0):
            x = integers(4, 48).to(where)
            x[0, 0] = largest
            layer(x).sum().backward()
            mixprec.update_scales(layer)
        scales.append([layer.scale[0].cpu(), layer.amax_history[0].cpu()])
    assert_bits(*scales)
    assert scales[0][0] == 64.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_replay_of_a_graph_rounds_what_it_saves_anew(
    dtype: torch.dtype, device: torch.device, only_cuda: None
) -> None:
    """The errors of the gradients differ from replay to replay, and have no mean."""
    x, w = (torch.randn(n, 256, generator=torch.Generator().manual_seed(n)) for n in (32, 128))
    x, w = x.to(device, dtype).requires_grad_(), w.to(device, dtype)
    g = torch.ones(32, 128, dtype=dtype, device=device)

    def gradient() -> torch.Tensor:
        y = nn.functional.linear(nn.functional.gelu(x * 1), w)
        return torch.autograd.grad(y, x, g)[0]

    def compressed() -> torch.Tensor:
        with mixprec.compress_saved("int4", seed=1):
            return gradient()

    exact = gradient().double()
    plain = compressed()  # compares kernels with their references
    assert torch.equal(plain, compressed()), "outside of a graph the seed decides"
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = compressed()
    errors = []
    for _ in range(30):
        graph.replay()
        errors.append((found.double() - exact).cpu())
    error = torch.stack(errors)
    assert len(error.flatten(1).unique(dim=0)) == len(error)
    assert error.mean(0).square().mean() < 1.5 / len(error) * error.square().mean()
