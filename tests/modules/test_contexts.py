"""autocast, use_backend, simulate and compress_saved belong to the thread that enters them, and a
backward pass to its forward pass."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import for_each, normal
from independent import assert_same_lists
from test_autocast import formats
from test_compress_saved import bits_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec.functional import attention, conv2d, linear, norm_linear, operands, rotary, rotary_qkv
from mixprec.functional._derivatives import apply
from mixprec.functional._one_pass import RowNorm
from mixprec.memory.compress_saved import recorded
from mixprec.ops._dispatch import simulation
from mixprec.recipes import RECIPES, Recipe


class Ops(TorchDispatchMode):
    """Whether our ops ran as their references."""

    def __init__(self) -> None:
        super().__init__()
        self.reference: list[bool] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "mixprec":
            self.reference.append("_reference" in func.name())
        return func(*args, **(kwargs or {}))


def ran(run: Callable[[], object]) -> set[bool]:
    with Ops() as ops:
        run()
    return set(ops.reference)


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def compressed() -> torch.Tensor:
    with mixprec.compress_saved("int8"):
        return torch.nn.functional.gelu(leaf(64, 64) * 1)


def twice() -> torch.Tensor:
    with mixprec.functional.twice_differentiable():
        x = leaf(2, 32)
        y = linear(x, leaf(16, 32)).square().sum()
        return torch.autograd.grad(y, x, create_graph=True)[0]


FUNCTIONS: dict[str, Callable[[], torch.Tensor]] = {
    "linear": lambda: linear(leaf(4, 32), leaf(16, 32)),
    "vmap": lambda: torch.vmap(linear, (0, None))(leaf(2, 4, 32), leaf(16, 32)),
    "conv2d": lambda: conv2d(leaf(1, 4, 5, 5), leaf(4, 4, 3, 3)),
    "norm_linear": lambda: norm_linear(leaf(4, 32), leaf(16, 32))[0],
    "attention": lambda: attention(leaf(1, 2, 3, 8), leaf(1, 2, 3, 8), leaf(1, 2, 3, 8)),
    "rotary": lambda: rotary(leaf(1, 2, 3, 8), torch.ones(3, 4), torch.ones(3, 4)),
    "rotary_qkv": lambda: rotary_qkv(leaf(1, 3, 24), *torch.ones(2, 3, 4), heads=1)[0],
    "norm": lambda: apply("norm", RowNorm, leaf(4, 32), leaf(32), None, 1e-6, False, torch.float32),
    "compress_saved": compressed,
    "twice_differentiable": twice,
}


@for_each("name", FUNCTIONS)
def test_backward_runs_on_the_backend_of_its_forward_pass(name: str) -> None:
    with mixprec.use_backend("reference"):
        y = FUNCTIONS[name]()
    assert ran(y.sum().backward) == {True}
    y = FUNCTIONS[name]()
    with mixprec.use_backend("reference"):
        assert ran(y.sum().backward) == {False}
        assert ran(lambda: mixprec.amax(torch.ones(3))) == {True}


def recipe_in_force() -> set[str]:
    return formats(mixprec.nn.Linear(32, 32), torch.randn(4, 32))


def runs_references() -> set[bool]:
    return ran(lambda: mixprec.amax(torch.ones(3)))


def bits_saved() -> set[int | None]:
    found: set[int | None] = set()
    with recorded(lambda kind, t: found.add(bits_of(t))):
        torch.nn.functional.gelu(leaf(64, 64) * 1)
    return found


@pytest.mark.parametrize(
    ("enter", "one", "other", "state", "states"),
    [
        (mixprec.autocast, "bf16", "fp16", recipe_in_force, ({"e4m3"}, {"bf16"}, {"fp16"})),
        (mixprec.use_backend, "reference", "cpp", runs_references, ({False}, {True}, {False})),
        (mixprec.simulate, "hopper", "ada", simulation.current, (None, "hopper", "ada")),
        (mixprec.compress_saved, "int8", "int4", bits_saved, ({None}, {8}, {4})),
    ],
)
def test_threads_do_not_see_each_other_and_leave_nothing_behind(
    enter: Callable[[str], Any], one: str, other: str, state: Callable[[], object], states: tuple
) -> None:
    """Two blocks that overlap in time, ended in the order in which they began."""
    outside, inside_of_one, inside_of_other = states
    entered, left, found = threading.Event(), threading.Event(), []

    def run() -> None:
        found.append(state())
        with enter(other):
            found.append(state())
            entered.set()
            assert left.wait(60)
        found.append(state())

    thread = threading.Thread(target=run)
    with enter(one):
        thread.start()
        assert entered.wait(60)
        with pytest.raises(ZeroDivisionError), enter(other):
            _ = 1 / 0
        assert state() == inside_of_one
    left.set()
    thread.join()
    assert found == [outside, inside_of_other, outside]
    assert state() == outside


def step(layer: torch.nn.Module, run: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """y and the gradient of the weight."""
    y = run(normal((48, 320), torch.float32).requires_grad_())
    y.square().sum().backward()
    grad, layer.weight.grad = layer.weight.grad, None
    return [y.detach(), grad]


@pytest.mark.parametrize(
    ("enter", "blocks"),
    [(mixprec.autocast, ("bf16", "fp16")), (mixprec.simulate, ("hopper", "ada"))],
)
def test_compiled_and_recomputed_layers_follow_the_block(
    enter: Callable[[str], Any], blocks: tuple[str, ...]
) -> None:
    layer = mixprec.nn.Linear(320, 24)
    compile_ = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    compiled = compile_(layer)
    recomputed = compile_(lambda x: checkpoint(layer, x, use_reentrant=False))
    outside = step(layer, layer)
    for name in (None, *blocks, None):
        with nullcontext() if name is None else enter(name):
            want = step(layer, layer)
            assert torch.equal(want[0], outside[0]) == (name is None)
            assert_same_lists(step(layer, compiled), want)
            assert_same_lists(step(layer, recomputed), want)
            for reentrant in (False, True):
                again = functools.partial(checkpoint, layer, use_reentrant=reentrant)
                assert_same_lists(step(layer, again), want)


def test_compiled_code_follows_the_block_of_its_thread() -> None:
    found: list[list[bool]] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        names = [str(node.target) for node in graph.graph.nodes if "amax" in str(node.target)]

        def run(*args: torch.Tensor) -> Any:
            found.append(["_reference" in name for name in names])
            return graph(*args)

        return run

    def call(x: torch.Tensor) -> torch.Tensor:
        with mixprec.use_backend("cpp"):
            inside = mixprec.amax(x)
        return mixprec.amax(x) + inside

    compiled = torch.compile(call, backend=backend, fullgraph=True)

    def both() -> None:
        for _ in range(2):
            compiled(torch.ones(3))
            with mixprec.use_backend("reference"):
                compiled(torch.ones(3))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(both).result()
    both()
    assert found == [[False, False], [False, True]] * 4


# Layers inside mixprec.simulate: the three GEMMs of every recipe


GEMM = torch.ops.mixprec.gemm_simulated
K, N, M = 320, 136, 160  # more than the 128 of which sums are promoted
FP8 = RECIPES["fp8"]
RECIPES_IN_USE = (
    *(recipe for recipe in RECIPES.values() if not recipe.is_block),
    replace(FP8, fast_accum=["forward", "grad_weight"]),
    replace(FP8, fast_accum=["grad_input"]),
)


def inside(arch: str | None) -> AbstractContextManager[None]:
    return nullcontext() if arch is None else mixprec.simulate(arch)


def layer_of(recipe: str | Recipe) -> torch.nn.Module:
    torch.manual_seed(0)
    return mixprec.convert(torch.nn.Sequential(torch.nn.Linear(K, N)), recipe)


def run(
    recipe: str | Recipe, forward: str | None, backward: str | None, main_grad: bool = False
) -> list[torch.Tensor]:
    """y, computed inside simulate(forward), and the gradients, inside simulate(backward)."""
    layer, x = layer_of(recipe), normal((M, K), torch.float32).requires_grad_()
    weight = layer[0].weight
    if main_grad:
        weight.main_grad = torch.zeros(N, K)
    with inside(forward):
        y = layer(x)
    with inside(backward):
        y.backward(normal((M, N), torch.float32, 1))
    return [y.detach(), x.grad, weight.main_grad if main_grad else weight.grad]


def by_hand(recipe: Recipe, arch: str, main_grad: bool) -> list[torch.Tensor]:
    layer = layer_of(recipe)[0]
    x, g = normal((M, K), torch.float32), normal((M, N), torch.float32, 1)
    values = {"x": x, "w": layer.weight.detach(), "g": g}
    x, w, g = (operands.cast(v, role, recipe, None, use_t=True) for role, v in values.items())

    def product(kind: str, a: operands.Matrix, b: operands.Matrix) -> torch.Tensor:
        bias = layer.bias.detach() if kind == "forward" else None
        fast = kind in recipe.fast_accum and not (main_grad and kind == "grad_weight")
        b_inv = None if b.scale_inv is None else b.scale_inv.t()
        return GEMM(a.data, b.data.t(), a.scale_inv, b_inv, bias, torch.float32, fast, arch)

    return [
        product("forward", x.matrix, w.matrix),
        product("grad_input", g.matrix, w.matrix_t),
        product("grad_weight", g.matrix_t, x.matrix_t),
    ]


@for_each("recipe", RECIPES_IN_USE)
def test_all_products_are_those_of_the_gpu(recipe: Recipe) -> None:
    """The backward pass keeps what the forward pass was in, wherever it is called."""
    plain = run(recipe, None, None)
    for arch, backward in (("hopper", None), ("ada", "hopper")):
        for main_grad in (False, True):
            got = run(recipe, arch, backward, main_grad)
            assert all(map(torch.equal, got, by_hand(recipe, arch, main_grad))), arch
        assert not any(map(torch.equal, got, plain))
    assert all(map(torch.equal, run(recipe, None, "hopper"), plain))


def test_block_formats_of_blackwell() -> None:
    """The backward pass, too, keeps what the forward pass was in; others have no instruction."""
    for recipe in ("mxfp8", "mxfp4"):
        got, plain = run(recipe, "blackwell", "hopper"), run(recipe, None, None)
        assert all(map(torch.equal, got, run(recipe, "blackwell", None)))
        if recipe == "mxfp8":  # sums of FP4 this short are exact
            assert not any(map(torch.equal, got, plain))
        torch.testing.assert_close(got, plain, rtol=1e-3, atol=1e-3)
        with pytest.raises(ValueError, match=r"^simulate: the tensor cores of hopper have no inst"):
            run(recipe, "hopper", None)


def test_second_derivatives() -> None:
    """The products of higher derivatives are simulated like the block they are computed in."""
    layer, x = layer_of("bf16"), normal((M, K), torch.float32).requires_grad_()
    seconds = []
    for arch in (None, "hopper"):
        with inside(arch), mixprec.functional.twice_differentiable():
            (g,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
            seconds += torch.autograd.grad(g.square().sum(), x)
    assert not torch.equal(*seconds)
    assert torch.allclose(*seconds, rtol=0.05, atol=0.5)


def test_flops_are_counted() -> None:
    layer = layer_of("fp8")
    with mixprec.simulate("hopper"), torch.no_grad(), mixprec.audit(layer) as audit:
        layer(normal((M, K), torch.float32))
    assert [*audit.decided] == ["recipe fp8"]
