"""Audit.diff and bisect: programs that differ in one known place."""

from __future__ import annotations

import copy
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Model as Parts
from torch import nn
from torch.nn import functional as F

import mixprec
from mixprec.diagnostics.audit.shadow import Shadow
from mixprec.functional import operands
from mixprec.ops.quantize import quantize_op

TOKENS = torch.arange(64).view(2, 32) % 40


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
        self.scale, self.act = 8**-0.5, nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 32), nn.Linear(32, 40)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def edit(name: str, **values: Any) -> Callable[[Any], None]:
    def change(m: Model) -> None:
        for key, value in values.items():
            setattr(m.get_submodule(name), key, value)

    return change


def weight(name: str, factor: float) -> Callable[[Any], None]:
    def change(m: Model) -> None:
        with torch.no_grad():
            m.get_submodule(name).weight[0, 0] *= factor

    return change


class Half(torch.autograd.Function):
    """Right forward, wrong backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 0.5


class Wrong(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return Half.apply(x)


# What differs, and the module, op and phase that are the first to have it.
CHANGES: dict[str, tuple[Callable[[Any], None], tuple[str, str, str]]] = {
    "epsilon": (edit("layers.1.norm2", eps=1e-2), ("layers.1.up", "y", "forward")),
    "activation": (edit("layers.1", act=nn.SiLU()), ("layers.1.down", "y", "forward")),
    "approximation": (
        edit("layers.2", act=nn.GELU(approximate="tanh")),
        ("layers.2.down", "y", "forward"),
    ),
    "attention": (edit("layers.0", scale=0.36), ("layers.0", "attention", "forward")),
    "one weight": (weight("layers.2.qkv", 1.5), ("layers.2.qkv", "y", "forward")),
    "backward": (edit("layers.1", act=Wrong()), ("layers.1.up", "grad_weight", "backward")),
}
WAYS = ("fp32", "torch.autocast", "bf16 model", "bf16", "fp8", "fp8 fused", "mxfp8", "nvfp4")


def prepared(way: str, m: Model) -> Model:
    if way == "bf16 model":
        return m.bfloat16()
    if way not in ("fp32", "torch.autocast"):
        mixprec.convert(m, way.split()[0], fuse="fused" in way)
    return m


def audited(way: str, m: Model) -> mixprec.Audit:
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "torch.autocast"):
        return mixprec.audit(m, TOKENS, sqnr=True)


@pytest.mark.parametrize("way", WAYS)
def test_rounding_is_no_difference(way: str) -> None:
    diff = audited("fp32", model()).diff(audited(way, prepared(way, model())))
    assert diff.first is None, str(diff)
    assert "the steps diverge nowhere" in str(diff)
    assert len(diff.places) >= 3 * (4 + 1 + 8 + 1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", CHANGES)
def test_the_first_place(what: str, way: str) -> None:
    if way == "bf16 model" and what in ("epsilon", "attention", "approximation", "one weight"):
        pytest.skip("smaller than what the weights differ by, which were made in bf16")
    change, (module, op, phase) = CHANGES[what]
    other = model()
    change(other)
    diff = audited("fp32", model()).diff(audited(way, prepared(way, other)))
    assert diff.first is not None
    found = diff.first.module, diff.first.op, diff.first.phase
    if what == "backward":  # of two gradients of one g, either may be computed first
        assert found in {(module, op, phase), (module, "grad_input", phase)}
    else:
        assert found == (module, op, phase)
    assert re.search(r"diverge (upstream|here)", diff.said)
    assert any(line.startswith(">") for line in diff.table().splitlines())


@pytest.mark.parametrize("wrong", ["cast", "sum"])
def test_an_op_that_is_wrong_by_itself(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cast with a scale that is too large, and a product that leaves out a part of K, as kernels
    with a bug."""
    bad = prepared("fp8", model())
    if wrong == "sum":
        follow = Shadow.follow

        def lose(self: Any, call: Any) -> Any:
            args = call.args
            if call.func.name() == "mixprec::gemm" and args[1].shape == (32, 128):  # up
                call.result -= args[0][:, 28:].float() @ args[1][28:].float() * args[2] * args[3]
            return follow(self, call)

        monkeypatch.setattr(Shadow, "follow", lose)
    else:

        def quantize(x: torch.Tensor, dtype: torch.dtype, scale: Any, *rest: Any) -> Any:
            if x.shape[-1] == 128 and dtype == torch.float8_e4m3fn:
                scale = torch.full((), 2.0**-9)
            return quantize_op(x, dtype, scale, *rest)

        monkeypatch.setattr(operands, "quantize_op", quantize)
    diff = mixprec.bisect(model(), bad, TOKENS)
    assert diff.first is not None
    assert diff.first.module == ("layers.0.up" if wrong == "sum" else "layers.0.down")
    said = "what it computes of its operands" if wrong == "sum" else "the cast of its weight"
    assert f"in the second step {said} is off by" in diff.said


def test_models_without_a_common_op() -> None:
    a, b = nn.Sequential(nn.Linear(6, 6)), nn.Sequential(nn.ReLU(), nn.Linear(6, 5))
    with pytest.raises(ValueError, match=r"no op in common: 0, y in forward, of the first"):
        mixprec.bisect(a, b, torch.randn(4, 6), loss=torch.sum)
    with pytest.raises(ValueError, match="both audits must be made with sqnr=True"):
        audited("fp32", model()).diff(mixprec.audit(model(), TOKENS))
    less = model()
    less.layers = less.layers[:2]
    diff = mixprec.bisect(model(), less, TOKENS)
    assert "layers.2.qkv, y in forward, of the first" in diff.said
    assert diff.first is not None
    assert diff.first.module == "head"


def test_inside_of_a_region_that_has_cast_the_weights() -> None:
    changed = model()
    CHANGES["epsilon"][0](changed)
    with torch.autocast("cpu", torch.bfloat16):
        one = model()
        one(TOKENS)
        diff = mixprec.bisect(one, changed, TOKENS)
    assert diff.first is not None
    assert (diff.first.module, diff.first.op) == ("layers.1.up", "y")
    assert "in one of them only" not in diff.said


def test_with_a_file_of_another_process(tmp_path: Path) -> None:
    program = (
        "import sys; sys.path[:0] = sys.argv[2:]; import test_audit_diff as t\n"
        "m = t.model(); t.CHANGES['epsilon'][0](m); t.audited('fp32', m).save(sys.argv[1])"
    )
    path = tmp_path / "other.json"
    here = Path(__file__).parent
    subprocess.run([sys.executable, "-P", "-c", program, path, here, here.parent], check=True)
    assert len(json.loads(path.read_text())["points"]) > 30
    diff = audited("fp32", model()).diff(path)
    assert diff.first is not None
    assert diff.first.module == "layers.1.up"


def test_a_file_of_what_is_not_finite(tmp_path: Path) -> None:
    bad = model()
    with torch.no_grad():
        bad.get_submodule("layers.1.up").weight[0, 0] = math.inf
    other = audited("fp32", bad)
    other.save(tmp_path / "other.json")

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is not JSON")

    json.loads((tmp_path / "other.json").read_text(), parse_constant=refuse)
    there, read = (str(audited("fp32", model()).diff(o)) for o in (other, tmp_path / "other.json"))
    assert there == read
    assert "layers.1.up" in read


def test_layers_that_torch_computes_in_other_ways() -> None:
    """A bias that is added later, attention's projections in one product, gradients that cancel."""
    layers = {"first": nn.Linear(32, 16), "last": nn.Linear(16, 4)}
    transposed = Parts(lambda self, x: self.last(self.first(x.transpose(1, 2))), **layers)
    encoder = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    for m, x in ((transposed, torch.randn(2, 32, 6)), (encoder, torch.randn(2, 6, 32))):
        for recipe in ("bf16", "fp8", "nvfp4"):
            other = mixprec.convert(copy.deepcopy(m), recipe, fuse=True)
            diff = mixprec.bisect(m, other, x, loss=lambda y: y.sin().mean())
            assert diff.first is None, str(diff)


def test_names_that_torch_compile_gives() -> None:
    compiled = torch.compile(model(), backend="aot_eager")
    assert mixprec.bisect(model(), compiled, TOKENS).first is None


@pytest.mark.parametrize("kind", ["inputs", "weights"])
def test_one_element_that_overflows_in_fp16_is_where_they_diverge(kind: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64), nn.Linear(64, 8))
        with torch.no_grad():
            if kind == "weights":
                layers[2].weight[3, 5] = 1e5
            else:
                layers[0].bias[7] = 1e5
        return layers

    x, fp16 = torch.randn(64, 64), mixprec.convert(make(), "fp16")

    def loss(y: torch.Tensor) -> torch.Tensor:
        return y.float().square().mean()

    found = mixprec.audit(fp16, x, loss=loss, sqnr=True).findings
    share = "0.2%" if kind == "inputs" else "0.0031%"
    assert f"2: {share} of the {kind} overflow in fp16" in found
    diff = mixprec.bisect(make(), fp16, x, loss=loss)
    one = kind.removesuffix("s")
    assert diff.said == (
        f"2, y in forward: in the second step the cast of its {one} has Inf or NaN where FP32 has "
        "none"
    )
    assert "overflow" not in str(mixprec.audit(make(), x, loss=loss, sqnr=True).findings)
