"""Compiled models with graph breaks compute what they compute uncompiled, in every region: Dynamo
compiles no frame of mixprec's modes by itself."""

from __future__ import annotations

import contextlib
import linecache
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec.ops._dispatch.op import OPS

WIDTH = 16  # two heads of 8
FEATURES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no region": contextlib.nullcontext,
    "autocast": mixprec.autocast,
    "autocast bf16": lambda: mixprec.autocast("bf16"),
    "autocast off": lambda: mixprec.autocast(enabled=False),
    "compress_saved": lambda: mixprec.compress_saved("int8"),
    "simulate": lambda: mixprec.simulate("h100"),
}
BREAKS = (
    'print(end="")',
    "torch._dynamo.graph_break()",
    "_ = h.detach().float().sum().item()",
    "_ = h.detach().float().tolist()",
    'warnings.warn("a line for a log")',
    "h = uncompiled(self, h)",
)
USES = (  # the last two are FP32 in a region, but not in a checkpoint that is compiled
    "h = h * 1000.0 if h.is_cuda else h / h.shape[-1]",
    "h = torch.tanh(h.mT).mT * torch.sigmoid(h)",
    "h = h + h.real.detach()",
    "h = h * 1.5 if h.requires_grad else h * 3.0",
    "h = h.to(h.dtype) + h.data",
    "h = torch.softmax(h, -1) if h.dtype.is_floating_point else h",
    "h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-3)",
)
ATTENTION = (  # not mixprec's in a checkpoint that is not compiled
    "q = h.unflatten(-1, (2, 8)).transpose(-2, -3)",
    "h = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)",
    "h = h.transpose(-2, -3).flatten(-2)",
)
# Each with a line to go before what is inside of it, and one to go after.
BLOCKS = (
    ("for _ in range(2):", ""),
    ("try:", "except ZeroDivisionError: h = h * 7"),
    ("try:", "finally: h = h * 1.25"),
    ("with own_context():", ""),
    ("with torch.enable_grad():", ""),
    ("if h.detach().float().sum().item() > -1e9:", ""),
    ("with mixprec.autocast(enabled=False):", ""),
    ("with mixprec.autocast():", ""),
)


@contextlib.contextmanager
def own_context() -> Iterator[None]:
    yield


def look(model: Any, h: torch.Tensor, requires_grad: bool) -> None:
    kind = h.is_cuda, str(h.dtype), h.device.type, h.is_sparse, h.layout is torch.strided
    model.seen.append((*kind, (*h.shape,), (*h.mT.shape,), h.ndim, requires_grad))


@torch._dynamo.disable
def uncompiled(model: Any, h: torch.Tensor) -> torch.Tensor:
    look(model, h, h.requires_grad)
    return h * 1000.0 if h.is_cuda else h.mT.mT / h.shape[-1]


class _Source:
    def __init__(self, r: random.Random) -> None:
        self.r, self.functions, self.has_break = r, 0, False
        self.reentrant, self.compiled = 0, 0  # checkpoints

    def block(self, depth: int) -> list[str]:
        return [line for _ in range(self.r.randint(2, 3)) for line in self._statement(depth)]

    def _statement(self, depth: int) -> list[str]:
        r = self.r
        kinds = ["layer", "use", "use", "look", "break", "attention"]
        if self.compiled:
            kinds = kinds[:4]
        elif depth < 2:
            kinds += ["block", "block", "checkpoint"]
        kind = r.choice(kinds)
        # Where torch.compile runs a reentrant checkpoint, it is not without grad mode.
        grad = "True" if self.reentrant else "h.requires_grad"
        if kind == "layer":
            return [f"h = self.part{0 if self.compiled else r.randrange(3)}(h.to(self.kind.dtype))"]
        if kind == "attention":
            return [*ATTENTION]
        if kind == "use":
            line = r.choice(USES[:-2] if self.compiled else USES)
            return [line.replace("h.requires_grad", grad)]
        if kind == "look":
            return [f"look(self, h, {grad})"]
        if kind == "break":
            self.has_break = True
            return [r.choice(BREAKS)]
        if kind == "block":
            before, after = r.choice(BLOCKS)
            inside = self.block(depth + 1)
            return [before, *(f"    {line}" for line in inside), *([after] if after else [])]
        self.functions += 1
        name, reentrant, is_compiled = f"f{self.functions}", r.random() < 0.5, r.random() < 0.4
        self.reentrant += reentrant
        self.compiled += is_compiled
        inside = [*([] if is_compiled else [r.choice(BREAKS)]), *self.block(depth + 1)]
        self.reentrant -= reentrant
        self.compiled -= is_compiled
        call = f"h = checkpoint({name}, h, use_reentrant={reentrant})"
        return [f"def {name}(h):", *(f"    {line}" for line in inside), "    return h", call]


class Program(nn.Module):
    """Its own `forward` is that of `source`."""

    def __init__(self, seed: int, depth: int = 0) -> None:
        super().__init__()
        r = random.Random(seed)
        torch.manual_seed(seed)
        self.seen: list[Any] = []
        self.kind = nn.Parameter(torch.zeros(()), requires_grad=False)
        linear = nn.Linear(WIDTH, WIDTH)
        deep = (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        parts = [linear, nn.Sequential(*deep), nn.Sequential(nn.RMSNorm(WIDTH), linear)]
        if depth < 2 and r.random() < 0.5:
            parts[1] = Program(r.randrange(10**9), depth + 1)
            parts[1].seen = self.seen
        self.part0, self.part1, self.part2 = parts
        source = _Source(r)
        lines = source.block(0)
        while not source.has_break:
            lines += source.block(0)
        code = "\n    ".join(["def forward(self, h):", *lines, "return h"])
        name = f"<program {seed}, {depth}>"
        linecache.cache[name] = len(code), None, code.splitlines(True), name
        names: dict[str, Any] = {}
        exec(compile(code, name, "exec"), {**globals(), "checkpoint": checkpoint}, names)
        self.source = code
        # Of a class of its own: a forward in a module's __dict__ is not fused.
        kind = type(f"Program{seed}", (Program,), {"forward": names["forward"]})
        self.__class__ = kind


def result(model: Any, call: Callable[..., torch.Tensor], x: torch.Tensor) -> dict[str, Any]:
    """The output, the gradients, and what attributes said in the forward and backward pass."""
    x = x.clone().requires_grad_()
    for module in model.modules():
        if isinstance(module, Program):
            module.seen.clear()
    try:
        y = call(x * 1.0)
        y.float().square().mean().backward()
    except RuntimeError as error:  # such as layers of torch that get a norm's FP32 in a region
        return {"error": type(error).__name__}
    found: dict[str, Any] = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found | {"y": y.detach(), "x": x.grad, "seen": [*model.seen]}


def differences(a: dict[str, Any], b: dict[str, Any], exact: bool) -> list[str]:
    """The names of what is not the same: bits; gradients that were added in another order."""

    def same(name: str, one: Any, other: Any) -> bool:
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            return bool(one == other)
        if one.dtype != other.dtype or one.isfinite().all() != other.isfinite().all():
            return False
        if exact or name == "y" or not one.isfinite().all():
            return torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
        error = (one.double() - other.double()).norm()
        return bool(error <= 4 * torch.finfo(one.dtype).eps * one.double().norm())

    return [n for n in a | b if not same(n, a.get(n), b.get(n))]


def compare(seed: int, fuse: bool | None, feature: str, backend: str) -> list[str] | None:
    """What the compiled model of `seed` computes differently from the same model, not compiled;
    None if only that runs. fuse: of convert; None: torch's model."""
    r = random.Random(seed)
    recipe, dtype = r.choice(["bf16", "fp8"]), r.choice([torch.float32, torch.bfloat16])
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Program(seed)
        if fuse is not None:
            mixprec.convert(model, recipe, fuse=fuse)
        model.to(dtype)
        x = torch.randn(2, WIDTH, WIDTH, dtype=dtype)
        with FEATURES[feature]():
            want = result(model, model, x)
            compiled = torch.compile(model, backend=backend)
            runs = [result(model, compiled, x) for _ in range(2)]  # and what is in the caches
    if any("error" in got and "error" not in want for got in runs):
        return None
    different = (differences(want, got, backend == "eager") for got in runs)
    return [f"{name} of run {i}" for i, names in enumerate(different) for name in names]


def run(seed: int) -> bool:
    """Whether there was something to compare."""
    feature = [*FEATURES][seed % len(FEATURES)]
    fuse, backend = (seed // 6) % 2 == 0, ("eager", "aot_eager")[(seed // 12) % 2]
    different = compare(seed, fuse, feature, backend)
    assert not different, (seed, fuse, feature, backend, different)
    return different is not None


@pytest.mark.parametrize("seed", range(12))
def test_compiled_programs(seed: int) -> None:
    assert run(seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(1, 26))
def test_three_hundred_compiled_programs(part: int) -> None:
    """torch.compile raises an error for some: two calls of one layer in 16 bits in a graph."""
    assert sum(run(seed) for seed in range(12 * part, 12 * part + 12)) > 4


# torch.compile before anything has run eagerly, as the first lines of a training script do


PROGRAM = """
import os, torch, torch._dynamo, mixprec
layers = ((torch.nn.Linear, (64, 32), (16, 64)), (torch.nn.Conv2d, (16, 8, 3), (2, 16, 6, 6)))
for recipe in ("bf16", "fp8", "fp8-delayed", "fp8-block"):
    for make, sizes, shape in layers:
        if os.fork():  # of a process that has imported everything, and called nothing
            assert os.wait()[1] == 0, (recipe, make)
            continue
        layer = mixprec.convert(make(*sizes), recipe)
        x = torch.randn(shape, requires_grad=True)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        y = compiled(x)
        y.sum().backward()
        with torch.compiler.set_stance("fail_on_recompile"):
            assert layer(x).shape == y.shape and compiled(x).shape == y.shape
        os._exit(0)
"""


@pytest.mark.slow
def test_the_first_call_of_a_process() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tempfile.gettempdir(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_choice_is_not_written_down_while_it_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where it is made at the first call."""
    for op in OPS.values():
        monkeypatch.setattr(op, "_chosen", {})
    layer, x = mixprec.nn.Linear(64, 32), torch.randn(16, 64, requires_grad=True)
    torch.compile(layer, backend="aot_eager", fullgraph=True)(x).sum().backward()
    assert not any(op._chosen for op in OPS.values())
