"""audit: owners, formats, FLOPs and what set dtypes, against what is known of small models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from independent import assert_same_bits
from models import Model
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import mixprec
from mixprec.diagnostics.audit import render
from mixprec.diagnostics.audit.records import accumulation
from mixprec.diagnostics.writers import prefixed

X = torch.linspace(-1, 1, 24).view(4, 6)
IMAGE = torch.linspace(-1, 1, 2 * 3 * 9 * 8).view(2, 3, 9, 8)


def square(out: Any) -> torch.Tensor:
    return (out[0] if isinstance(out, tuple) else out).float().square().mean()


def products(audit: mixprec.Audit) -> set[tuple[Any, ...]]:
    return {
        (op.module, op.phase, op.precision, op.decided)
        for op in audit.ops
        if op.kind != "reduction"
    }


def mlp(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16, **options), nn.GELU(), nn.Linear(16, 6, **options))


class Blocks(nn.Module):
    """A checkpointed block, a layer that runs twice, a Function, a product of its own."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block, self.twice, self.head = mlp(), nn.Linear(6, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(6, 6))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.block, x + self.scale[0], use_reentrant=self.reentrant)
        x = Product.apply(self.twice(self.twice(x)) @ self.scale, self.scale)
        return self.head(x)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


# Owners


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", [None, "fp8", "bf16"])
def test_owners(reentrant: bool, recipe: str | None) -> None:
    model = Blocks(reentrant)
    if recipe is not None:
        mixprec.convert(model, recipe)
    model.twice.register_forward_hook(lambda *_: None)
    audit = mixprec.audit(model, X, loss=square)
    calls: dict[tuple[str | None, str], int] = {}
    for op in audit.ops:
        if op.kind == "product" and op.shapes[0][0] != 1:  # the gradient of a bias is a sum
            calls[op.module, op.phase] = calls.get((op.module, op.phase), 0) + op.calls
    for name in ("block.0", "block.2", "head"):
        assert calls.pop((name, "forward")) == 1
        assert calls.pop((name, "backward")) == 2
    assert calls.pop(("twice", "forward")) == 2
    assert calls.pop(("twice", "backward")) == 4
    assert calls.pop(("", "forward")) == 2
    assert calls.pop(("", "backward")) == 4
    again = {key: n for key, n in calls.items() if key[1] == "recomputation"}
    assert again.keys() >= {("block.0", "recomputation")}
    assert again.keys() <= {(f"block.{i}", "recomputation") for i in (0, 2)}
    assert calls == again


def test_code_outside_of_the_model_and_its_line() -> None:
    model = mlp()
    with mixprec.audit(model) as audit:
        loss = (model(X) @ X.t()).sum()
        loss.backward()
    found = {(op.module, op.phase) for op in audit.ops if op.flops and op.module is None}
    assert found == {(None, "forward"), (None, "backward")}
    (line,) = {op.line for op in audit.ops if op.module is None and op.flops}
    number = test_code_outside_of_the_model_and_its_line.__code__.co_firstlineno + 3
    assert line == f"{__file__}:{number}"
    assert {op.where for op in audit.ops if op.module is None} >= {line}


# FLOPs


COUNTED: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]] = {
    "mlp": (mlp, (X,)),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Conv2d(4, 5, 2)),
        (IMAGE,),
    ),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), (IMAGE,)),
    "dilated": (lambda: nn.Conv1d(3, 4, 3, dilation=2), (IMAGE[:, :, 0],)),
    "gru": (lambda: nn.GRU(6, 8, bidirectional=True), (X[None],)),
    "lstm cell": (lambda: nn.LSTMCell(6, 8), (X,)),
    "attention": (lambda: nn.MultiheadAttention(6, 2, batch_first=True), (X[None],) * 3),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, dropout=0.0),
        (X[None],),
    ),
    "checkpoint": (lambda: Blocks(False), (X,)),
}


@pytest.mark.parametrize("name", COUNTED)
def test_as_many_as_torchs_counter(name: str) -> None:
    """And as many in a forward pass of inference, where other ops run."""
    make, batch = COUNTED[name]
    model = make()
    with FlopCounterMode(display=False) as counter:
        square(model(*batch)).backward()
    audit = mixprec.audit(model, *batch, loss=square)
    of_attention = sum(op.flops for op in audit.ops if "for_cpu" in op.op)  # torch counts none
    assert sum(audit.flops.values()) - of_attention == counter.get_total_flops() > 0
    forward = sum(op.flops for op in audit.ops if op.phase == "forward")
    model.eval()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, mixprec.audit(model) as audit:
            model(*batch)
        assert sum(audit.flops.values()) == forward


def test_of_ops_that_torchs_counter_lacks() -> None:
    """An LSTM layer of oneDNN, grouped convolutions, attention, Bilinear, dot and mv."""
    lstm = nn.LSTM(6, 8, num_layers=2)
    weights = sum(p.numel() for name, p in lstm.named_parameters() if name.startswith("weight"))
    assert sum(mixprec.audit(lstm, X[None], loss=square).flops.values()) == 3 * 2 * 4 * weights
    conv = nn.Conv2d(4, 8, 3, groups=2, bias=False)
    x = torch.randn(2, 4, 7, 6, requires_grad=True)
    audit = mixprec.audit(conv, x, loss=square)
    assert sum(audit.flops.values()) == 3 * 2 * 2 * 5 * 4 * conv.weight.numel()
    q, k = torch.randn(2, 3, 5, 8, requires_grad=True), torch.randn(2, 3, 7, 8, requires_grad=True)
    v = torch.randn(2, 3, 7, 8, requires_grad=True)
    with mixprec.audit(conv) as audit:
        F.scaled_dot_product_attention(q, k, v).sum().backward()
    assert sum(audit.flops.values()) == (2 + 5) * 2 * 2 * 3 * 5 * 7 * 8
    with mixprec.audit(conv) as audit, torch.no_grad():
        X[0].dot(X[1]), X.mv(X[0]), nn.Bilinear(6, 6, 2, bias=False)(X, X)
    assert sum(audit.flops.values()) == 2 * 6 + 2 * 24 + 3 * 4 * 6 * 6 * 2
    assert [prefixed(n) for n in (0, 999, 1000, 999_600, 12_345_678)] == [
        "", "999 ", "1 k", "1 M", "12.3 M",
    ]  # fmt: skip


# Who decided


def cast_in_the_model() -> nn.Module:
    w = nn.Parameter(torch.ones(6, 6, dtype=torch.bfloat16))
    return Model(lambda self, x: x.float() @ self.w.float(), w=w)


def test_who_decided() -> None:
    every = ("forward", "backward")

    def of(model: nn.Module, x: torch.Tensor = X, **region: Any) -> set[tuple[Any, ...]]:
        with torch.autocast("cpu", **region) if region else torch.enable_grad():
            return {row[1:] for row in products(mixprec.audit(model, x, loss=square))}

    assert of(mlp()) == {(phase, "fp32", "tensor dtype") for phase in every}
    low = {"dtype": torch.bfloat16}
    assert of(mlp(), **low) == {(phase, "bf16", "torch.autocast") for phase in every}
    assert of(mlp(), enabled=False) == {(phase, "fp32", "tensor dtype") for phase in every}
    assert of(mlp().bfloat16(), X.bfloat16()) == {
        (phase, "bf16", "tensor dtype") for phase in every
    }
    assert of(cast_in_the_model(), X.bfloat16()) == {(phase, "fp32", "cast") for phase in every}
    for recipe in ("bf16", "fp8", "mxfp4"):
        model = mixprec.convert(nn.Linear(32, 32, bias=False), recipe)
        found = of(model, torch.randn(32, 32))
        assert found == {(phase, recipe, f"recipe {recipe}") for phase in every}
    model = mixprec.convert(mlp(), "fp8", overrides={"2": "bf16"})
    decided = {name: who for name, _, _, who in products(mixprec.audit(model, X, loss=square))}
    assert decided == {"0": "recipe fp8", "2": "override bf16"}
    with mixprec.autocast("fp8"):
        found = of(mixprec.convert(mlp(), "bf16"))
    assert {row[2] for row in found} == {"mixprec.autocast fp8"}


def test_torchs_attention_without_a_kernel() -> None:
    """Its dropout on the CPU: autocast casts to bf16, and torch's function back to FP32."""
    model = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    x = torch.randn(2, 3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        audit = mixprec.audit(model, x, x, x, None, False, loss=square)
    found = {(op.op, op.precision, op.decided) for op in audit.ops if op.phase == "forward"}
    assert {row for row in found if row[0] in ("bmm", "baddbmm")} == {("bmm", "fp32", "torch")}
    assert audit.findings == []


# The run itself


def test_accumulation(request: pytest.FixtureRequest) -> None:
    """As torch's settings for GPUs have it; ours are always FP32."""
    matmul = torch.backends.cuda.matmul
    for place, name, value in (
        (matmul, "allow_tf32", True),
        (torch.backends.cudnn, "allow_tf32", False),
        (matmul, "allow_bf16_reduced_precision_reduction", True),
        (matmul, "allow_fp16_reduced_precision_reduction", False),
    ):
        request.addfinalizer(partial(setattr, place, name, getattr(place, name)))
        setattr(place, name, value)
    for kind, dtype, device, library, want in (
        ("product", torch.float32, "cuda", "aten", "float32, of tf32"),
        ("product", torch.float32, "cuda", "mixprec", "float32"),
        ("product", torch.float32, "cpu", "aten", "float32"),
        ("convolution", torch.float32, "cuda", "aten", "float32"),
        ("product", torch.bfloat16, "cuda", "aten", "float32, where K is split bfloat16"),
        ("product", torch.float16, "cuda", "aten", "float32"),
        ("product", torch.bfloat16, "cuda", "mixprec", "float32"),
        ("product", torch.float64, "cpu", "aten", "float64"),
        ("product", torch.int8, "cpu", "aten", "int32"),
    ):
        assert accumulation(kind, dtype, device, library) == want


def test_the_text_and_the_file(tmp_path: Path) -> None:
    model = mixprec.convert(mlp(), "fp8", overrides={"2": None})
    audit = mixprec.audit(model, {"input": X}, loss=square)
    text = str(audit)
    assert text.splitlines()[0] == f"- {audit.findings[0]}"
    assert "60.0% fp32, 40.0% fp8. Set by: 60.0% tensor dtype, 40.0% recipe fp8" in text
    rows = [line.split() for line in audit.table().splitlines()[2:]]
    assert [row[0] for row in rows] == ["2", "0"]
    assert audit.table(most=1).endswith("and 1 more")
    audit.save(tmp_path / "audit.json")
    saved = json.loads((tmp_path / "audit.json").read_text())
    assert saved["flops"] == audit.flops
    assert sum(op["flops"] for op in saved["ops"]) == sum(audit.flops.values())
    with mixprec.audit(model) as nothing:
        pass
    assert nothing.summary() == "no products"


def silu_and_encoder() -> list[tuple[nn.Module, tuple[torch.Tensor, ...], Any]]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    x, pad = torch.randn(2, 3, 8), torch.tensor([[False, False, True], [False, True, True]])
    encoder = nn.TransformerEncoder(layer, 2).eval()
    silu = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Softplus(), nn.Mish()).bfloat16()
    return [
        (silu, (x.bfloat16(),), torch.enable_grad()),
        (encoder, (x, None, pad), torch.no_grad()),
        (nn.MultiheadAttention(8, 2, batch_first=True).eval(), (x, x, x), torch.inference_mode()),
        (nn.GRU(8, 8), (x,), torch.enable_grad()),
        (encoder, (x,), in_autocast()),
        (nn.MultiheadAttention(8, 2, batch_first=True).eval(), (x, x, x), in_autocast()),
        (nn.Bilinear(8, 8, 8), (x, x), in_autocast()),
        (sparse(), (x[0],), in_autocast()),
    ]


@contextmanager
def in_autocast() -> Iterator[None]:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        yield


@pytest.mark.parametrize("i", range(8))
def test_the_kernels_are_those_without_audit(i: int) -> None:
    """Of ops that also have parts, of modules with a fast path, of kernels that call others."""
    results = []
    for audited in (False, True):
        torch.manual_seed(0)
        model, batch, mode = silu_and_encoder()[i]
        with mode, mixprec.audit(model) if audited else torch.autograd.set_detect_anomaly(False):
            out = model(*batch)
            out = out[0] if isinstance(out, tuple) else out
            results.append([out])
            if torch.is_grad_enabled():
                results[-1] += torch.autograd.grad(out.float().sum(), list(model.parameters()))
    for got, want in zip(*results, strict=True):
        assert_same_bits(got, want)
        assert got.stride() == want.stride()
        assert got.dtype == want.dtype
    with in_autocast(), mixprec.audit(model) as audit:
        model(*batch[: 1 if i == 1 else 3])  # nested tensors and autocast raise in torch
    assert {op.precision for op in audit.ops if op.flops and op.kind != "rnn"} <= {"bf16"}
    assert torch.overrides.has_torch_function.__module__ != "mixprec.diagnostics.audit.modes"


def test_inference_mode_with_autocast_is_refused() -> None:
    with (
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
        mixprec.audit(nn.Identity()),
        pytest.raises(RuntimeError, match=r"use torch.no_grad in place of inference_mode"),
    ):
        torch.einsum("ij,jk->ik", X, X.t())


def test_how_often_a_gradient_is_summed() -> None:
    """Not one that has been zeroed, and by step."""
    model = mlp(bias=False).bfloat16()
    for to_none, times in ((False, 1), (True, 1), (True, 4), (False, 4)):
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        sgd.zero_grad()
        with mixprec.audit(model, optimizer=sgd) as audit:
            for _ in range(3):
                for _ in range(times):
                    square(model(X.bfloat16())).backward()
                sgd.step()
                sgd.zero_grad(set_to_none=to_none)
        found = [line for line in audit.findings if "summed" in line]
        assert len(found) == (times > 1), (to_none, times, found)
        assert all("over 4 backward passes" in line for line in found)


def sparse() -> nn.Module:
    w = nn.Parameter(torch.eye(3).to_sparse())
    return Model(lambda self, x: torch.sparse.mm(self.w, x), w=w)


def test_forward_called_by_the_program_and_second_derivatives() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.layer.forward(x)
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return g.square().sum()

    audit = mixprec.audit(Model(forward, layer=nn.Linear(6, 6)), X.clone().requires_grad_())
    assert {op.module for op in audit.ops if op.flops} == {"layer"}


def test_nested_tensors() -> None:
    """Of either layout; only rows that are there count."""
    parts = [torch.randn(3, 6), torch.randn(2, 6)]
    for layout in (torch.strided, torch.jagged):
        model, x = mlp(), torch.nested.nested_tensor(parts, layout=layout)
        with mixprec.audit(model) as audit:
            model(x)
        assert sum(audit.flops.values()) == 2 * 5 * 6 * 16 * 2
        assert {op.module for op in audit.ops if op.flops} == {"0", "2"}
        assert audit.table()


def test_inputs_with_gradients_losses_without_and_notes() -> None:
    model, x, state = mlp(), X.clone().requires_grad_(), torch.get_rng_state()
    x.grad = torch.ones_like(x)
    mixprec.audit(model.append(nn.BatchNorm1d(6)), x, loss=square)
    assert torch.equal(x.grad, torch.ones_like(x))
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(model[-1].running_mean, torch.zeros(6))
    assert torch.equal(state, torch.get_rng_state())
    with torch.no_grad():
        audit = mixprec.audit(mlp(), X, loss=square)
    assert audit.notes == ["There was no backward pass: the loss needs no gradient."]
    assert mixprec.audit(mlp(), X * torch.inf, loss=square).findings[0] == "the loss is nan"
    for pool, said in ((nn.MaxPool1d(2), True), (nn.MaxPool2d(2), False)):
        audit = mixprec.audit(nn.Sequential(pool, nn.Linear(3, 2)), X[None], loss=square)
        assert any("max_pool1d" in note for note in audit.notes) == said


def test_a_compiled_model_says_so() -> None:
    model = mlp()
    scripted = mixprec.audit(torch.jit.script(model), X, loss=square)
    assert "TorchScript" in scripted.notes[0]
    assert sum(scripted.flops.values()) > 0


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="audit: the loss must be one number, got shape"):
        mixprec.audit(mlp(), X)
    with pytest.raises(TypeError, match="give optimizer= and scaler= by name"):
        mixprec.audit(mlp(), torch.optim.SGD([nn.Parameter(X.clone())]))
    for arguments, options, message in (
        ((mlp(), X), {"scaler": mixprec.GradScaler()}, "optimizer= and scaler= are for a block"),
        ((mlp(),), {"loss": square}, "loss= is for a batch"),
        ((square, X), {}, "model must be a torch.nn.Module, got function"),
    ):
        with pytest.raises(TypeError, match=message):
            mixprec.audit(*arguments, **options)
    model = mlp()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        mixprec.audit(model, X.t(), loss=square)
    audit = mixprec.audit(model, X, loss=square)  # the modes are gone again
    with pytest.raises(RuntimeError, match="cannot be entered again"), audit:
        pass


def test_mxfp8_by_its_name_with_eight_bits_and_no_recipe_without_a_name() -> None:
    """Beside FP8 no layer has more bits; sums for biases and norms are of the recipe, too."""
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)).bfloat16()
    mixprec.convert(model, "mxfp8", overrides={"0": "fp8"}, fuse=True)
    with mixprec.audit(model) as audit:
        model(torch.randn(64, 32).bfloat16()).float().square().mean().backward()
    assert audit.findings == []
    assert {*audit.flops} == {"mxfp8", "fp8", "bf16"}
    assert {*audit.decided} == {"recipe mxfp8", "override fp8"}


def test_the_page(tmp_path: Path) -> None:
    """Each op is a row, and modules are where they are in the model; names are escaped."""
    model = nn.ModuleDict({"a<b": mlp()})
    model.forward = model["a<b"].forward
    with mixprec.audit(model) as audit:
        square(model["a<b"](X)).backward()
        (X @ X.t()).sum()
    audit.save_html(tmp_path / "page.html", "Of <this>")
    text = (tmp_path / "page.html").read_text()
    assert "<title>Of &lt;this&gt;</title>" in text
    assert "a<b" not in text
    shown = re.findall(r"<tr><td>([^<]*)</td><td>(\w+)</td>", text)
    assert len(shown) == len(audit.ops)
    assert text.index("a&lt;b <svg") < text.index("code outside of the model <svg")
    root = render.tree(audit.ops, model)
    assert root.children["model"].children["a<b"].total == sum(
        op.flops for op in audit.ops if op.module is not None
    )
    assert "http" not in text.replace("http://www.w3.org", "")
    assert not re.search(r"<(link|iframe|img|object|embed)|\b(src|href|data)=|url\(|@import", text)
    assert not re.search(r"fetch\(|XMLHttpRequest|WebSocket|EventSource|import\(", text)
    assert [render.color(name) for name in ("fp32", "mxfp8", "mxfp4", "bf16 x fp8")] == [
        "#d94801", "#238b45", "#74c476", "#969696",
    ]  # fmt: skip
    red, orange, blue = map(render.loss_color, (17.0, 20.0, 24.0))
    assert (red, orange, blue) == ("#b2182b", "#ef8a62", "#67a9cf")
