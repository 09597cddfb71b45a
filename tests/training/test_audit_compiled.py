"""audit of compiled models: what their graphs say, against the same models in eager mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from independent import assert_same_bits
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import mixprec

X = torch.linspace(-1, 1, 24).view(4, 6)
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
# Inductor has removed a cast to FP32 with that of autocast back to bf16; it may fuse one.
LOST = {("casts", "autocast", "inductor"), ("a row", "autocast", "inductor")}
# Of a product: what has to be as in eager mode.
Row = tuple[Any, ...]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch._dynamo.utils.counters.clear()


def rows(audit: mixprec.Audit) -> Counter[Row]:
    found: Counter[Row] = Counter()
    for op in audit.ops:
        if op.kind != "reduction":
            # Names of compiled models begin with that of torch's wrapper.
            module = op.module and op.module.removeprefix("_orig_mod").removeprefix(".")
            row = module, op.kind, op.phase, op.precision, op.accumulation, op.decided, op.flops
            found[row] += op.calls
    return found


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind()
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, dim: int, saves: bool = True) -> None:
        super().__init__()
        self.norm, self.attention, self.saves = nn.LayerNorm(dim), Attention(dim), saves
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if self.saves else checkpoint(self.inner, x, use_reentrant=False)


class Transformer(nn.Module):
    """With a product of its own, of hidden states and the embedding."""

    def __init__(self, saves: bool = True) -> None:
        super().__init__()
        self.embed, self.dropout = nn.Embedding(11, 8), nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(8, saves) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight.t()


class Casts(nn.Module):
    """A product in FP32 by the program, one of the result of the other, one that autocast skips."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6).bfloat16(), nn.Linear(6, 6)
        self.w = nn.Parameter(torch.eye(6, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x.bfloat16()).relu()
        y = y.float() @ self.w.float()
        y = F.softmax(y.bfloat16(), -1, dtype=torch.float32) @ y.t() @ y
        with torch.autocast("cpu", torch.bfloat16):
            y = self.b(y)
        return y.float() @ y.float().t()


class Broken(nn.Module):
    """Compiled in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.w = nn.Linear(6, 6), nn.Linear(6, 6), nn.Parameter(torch.eye(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x).relu()
        torch._dynamo.graph_break()
        x = x.bfloat16().float() @ self.w.bfloat16().float()
        return self.b(x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 3 * 5, 2))


TOKENS = torch.arange(10).view(2, 5)
MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "mlp": (mlp, X),
    "conv": (conv, X[None, None]),
    "transformer": (Transformer, TOKENS),
    "checkpoint": (lambda: Transformer(saves=False), TOKENS),
    "casts": (Casts, X),
    "a row": (mlp, X[:1]),  # Inductor makes elementwise ops of its products
    "a column": (lambda: nn.Linear(6, 1), X),
    "graph break": (Broken, X),
}
SETTINGS: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda model: nullcontext(),
    "autocast": lambda model: torch.autocast("cpu", torch.bfloat16),
    "bf16": lambda model: mixprec.convert(model, "bf16") and nullcontext(),
    "fp8": lambda model: mixprec.convert(model, "fp8") and nullcontext(),
    "mxfp8": lambda model: mixprec.convert(model, "mxfp8") and nullcontext(),
    "fp16": lambda model: mixprec.convert(model, "fp16") and nullcontext(),
    "fp8 in autocast": lambda model: (
        mixprec.convert(model, "fp8") and torch.autocast("cpu", torch.bfloat16)
    ),
    "region": lambda model: mixprec.convert(model, "bf16") and mixprec.autocast("fp8"),
}


def train(
    model: nn.Module, function: Callable[..., Any], x: torch.Tensor, region: Any
) -> list[torch.Tensor]:
    """The output and the gradients of a step."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    with region:
        out = function(x)
        out.float().square().mean().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def made(name: str, setting: str) -> tuple[nn.Module, torch.Tensor, Any]:
    torch.manual_seed(0)
    make, x = MODELS[name]
    model = make()
    return model, x, SETTINGS[setting](model)


def compare(name: str, setting: str, backend: str, times: int = 1) -> mixprec.Audit:
    """Of the compiled model; its products are those of eager mode, its results those without."""
    model, x, region = made(name, setting)
    with mixprec.audit(model) as eager:
        for _ in range(times):
            train(model, model, x, region)
    model, x, region = made(name, setting)
    compiled = torch.compile(model, backend=backend, fullgraph=name != "graph break")
    want = train(model, compiled, x, region)
    with mixprec.audit(model) as audit:
        for _ in range(times):
            got = train(model, compiled, x, region)
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)
    found, known = rows(audit), rows(eager)
    if name == "checkpoint":  # compiled code computes the last op of one again, too
        assert known <= found
        found = Counter({row: n for row, n in found.items() if row in known})
    unknown = any(row[5] == "unknown" for row in found)
    assert unknown == ((name, setting, backend) in LOST)
    if unknown:
        found, known = (Counter([r[:3] for r in x.elements()]) for x in (found, known))
    assert found == known
    assert any("was compiled again for the block" in note for note in audit.notes)
    return audit


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("setting", ["plain", "autocast"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_as_in_eager_mode(name: str, setting: str, backend: str) -> None:
    compare(name, setting, backend)


@pytest.mark.parametrize("name", ["mlp", "transformer", "conv"])
@pytest.mark.parametrize("setting", ["bf16", "fp8", "mxfp8", "fp16", "fp8 in autocast", "region"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_converted_models(name: str, setting: str, backend: str) -> None:
    compare(name, setting, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fused_attention(backend: str) -> None:
    """Its casts are those of the recipe, not of the program."""
    model = mixprec.convert(Attention(32), "fp8", fuse=True)
    x = torch.randn(2, 8, 32)
    compiled = torch.compile(model, backend=backend)
    square(compiled(x)).backward()
    found = [mixprec.audit(m, x, loss=square) for m in (model, compiled)]
    eager, audit = ([op for op in a.ops if op.kind == "attention"] for a in found)
    assert [(op.phase, op.precision, op.decided) for op in audit] == [
        (op.phase, op.precision, op.decided) for op in eager
    ]
    assert found[1].findings == found[0].findings == []


@pytest.mark.slow
@pytest.mark.parametrize("way", ["bf16", "autocast"])
def test_products_that_inductor_makes_elementwise(way: str) -> None:
    """In FP32, of the operands that the product had."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1)), torch.randn(12, 16)
    if way == "bf16":
        model, x = model.bfloat16(), x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        eager, audit = (mixprec.audit(m, x, loss=square) for m in (model, torch.compile(model)))
    assert any(op.op == "mul" for op in audit.ops)
    assert (audit.findings, audit.flops) == (eager.findings, eager.flops)


class Local(nn.Module):
    """Dynamo makes code of it that has no hash."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def twice(t: torch.Tensor) -> torch.Tensor:
            return t * 2

        y = self.a(x)
        torch._dynamo.graph_break()
        return self.b(twice(y))


def test_code_without_a_hash() -> None:
    model = Local()
    compiled = torch.compile(model, backend="aot_eager")
    with mixprec.audit(model) as audit:
        square(compiled(X)).backward()
    assert sum(rows(audit).values()) == 5


def test_a_region_that_no_product_uses() -> None:
    model = mlp()
    compiled = torch.compile(model, backend="aot_eager")
    with mixprec.audit(model) as audit:
        with mixprec.autocast("fp8"):
            y = compiled(X)
        square(y).backward()
    assert "mixprec.autocast fp8 is on, and no product uses it" in audit.findings[0]


def test_gradients_inside_of_compiled_code() -> None:
    model = mlp()
    params = dict(model.named_parameters())

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return square(torch.func.functional_call(model, params, (x,)))

    compiled = torch.compile(torch.func.grad(loss), backend="aot_eager")
    with mixprec.audit(model) as audit:
        compiled(params, X)
    assert any("gradients of its own, as torch.func.grad does" in note for note in audit.notes)


def test_each_run_counts() -> None:
    compare("graph break", "autocast", "aot_eager", times=2)


# What runs


class Counts(nn.Module):
    """Counts how often its code runs as Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 6), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.calls += 1
        return self.layer(x).relu()


def test_compiled_code_runs() -> None:
    """And the Python code does not, nor what was compiled before the block."""
    model = Counts()
    compiled = torch.compile(model, backend="aot_eager")
    graphs = torch._dynamo.utils.counters["stats"]
    square(compiled(X)).backward()
    assert graphs["unique_graphs"] == 1
    with mixprec.audit(model) as audit:
        for _ in range(3):
            square(compiled(X)).backward()
        assert graphs["unique_graphs"] == 2
    assert model.calls == 0
    assert sum(rows(audit).values()) == 6  # X has no gradient
    assert "compiled again for the block, and ran 6x" in audit.notes[0]
    square(compiled(X)).backward()
    assert graphs["unique_graphs"] == 2


@pytest.mark.slow
def test_kernels_of_inductor_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.output_code import CompiledFxGraph

    calls, run = [], CompiledFxGraph.__call__

    def count(self: Any, inputs: Any) -> Any:
        calls.append(self)
        return run(self, inputs)

    monkeypatch.setattr(CompiledFxGraph, "__call__", count)
    model = Counts()
    compiled = torch.compile(model)
    square(compiled(X)).backward()
    before = len(calls)
    with mixprec.audit(model) as audit:
        square(compiled(X)).backward()
        square(compiled(X)).backward()
    assert len(calls) - before == 4
    assert model.calls == 0
    assert sum(rows(audit).values()) == 4


def square(out: torch.Tensor) -> torch.Tensor:
    return out.float().square().mean()


def test_a_graph_that_does_not_run_does_not_count() -> None:
    model = mlp()
    compiled = torch.compile(model, backend="aot_eager")
    with mixprec.audit(model) as audit:
        out = [compiled(X) for _ in range(3)]
        square(out[0]).backward()
        with pytest.raises(RuntimeError, match="fake tensor"):
            compiled(X.t())
    phases = Counter(row[2] for row in rows(audit).elements())
    assert phases == {"forward": 6, "backward": 3}


def test_nothing_is_left() -> None:
    import gc
    import weakref

    from torch._dynamo.backends import common

    def state() -> list[Any]:
        return [
            torch._dynamo.eval_frame._callback_from_stance,
            common.aot_module_simplified,
            torch.overrides.has_torch_function,
            torch._dynamo.config.shallow_copy_dict(),
            torch._functorch.config.shallow_copy_dict(),
            torch._dynamo.eval_frame.get_eval_frame_isolate_recompiles_id(),
            torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
            torch._dynamo.eval_frame._debug_get_cache_entry_list(Counts.forward.__code__)[:1],
        ]

    model = Counts()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(X)
    before = state()
    audit = mixprec.audit(model)
    with audit:
        square(compiled(X)).backward()
        recorder = weakref.ref(audit._recorder)
    after = state()
    assert [a is b or a == b for a, b in zip(after[:7], before[:7], strict=True)] == [True] * 7
    assert after[7][0].guard_manager is before[7][0].guard_manager
    gc.collect()
    assert recorder() is None


def test_passes_that_begin_or_end_outside_of_the_block() -> None:
    model = mlp()
    compiled = torch.compile(model, backend="aot_eager")
    out = compiled(X)
    with mixprec.audit(model) as audit:
        square(out).backward()
        later = compiled(X)
    assert any("compiled before the block ran a backward pass" in note for note in audit.notes)
    found = {(row[2], row[5]) for row in rows(audit)}
    assert found == {("backward", "unknown"), ("forward", "as made")}
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    square(later).backward()
    for p, grad in zip(model.parameters(), want, strict=True):
        assert_same_bits(p.grad, grad)


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_without_gradients(grad: Any) -> None:
    model = Transformer().eval()
    with grad(), mixprec.audit(model) as eager:
        want = model(TOKENS)
    compiled = torch.compile(model, backend="aot_eager")
    with grad(), mixprec.audit(model) as audit:
        assert_same_bits(compiled(TOKENS), want)
    assert sum(audit.flops.values()) == sum(eager.flops.values())
    assert {row[0] for row in rows(audit)} == {row[0] for row in rows(eager)}


# How models are compiled


def test_parts_share_their_code() -> None:
    """Of a model whose blocks are compiled: Dynamo compiles the first one's code for all."""
    torch.manual_seed(0)
    model = Transformer()
    with mixprec.audit(model) as eager:
        train(model, model, TOKENS, nullcontext())
    for block in model.blocks:
        block.compile(backend="aot_eager")
    graphs = torch._dynamo.utils.counters["stats"]
    with mixprec.audit(model) as audit:
        train(model, model, TOKENS, nullcontext())
    assert graphs["unique_graphs"] == 1
    assert rows(audit) == rows(eager)


class Squared(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x.mT @ x


class Around(nn.Module):
    """Three blocks, each with a layer that all have, a layer, and a product without parameters."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(6, 6)
        parts = (nn.Sequential(shared, nn.Linear(6, 6), Squared()) for _ in range(3))
        self.blocks = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


@pytest.mark.parametrize("audited", ["", "blocks.1"])
@pytest.mark.parametrize("wraps", [False, True])
def test_modules_of_code_that_others_share(audited: str, wraps: bool) -> None:
    """Also where it was traced with modules that are not of the audited model."""
    torch.manual_seed(0)
    model = Around()
    with mixprec.audit(model.get_submodule(audited)) as eager:
        square(model(X)).backward()
    for i, block in enumerate(model.blocks):
        if wraps:
            model.blocks[i] = torch.compile(block, backend="aot_eager")
        else:
            block.compile(backend="aot_eager")
    with mixprec.audit(model.get_submodule(audited)) as audit:
        square(model(X)).backward()
    found = Counter((str(r[0]).replace("._orig_mod", ""), *r[1:]) for r in rows(audit).elements())
    assert found == Counter((str(r[0]), *r[1:]) for r in rows(eager).elements())


def test_a_function_of_two_modules() -> None:
    """Which runs others than those that it was traced with."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def function(a: nn.Module, b: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return b(a(x).relu())

    def step(run: Any) -> None:
        for a, b in ((0, 1), (0, 2), (3, 2)):
            square(run(model[a], model[b], X)).backward()

    with mixprec.audit(model) as eager:
        step(function)
    with mixprec.audit(model) as audit:
        step(torch.compile(function, backend="aot_eager"))
    assert rows(audit) == rows(eager)


def test_sizes_of_the_block_are_not_those_of_the_program() -> None:
    frames = torch._dynamo.utils.counters["frames"]
    for is_audited in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(mlp(), backend="aot_eager")
        if is_audited:
            mixprec.audit(compiled, X[:3], loss=square)
        compiled(X)
        before = frames["total"]
        compiled(X[:2])
        assert frames["total"] == before + 1  # the code for X is of that size


def test_functions_and_code_around() -> None:
    """forward and a whole step, compiled; the eager part knows what the compiled one has cast."""

    def step(model: nn.Module, forward: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            out = forward(X)
        square(out @ out.t()).backward()

    for compile_step in (False, True):
        torch._dynamo.reset()
        model = mlp()
        with mixprec.audit(model) as eager:
            step(model, model.forward)
        forward = (
            model.forward if compile_step else torch.compile(model.forward, backend=BACKENDS[0])
        )
        run = torch.compile(step, backend="aot_eager") if compile_step else step
        with mixprec.audit(model) as audit:
            run(model, forward)
        assert rows(audit) == rows(eager)
        (line,) = {op.line for op in audit.ops if op.module is None and op.flops}
        assert line.startswith(__file__)


def test_dynamic_shapes() -> None:
    model = mlp()
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    with mixprec.audit(model) as eager:
        for x in (X, X[:3], X[:2]):
            square(model(x)).backward()
    graphs = torch._dynamo.utils.counters["stats"]
    with mixprec.audit(model) as audit:
        for x in (X, X[:3], X[:2]):
            square(compiled(x)).backward()
    assert graphs["unique_graphs"] == 1
    assert rows(audit) == rows(eager)


def test_a_backward_pass_inside_of_an_optimizer_step() -> None:
    """And a compiled function that a checkpoint of the program computes again."""
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = mlp()
        run = torch.compile(model, backend="aot_eager") if compiles else model
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure(run: Any = run) -> torch.Tensor:
            loss = square(run(X))
            loss.backward()
            return loss

        with mixprec.audit(model, optimizer=sgd) as audit:
            sgd.step(closure)
            square(checkpoint(run, X, use_reentrant=False)).backward()
        # Eager mode does not know the modules of a backward pass in there.
        found.append(Counter([row[1:5] + row[6:] for row in rows(audit).elements()]))
    assert found[0] <= found[1]  # eager code stops after what the backward pass needs
    assert {row[1] for row in found[1] - found[0]} == {"recomputation"}


def test_the_short_form() -> None:
    model = mixprec.convert(mlp(), "fp8", overrides={"2": "bf16"})
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    audit = mixprec.audit(compiled, X, loss=square)
    assert rows(audit) == rows(mixprec.audit(model, X, loss=square))
    assert {op.decided for op in audit.ops if op.flops} == {"recipe fp8", "override bf16"}


def test_a_region_around_the_block() -> None:
    model = mixprec.convert(Transformer(), "bf16").eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with mixprec.autocast("fp8"):
        audit = mixprec.audit(compiled, TOKENS, loss=square)
        assert rows(audit) == rows(mixprec.audit(model, TOKENS, loss=square))
    assert "mixprec.autocast fp8" in audit.decided


def test_blocks_nest() -> None:
    model = mlp()
    compiled = torch.compile(model, backend="aot_eager")
    with mixprec.audit(model) as outer, mixprec.audit(model) as inner:
        square(compiled(X)).backward()
    assert rows(outer) == rows(inner)
    assert sum(rows(inner).values()) == 5


# What is not seen


def test_a_region_inside_of_compiled_code() -> None:
    """The graph has the formats of its products, and not who decided them."""

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with mixprec.autocast("fp8"):
                return self.layer(x)

    model = mixprec.convert(Inside(), "bf16")
    audit = mixprec.audit(torch.compile(model, backend="aot_eager"), X, loss=square)
    found = {(op.precision, op.decided) for op in audit.ops if op.flops}
    assert found == {("fp8", "unknown")}


def test_what_runs_uncompiled() -> None:
    model = Counts()
    for backend, name in (("eager", "eager"), (lambda graph, inputs: graph, "<lambda>")):
        for fullgraph in (False, True):
            torch._dynamo.reset()
            compiled = torch.compile(model, fullgraph=fullgraph, backend=backend)
            compiled(X)
            before = model.calls
            with mixprec.audit(model) as audit:
                square(compiled(X)).backward()
            assert model.calls == before + (not fullgraph)
            how = "as aot_eager runs it" if fullgraph else "uncompiled"
            said = f"The graphs of backend {name} are not read: its code ran {how}."
            assert said in audit.notes
            assert sum(rows(audit).values()) == 2
            assert {row[0] for row in rows(audit)} == {"layer"}
    compiled = torch.compile(model, backend="aot_eager")
    with FlopCounterMode(display=False), mixprec.audit(model) as audit:
        square(compiled(X)).backward()
    assert "ran without that" in audit.notes[0]
    assert {row[0] for row in rows(audit)} == {"layer"}


def test_functions_whose_ops_are_not_read() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x: self.layer(x), lambda x: x.clone(), (x,))

    model = Either()
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad(), mixprec.audit(model) as audit:
        compiled(X)
    assert any("What cond runs in compiled code is not read" in note for note in audit.notes)


def test_graphs_that_were_not_seen() -> None:
    """Of a backend that compiles in a way of its own, and of one with the name of another."""

    class Own(torch._TorchCompileInductorWrapper):
        def __call__(self, graph: Any, inputs: Any) -> Any:
            return graph.forward

    def inductor(graph: Any, inputs: Any) -> Any:
        return graph.forward

    model = mlp()
    own: Any = Own(None, None, None)
    audit = mixprec.audit(torch.compile(model, backend=own), X, loss=square)
    assert any("1 compiled graphs were not seen" in note for note in audit.notes)
    audit = mixprec.audit(torch.compile(model, backend=inductor), X, loss=square)
    assert any("backend inductor are not read" in note for note in audit.notes)


def test_sizes_that_depend_on_values() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x[x[:, 0] > 0])

    model = Chosen()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        audit = mixprec.audit(compiled, X, loss=square)
    assert [op.calls for op in audit.ops if op.kind == "product"] == [1]
    assert "Sizes that depend on values are not in compiled code: they count as 0." in audit.notes


def test_settings_of_dynamo() -> None:
    """That would run what is there already, or that have other graphs."""
    model = Counts()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(X)
    for stance in ("fail_on_recompile", "eager_on_recompile", "eager_then_compile"):
        with torch.compiler.set_stance(stance), mixprec.audit(model) as audit:
            square(compiled(X)).backward()
        assert sum(rows(audit).values()) == 2
        assert "compiled again" in audit.notes[0]
    with torch.compiler.set_stance("force_eager"), mixprec.audit(model) as audit:
        square(compiled(X)).backward()
    assert sum(rows(audit).values()) == 2
    assert model.calls == 1
    with torch._dynamo.config.patch(compiled_autograd=True), mixprec.audit(compiled) as audit:
        square(compiled(X)).backward()
    assert "ran without that" in audit.notes[0]
    assert sum(rows(audit).values()) == 2
    assert model.calls == 2
