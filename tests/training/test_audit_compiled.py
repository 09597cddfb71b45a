"""audit of compiled models: they run uncompiled in it, and are compiled again after it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from independent import assert_same_bits, assert_same_lists
from models import Model
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import mixprec

X = torch.linspace(-1, 1, 24).view(4, 6)
NOTE = (
    "What torch.compile compiles ran uncompiled in the audit: rounding in the compiled code can "
    "differ."
)
# Of a product: what has to be as in eager mode.
Row = tuple[Any, ...]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch._dynamo.utils.counters.clear()


def graphs() -> int:
    """How many Dynamo has compiled in this test."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def rows(audit: mixprec.Audit) -> Counter[Row]:
    found: Counter[Row] = Counter()
    for op in audit.ops:
        # Names of compiled models begin with that of torch's wrapper.
        module = op.module and op.module.removeprefix("_orig_mod").removeprefix(".")
        row = module, op.op, op.phase, op.precision, op.accumulation, op.decided, op.flops
        found[row] += op.calls
    return found


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6))


SETTINGS: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda model: nullcontext(),
    "autocast": lambda model: torch.autocast("cpu", torch.bfloat16),
    "fp8": lambda model: mixprec.convert(model, "fp8") and nullcontext(),
    "region": lambda model: mixprec.convert(model, "bf16") and mixprec.autocast("fp8"),
}


def square(out: torch.Tensor) -> torch.Tensor:
    return out.float().square().mean()


def compiled_in_place(model: nn.Module, **options: Any) -> nn.Module:
    model.compile(**options)
    return model


def train(
    setting: str, wrap: Callable[[nn.Module], Any]
) -> tuple[mixprec.Audit, list[torch.Tensor]]:
    """The audit of a step, and its output and gradients."""
    model = mlp()
    region, run = SETTINGS[setting](model), wrap(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with mixprec.audit(model, optimizer=sgd) as audit:
        with region:
            out = run(X)
        square(out).backward()
        sgd.step()
    return audit, [out.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("setting", SETTINGS)
def test_as_in_eager_mode(setting: str) -> None:
    eager, want = train(setting, lambda model: model)
    assert eager.notes == []
    for wrap in (torch.compile, compiled_in_place):
        audit, got = train(setting, wrap)
        assert (rows(audit), audit.findings) == (rows(eager), eager.findings)
        assert audit.notes == audit.to_dict()["notes"] == [NOTE]
        assert NOTE in str(audit)
        assert_same_lists(got, want)
    assert graphs() == 0


# Before, after and around the block


class Counts(nn.Module):
    """Counts how often its code runs as Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 6), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.calls += 1
        return self.layer(x).relu()


def test_compiled_code_runs_again_after_the_block() -> None:
    model = Counts()
    compiled = torch.compile(model, backend="aot_eager")
    square(compiled(X)).backward()
    for fails in (False, True):
        before = model.calls
        with pytest.raises(KeyError) if fails else nullcontext(), mixprec.audit(model):
            square(compiled(X)).backward()
            assert model.calls == before + 1
            if fails:
                raise KeyError
        square(compiled(X)).backward()
        assert (model.calls, graphs()) == (before + 1, 1)


def stance() -> str:
    return str(torch._dynamo.eval_frame._stance.stance)


def test_blocks_of_threads() -> None:
    """That end in the order in which they began."""
    begun, ended = threading.Event(), threading.Event()

    def other() -> None:
        with mixprec.audit(mlp()):
            begun.set()
            ended.wait(60)
            assert stance() == "force_eager"

    thread = threading.Thread(target=other)
    with mixprec.audit(mlp()):
        thread.start()
        begun.wait(60)
    assert stance() == "force_eager"
    ended.set()
    thread.join()
    assert stance() == "default"


def test_passes_that_begin_or_end_outside_of_the_block() -> None:
    model = mlp()
    compiled = torch.compile(model, backend="aot_eager")
    out = compiled(X)
    with mixprec.audit(model) as audit:
        square(out).backward()
        later = compiled(X)
    assert any("compiled before the block ran a backward pass" in note for note in audit.notes)
    found = {(op.phase, op.decided) for op in audit.ops if op.kind != "reduction"}
    assert found == {("backward", "unknown"), ("forward", "tensor dtype")}
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    square(later).backward()
    for p, grad in zip(model.parameters(), want, strict=True):
        assert_same_bits(p.grad, grad)


def test_a_block_inside_of_compiled_code_is_refused() -> None:
    model = mlp()

    def step(x: torch.Tensor) -> None:
        with mixprec.audit(model):
            model(x)

    with pytest.raises(RuntimeError, match="audit: a block cannot begin inside of a function"):
        torch.compile(step, backend="aot_eager")(X)
    with mixprec.audit(model) as audit:
        torch.compile(model, backend="aot_eager")(X)
    assert audit.notes == [NOTE]
    assert stance() == "default"


FIRST = """
import sys
import torch
import mixprec

model, x = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.ReLU()), torch.ones(4, 6)
assert "torch._dynamo" not in sys.modules
with mixprec.audit(model) as audit:
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(x).sum().backward()
assert "ran uncompiled" in audit.notes[0]
assert sum(op.calls for op in audit.ops if op.flops) == 2
compiled(x)
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
"""


def test_a_model_that_is_compiled_in_the_block() -> None:
    """Where nothing has loaded torch._dynamo before it."""
    subprocess.run([sys.executable, "-c", FIRST], check=True, timeout=300)


# Functions that torch compiles in eager mode, too


def test_cond() -> None:
    """Which branch runs is known, and its parameters get their gradients."""
    torch.manual_seed(0)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 9, lambda x: x.clone(), lambda x: self.layer(x), (x,))

    model = Model(forward, layer=nn.Linear(6, 6))
    square(model(X)).backward()
    want = model.layer.weight.grad
    for run in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        with mixprec.audit(model, sqnr=True) as audit:
            square(run(X)).backward()
        assert_same_bits(model.layer.weight.grad, want)
        found = {(op.module, op.phase) for op in audit.ops if op.flops}
        assert found == {("layer", "forward"), ("layer", "backward")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_attention(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 8), torch.randn(1, 2, 16, 8)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16)
    with torch.no_grad(), autocast:
        want = flex_attention(*[layer(x)] * 3)
        with mixprec.audit(layer) as audit:
            out = torch.compile(flex_attention, backend="aot_eager")(*[layer(x)] * 3)
    assert out.dtype == dtype
    torch.testing.assert_close(out, want)
    assert sum(op.calls for op in audit.ops if op.op == "bmm") == 2


def test_other_functions_are_refused() -> None:
    from torch._higher_order_ops.map import map

    with (
        mixprec.audit(mlp()),
        pytest.raises(NotImplementedError, match="audit: torch runs map_impl only compiled"),
    ):
        map(lambda x, y: x @ y, X[None], X.t())
