"""use_backend belongs to the thread that enters it, and a backward pass to its forward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import for_each
from torch.utils._python_dispatch import TorchDispatchMode

import mixprec
from mixprec.functional import attention, conv2d, linear, norm_linear, rotary
from mixprec.functional._norm import norm


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
    "conv2d": lambda: conv2d(leaf(1, 4, 5, 5), leaf(4, 4, 3, 3)),
    "norm_linear": lambda: norm_linear(leaf(4, 32), leaf(16, 32))[0],
    "attention": lambda: attention(leaf(1, 2, 3, 8), leaf(1, 2, 3, 8), leaf(1, 2, 3, 8)),
    "rotary": lambda: rotary(leaf(1, 2, 3, 8), torch.ones(3, 4), torch.ones(3, 4)),
    "norm": lambda: norm(leaf(4, 32), leaf(32), None, 1e-6, False, torch.float32),
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


def test_threads_do_not_see_each_other_and_leave_nothing_behind() -> None:
    """Two blocks that overlap in time, ended in the order in which they began."""
    entered, left, found = threading.Event(), threading.Event(), []

    def amax() -> set[bool]:
        return ran(lambda: mixprec.amax(torch.ones(3)))

    def other() -> None:
        found.append(amax())
        with mixprec.use_backend("cpp"):
            found.append(amax())
            entered.set()
            assert left.wait(60)
        found.append(amax())

    thread = threading.Thread(target=other)
    with mixprec.use_backend("reference"):
        thread.start()
        assert entered.wait(60)
        assert amax() == {True}
    left.set()
    thread.join()
    assert found == [{False}] * 3
    assert amax() == {False}


@pytest.mark.usefixtures("fresh_compiler")
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

    thread = threading.Thread(target=both)
    thread.start()
    thread.join()
    both()
    assert found == [[False, False], [False, True]] * 4
