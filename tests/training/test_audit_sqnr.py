"""audit with sqnr=True: against products by hand, and against whole models in FP32."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from independent import assert_same_bits, assert_same_lists
from models import Model
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec.diagnostics.audit.shadow import Shadow
from mixprec.testing import sqnr

Lost = Any
TOKENS = torch.arange(48).view(2, 24) % 40


def lost(audit: mixprec.Audit, module: str, product: str) -> Lost:
    """Of one product of a layer, not of what a checkpoint computes again."""
    found = [
        op.lost[product]
        for op in audit.ops
        if op.where == module and product in op.lost and op.phase != "recomputation"
    ]
    (one,) = found
    return one


class Block(nn.Module):
    """Most of what a shadow has to follow: norms, attention, dropout, experts, in-place ops, views,
    a checkpoint, tied weights."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.gate, self.up = nn.Linear(32, 4), nn.Parameter(torch.randn(4, 32, 32) / 6)
        nn.init.uniform_(self.gate.weight, -0.01, 0.01)  # the choice is that of the bias
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.embedding.weight

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.out(y.transpose(1, 2).flatten(2)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + checkpoint(self.attention, x, use_reentrant=False)
        score, expert = self.gate(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for i in range(4):
            mine = (score * (expert == i)).sum(-1, keepdim=True).to(x.dtype)
            y += F.gelu(x @ self.up[i].to(x.dtype)).mul_(mine)
        x = x + y
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def block(dropout: float = 0.0) -> Block:
    torch.manual_seed(0)
    return Block(dropout)


def in_dtype(dtype: torch.dtype) -> Callable[[nn.Module], nn.Module]:
    return lambda model: model.to(dtype)


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "bf16 model": in_dtype(torch.bfloat16),
    "fp16 model": in_dtype(torch.float16),
    "autocast": lambda model: model,
    **{
        name: lambda model, name=name: mixprec.convert(model, name, fuse=True)
        for name in ("bf16", "fp8", "fp8-rowwise", "mxfp8", "mxfp4")
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_total_is_the_distance_to_the_model_in_fp32(way: str) -> None:
    """Of what each layer returns, of gradients, through dropout and the choice of experts."""
    plain, model = block(), WAYS[way](block())
    if way.endswith("model"):
        plain.to(model.up.dtype).float()
    plain_out, out = outputs(plain), outputs(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        audit = mixprec.audit(model, TOKENS, sqnr=True)
    plain(TOKENS)
    assert not audit._shadow.not_followed
    for name in ("qkv", "out", "gate", "head"):
        measured = lost(audit, name, "y").total
        assert measured == pytest.approx(sqnr(plain_out[name], out[name].float()), abs=0.05)


def outputs(model: nn.Module) -> dict[str, torch.Tensor]:
    """The last ones, by layer, filled in as the model runs."""
    found: dict[str, torch.Tensor] = {}
    for name in ("qkv", "out", "gate", "head"):
        layer = model.get_submodule(name)
        layer.register_forward_hook(lambda _, __, y, name=name: found.update({name: y.detach()}))
    return found


def test_own_is_the_error_of_the_op_alone() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 48), torch.randn(40, 64)
    with torch.autocast("cpu", torch.bfloat16):
        audit = mixprec.audit(layer, x, loss=lambda y: y.float().square().mean(), sqnr=True)
        y = layer(x)
    found = lost(audit, "Linear", "y")
    assert found.own == pytest.approx(
        sqnr(F.linear(x, layer.weight, layer.bias), y.float()), abs=1e-3
    )
    assert found.operands["w"].sqnr == pytest.approx(
        sqnr(layer.weight, layer.weight.bfloat16().float()), abs=1e-3
    )
    assert 0.4 < found.beyond < 1.2
    assert "SQNR in dB" in str(audit)


def test_what_underflows_overflows_and_is_zero() -> None:
    x = torch.ones(8, 16)
    x[0, 0], x[1] = 1e-9, 1e6
    x[2] = 0.0
    layer = nn.Linear(16, 16, bias=False)
    with torch.autocast("cpu", torch.float16):
        audit = mixprec.audit(layer, x, loss=lambda y: 1e-9 * y.nan_to_num().sum(), sqnr=True)
    operand = lost(audit, "Linear", "y").operands["x"]
    assert (operand.elements, operand.zeros, operand.underflow, operand.overflow) == (
        128,
        17,
        1,
        16,
    )
    assert any("overflow in fp16" in finding for finding in audit.findings)
    assert any("87.5% of the gradients underflow in fp16" in line for line in audit.findings)


def test_what_is_rounded_in_between_explains_the_noise_beside_an_infinity() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64).log_softmax(-1).bfloat16()
    x[3, 5] = math.inf
    with mixprec.audit(nn.Identity(), sqnr=True) as audit:
        x.logsumexp(-1)
    ((found,),) = (op.lost.values() for op in audit.ops)
    assert 0.5 < found.beyond < 2


@pytest.mark.parametrize("sqnr", [False, True])
@pytest.mark.parametrize("way", [*WAYS, "fp8-delayed"])
def test_nothing_that_the_model_computes_changes(way: str, sqnr: bool) -> None:
    results = []
    for is_audited in (False, True):
        model = WAYS.get(way, lambda model: mixprec.convert(model, way))(block(dropout=0.3))
        torch.manual_seed(2)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        region = torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast")
        audit = mixprec.audit(model, optimizer=sgd, sqnr=sqnr)
        with audit if is_audited else torch.enable_grad():
            for _ in range(2):
                with region:
                    loss = model(TOKENS)
                loss.backward()
                sgd.step()
                sgd.zero_grad()
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        state = [t.detach() for t in (*model.parameters(), *model.buffers())]
        results.append([loss.detach(), *state, torch.rand(3)])
    for before, after in zip(*results, strict=True):
        assert_same_bits(before, after)
    assert not sqnr or len(audit._shadow.total) == len(audit._shadow.before) == 0


def test_what_another_recipe_would_lose() -> None:
    """As much as the layer loses once it has that recipe."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))
    x, recipes = torch.randn(64, 64), ("bf16", "fp8", "fp8-rowwise", "fp8-block", "mxfp8", "mxfp4")

    def loss(y: torch.Tensor) -> torch.Tensor:
        return y.float().square().mean()

    before = mixprec.audit(model, x, loss=loss, what_if=recipes)
    for recipe in recipes:
        nearest = dataclasses.replace(mixprec.Recipe.parse(recipe), stochastic_rounding=())
        converted = mixprec.convert(copy.deepcopy(model), nearest)
        after = mixprec.audit(converted, x, loss=loss, sqnr=True)
        for product in ("y", "grad_weight"):
            there = lost(before, "0", product).sqnr_if(recipe)
            got = lost(after, "0", product).own
            assert there == pytest.approx(got, abs=1.5 if recipe == "bf16" else 0.7), recipe
    found = []
    for inputs in ((x,), (8 * x,), (x, 8 * x)):  # calls add up
        with mixprec.audit(model[0], what_if=["fp8"], sqnr=True) as audit:
            for each in inputs:
                model[0](each)
        found.append(lost(audit, "Linear", "y").what_if["fp8"])
    assert found[2] == pytest.approx([a + b for a, b in zip(*found[:2], strict=True)])
    with pytest.raises(ValueError, match="what_if must be a recipe with scales of the tensors"):
        mixprec.audit(model, x, loss=loss, what_if="fp8-delayed")


def test_the_gradients_of_layers_and_convolutions_have_rows_of_their_own() -> None:
    """Also where their shapes are the same."""
    torch.manual_seed(0)
    square = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    images = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))
    for model, x in ((square, torch.randn(32, 32)), (images, torch.randn(2, 8, 9, 9))):
        with torch.autocast("cpu", torch.bfloat16):
            audit = mixprec.audit(model, x, loss=lambda y: y.square().mean(), sqnr=True)
        found = {name: lost(audit, "1", name) for name in ("y", "grad_input", "grad_weight")}
        assert {role for one in found.values() for role in one.operands} == {"x", "w", "g"}
        assert all({*one.operands} < {"x", "w", "g"} for one in found.values())
        own = [float(line.split()[3]) for line in audit.sqnr_table().splitlines()[3:]]
        assert own == sorted(own)  # what loses most is first


def test_in_fp32_nothing_is_lost() -> None:
    audit = mixprec.audit(block(), TOKENS, sqnr=True)
    every = [lost for op in audit.ops for lost in op.lost.values()]
    assert all(math.isinf(one.own or math.inf) for one in every)
    assert "no product rounds" in audit.sqnr_table()
    assert [line for line in audit.findings if "explains" in line] == []


def test_bytes_and_exceptions_leave_nothing_behind() -> None:
    """FP8 codes that saturate are counted, and a block that fails ends like one that does not."""
    layer = mixprec.convert(nn.Linear(32, 32), "fp8-delayed")
    x = torch.randn(32, 32)
    mixprec.audit(layer, x, loss=torch.sum, sqnr=True)
    layer(x).sum().backward()
    mixprec.update_scales(layer)
    audit = mixprec.audit(layer, 64 * x, loss=torch.sum, sqnr=True)
    operand = lost(audit, layer.__class__.__name__, "y").operands["x"]
    assert 0.5 < operand.overflow / operand.elements < 1
    assert operand.beyond < 2
    failed = mixprec.audit(layer, sqnr=True)
    with pytest.raises(RuntimeError, match="shapes cannot"), failed:
        layer(x) @ x[:3]
    assert len(failed._shadow.total) == 0
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []


def test_the_gradients_that_a_program_gives() -> None:
    """The root of a backward pass is a gradient: torch's, or the program's own."""
    layer, x = nn.Linear(32, 32).bfloat16(), torch.randn(16, 32).bfloat16().requires_grad_()
    g = torch.randn(16, 32).bfloat16()
    for backward in (
        lambda y: y.sum().backward(),
        lambda y: y.backward(g),
        lambda y: torch.autograd.backward(y, g),
        lambda y: torch.autograd.grad(y, [x, *layer.parameters()], g),
        lambda y: torch.autograd.grad(y, [x, *layer.parameters()], grad_outputs=g),
    ):
        with mixprec.audit(layer, sqnr=True) as audit:
            backward(layer(x))
        found = {name for op in audit.ops if op.kind == "product" for name in op.lost}
        assert found == {"y", "grad_input", "grad_weight"}
    model = nn.Sequential(layer, nn.Linear(32, 32).bfloat16())
    with mixprec.audit(model, sqnr=True) as audit:
        for _ in range(2):  # what comes after a backward pass is no gradient
            model(x).sum().backward()
    found = {
        name
        for op in audit.ops
        if op.phase == "forward" and op.kind == "product"
        for name in op.lost
    }
    assert found == {"y"}


def written_to(self: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A cast whose result is written to before a product reads it."""
    low = x.bfloat16()
    low[:, ::2] = 0
    low.mul_(2.0)
    return low @ w


def test_what_is_written_to_after_the_cast() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(16, 32), torch.randn(32, 8).bfloat16()
    model = Model(written_to)
    audit = mixprec.audit(model, x, w, loss=torch.sum, sqnr=True)
    (found,) = (one for op in audit.ops if op.kind == "product" for one in op.lost.values())
    low = x.clone()
    low[:, ::2] = 0
    y = model(x, w).float()
    assert found.own == pytest.approx(sqnr((low * 2).bfloat16().float() @ w.float(), y), abs=0.01)
    assert found.total == pytest.approx(sqnr((low * 2) @ w.float(), y), abs=0.01)


def test_native_dropout_has_the_mask_of_the_step() -> None:
    """The op of GPUs."""
    torch.manual_seed(0)
    x, w = torch.randn(16, 32).bfloat16(), torch.randn(32, 8).bfloat16()
    with mixprec.audit(nn.Identity(), sqnr=True) as audit:
        dropped, _ = torch.native_dropout(x, 0.3, True)
        y = dropped @ w
    (found,) = (one for op in audit.ops if op.kind == "product" for one in op.lost.values())
    want = x.float() * (dropped != 0) / 0.7 @ w.float()
    assert found.total == pytest.approx(sqnr(want, y.float()), abs=0.05)


def test_a_parametrized_weight_is_not_computed_by_audit() -> None:
    """spectral_norm changes its buffers whenever the weight is read."""
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32))
    model = mixprec.convert(nn.Sequential(normed), "fp8")
    before = [b.clone() for b in model.buffers()]
    other = copy.deepcopy(model)
    with mixprec.audit(model, sqnr=True):
        model(torch.ones(4, 32))
    other(torch.ones(4, 32))
    for b, there, old in zip(model.buffers(), other.buffers(), before, strict=True):
        assert_same_bits(b, there)
        assert b.shape == old.shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["linear", "bilinear", "conv", "lstm", "gru", "encoder"])
def test_what_if_of_all_kinds_of_layers(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, shapes = {
        "linear": (nn.Linear(32, 16), [(8, 32)]),
        "bilinear": (nn.Bilinear(16, 16, 8), [(8, 16)] * 2),
        "conv": (nn.Conv2d(32, 8, 1), [(2, 32, 4, 4)]),
        "lstm": (nn.LSTM(16, 16), [(4, 8, 16)]),
        "gru": (nn.GRU(16, 16), [(4, 8, 16)]),
        "encoder": (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), [(2, 8, 16)]),
    }[kind]
    batch = [torch.randn(shape, dtype=dtype) for shape in shapes]

    def loss(y: Any) -> torch.Tensor:
        return (y[0] if isinstance(y, tuple) else y).float().square().mean()

    for _ in range(3):
        audit = mixprec.audit(model.to(dtype).eval(), *batch, loss=loss, what_if=("fp8", "mxfp8"))
    found = {name for op in audit.ops for one in op.lost.values() for name in one.what_if}
    if kind in ("linear", "conv", "gru", "encoder"):
        assert found == {"fp8", "mxfp8"}
        assert all("y" not in op.lost or op.lost["y"].sqnr_if("fp8") > 20 for op in audit.ops)


def test_what_is_not_followed_is_said() -> None:
    """Complex numbers, and the backward pass of oneDNN's LSTM, which reads what it has packed."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.fft.rfft(self.a(x)).abs()[..., :8].repeat(1, 2))

    plain = Model(forward, a=nn.Linear(16, 16), b=nn.Linear(16, 16))
    model, x = mixprec.convert(copy.deepcopy(plain), "fp8"), torch.randn(8, 16)
    audit = mixprec.audit(model, x, loss=torch.sum, sqnr=True)
    assert "Not computed again in FP32, and taken as they are: aten::_fft_r2c" in audit.notes[0]
    diff = mixprec.bisect(plain, model, x, loss=torch.sum)
    assert "what runs after aten::_fft_r2c is not compared" in diff.said


def test_what_else_an_op_writes_is_written_once() -> None:
    """out= of another dtype, a view in place, memory that is exchanged."""
    x, y = torch.randn(4, 4).bfloat16(), torch.randn(4, 4).bfloat16()
    smaller, count = torch.zeros(4, 4, dtype=torch.bool), torch.zeros(4, dtype=torch.int64)
    with mixprec.audit(nn.Identity(), sqnr=True) as audit:
        z = x.float().bfloat16() * 1.001
        torch.lt(z, y, out=smaller)
        count.add_(smaller.sum(0))
        z.transpose_(0, 1)
        z.set_(y.clone())
    assert torch.equal(smaller, (x.float().bfloat16() * 1.001) < y)
    assert torch.equal(count, smaller.sum(0))
    assert_same_bits(z, y)
    assert not audit._shadow.not_followed


FORWARDS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "its own cast": lambda self, x: self.layer(x.to(torch.float8_e4m3fn).to(x.dtype)),
    "sparse": lambda self, x: torch.sparse.mm(torch.eye(32).to_sparse(), self.layer(x).float()),
    "drawn": lambda self, x: self.layer(F.rrelu(self.layer(x), training=True)),
}


@pytest.mark.parametrize("kind", FORWARDS)
@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_formats_and_layouts_of_the_program(kind: str, recipe: str) -> None:
    torch.manual_seed(0)
    model = mixprec.convert(Model(FORWARDS[kind], layer=nn.Linear(32, 32)), recipe)
    audit = mixprec.audit(model, torch.randn(32, 32), loss=torch.sum, sqnr=True)
    assert [line for line in audit.findings if "explains" in line] == []
    is_cast = kind == "its own cast"
    assert any("Not computed again" in note for note in audit.notes) != is_cast
    said = [line for line in audit.findings if "from fp32 to float8_e4m3fn and back" in line]
    assert len(said) == is_cast


def test_tensors_without_values_and_memory_that_grows() -> None:
    """Of meta tensors nothing is computed; an empty out= gets what the step computes."""
    layer, x = mixprec.convert(nn.Linear(16, 16), "fp8"), torch.randn(4, 16)

    def run() -> list[torch.Tensor]:
        with torch.no_grad():
            y, out = layer(x), torch.empty(0)
            torch.add(y, 1.0, out=out)
            total = torch.zeros(4, 16)
            total += y
            nn.Linear(16, 16, device="meta", dtype=torch.bfloat16)(y.bfloat16().to("meta"))
            torch.nested.nested_tensor([y, y[:2]]).bfloat16().float().to_padded_tensor(0.0)
            return [y, out, total]

    want = run()
    with mixprec.audit(layer, sqnr=True):
        got = run()
    assert_same_lists(want, got)


def test_two_casts_in_a_row_are_as_coarse_as_the_coarser_one() -> None:
    layer = nn.Linear(32, 32).half()
    with mixprec.audit(layer, sqnr=True) as audit:
        layer(torch.randn(64, 32).bfloat16().half())
        layer(torch.randn(64, 32).to(torch.bfloat16).to(torch.float16))
    assert audit.findings == []
    assert 0.5 < lost(audit, "Linear", "y").operands["x"].beyond < 1.2


class Faulty(Shadow):
    """Of a step whose last product has lost some columns."""

    def follow(self, call: Any) -> Any:
        if call.listed is not None and call.result.shape == (320, 256):
            call.result[:, -3:] = 0.0
        return super().follow(call)


@pytest.mark.parametrize("way", ["autocast", "bf16", "fp8"])
def test_a_large_product_is_what_its_operands_give(way: str) -> None:
    def audited(kind: type[Shadow]) -> Lost:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
        if way != "autocast":
            mixprec.convert(model, way)
        audit = mixprec.Audit(model, sqnr=True)
        audit._shadow = kind(model.parameters())
        with audit, torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            model(torch.randn(320, 256))
        return lost(audit, "2", "y")

    assert 0.0 < audited(Shadow).beyond < 1.5
    assert audited(Faulty).beyond > 2.0


def test_attention_is_computed_again_without_the_remainder_of_its_result() -> None:
    """In FP32 it has none: the remainder of the result in 16 bits would be an error."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(2, 16, 3, 2, 16).permute(2, 0, 3, 1, 4)
        return mixprec.functional.attention(q, k, v).float().square().mean()

    torch.manual_seed(0)
    model = Model(forward, qkv=nn.Linear(32, 96)).bfloat16()
    audit = mixprec.audit(model, torch.randn(2, 16, 32).bfloat16(), sqnr=True)
    assert not any("Not computed again" in note for note in audit.notes)
    assert "attention, backward" in str(audit)
