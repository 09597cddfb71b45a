"""norm_linear, mlp, their modules, and convert(fuse=True): their values and gradients."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layer_cases import (
    HIDDEN,
    ROWS,
    WIDTH,
    Block,
    converted,
    feed_forward,
    gradients,
    model_and_batch,
)
from torch import nn
from torch.profiler import profile

import mixprec
from mixprec import functional
from mixprec.nn import MLP, GatedMLP, NormLinear
from mixprec.nn._replaced import replaced_of
from mixprec.recipes import RECIPES
from mixprec.testing import sqnr

WITHOUT_STATE = tuple(r for r, recipe in RECIPES.items() if not recipe.is_delayed)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_fused_model_is_as_accurate_as_the_unfused_one(recipe: str) -> None:
    model, x = model_and_batch()
    exact = gradients(copy.deepcopy(model).double(), x.double())
    plain, fused = converted(model, recipe)
    for _ in range(2):  # with delayed scales, once with the first ones and once with the next
        expected, got = gradients(plain, x), gradients(fused, x)
        assert exact.keys() == expected.keys() == got.keys()
        for key in exact:
            of_plain, of_fused = (float(sqnr(exact[key], r[key])) for r in (expected, got))
            assert of_fused > of_plain - 3.0, (key, of_plain, of_fused)


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8-block", "mxfp8"])
def test_the_roundings_are_those_that_the_docstrings_name(recipe: str) -> None:
    """norm, cast, product in 16 bits, activation, cast, product, from single ops, bit for bit."""
    x, norm_weight = torch.randn(ROWS, WIDTH), torch.rand(WIDTH)
    gate, up = torch.randn(2, HIDDEN, WIDTH) / 7
    down = torch.randn(WIDTH, HIDDEN) / 7
    r, low = RECIPES[recipe], torch.bfloat16

    def product(q: mixprec.Quantized, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        w = mixprec.quantize(weight, r.w, granularity=r.w_granularity)
        return mixprec.gemm(q, w.t(), out_dtype=dtype)

    z, _ = mixprec.norm_quantize(x, r.x, norm_weight, eps=1e-6, granularity=r.x_granularity)
    h, u = product(z, gate, low), product(z, up, low)
    a = mixprec.act_quantize(h, r.x, u, kind="silu", granularity=r.x_granularity)
    got = functional.mlp(
        x, up, down, gate=gate, act="silu", norm="rms", norm_weight=norm_weight, recipe=recipe
    )
    assert torch.equal(got, product(a, down, torch.float32))
    (y,) = functional.norm_linear(x, up, norm_weight=norm_weight, recipe=recipe)
    assert torch.equal(y, product(z, up, torch.float32))


class Modules(nn.Module):
    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.norm_linear = NormLinear(WIDTH, (WIDTH, 16), norm="layer", recipe=recipe)
        self.gated_mlp = GatedMLP(WIDTH, HIDDEN, norm="rms", recipe=recipe)
        self.mlp = MLP(WIDTH, HIDDEN, act="relu2", recipe=recipe)
        self.residual = torch.randn(2, 5, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, small, total = self.norm_linear(x, self.residual)
        return torch.cat((self.mlp(self.gated_mlp(y) + total), small), -1)


@pytest.mark.parametrize("recipe", WITHOUT_STATE)
def test_the_modules_learn_like_torchs(recipe: str) -> None:
    model, x = Modules(recipe), torch.randn(2, 5, WIDTH)
    got = gradients(model, x)
    with mixprec.autocast(enabled=False):
        expected = gradients(model, x)
    assert torch.equal(model.norm_linear(x, model.residual)[-1], x + model.residual)
    floor = {4: 2, 8: 8, 16: 30}[RECIPES[recipe].x.bits]
    for key, exact in expected.items():
        assert float(sqnr(exact, got[key])) > floor, key


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8-delayed", "mxfp8"])
def test_compiled_as_eager(recipe: str) -> None:
    model, x = model_and_batch()
    mixprec.convert(model, recipe, fuse=True)
    twin = copy.deepcopy(model)
    twin.compile(backend="aot_eager", fullgraph=True)
    mine, expected = gradients(twin, x), gradients(model, x)
    assert [key for key in expected if not torch.equal(mine[key], expected[key])] == []


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="act must be one of"):
        MLP(8, 16, act="tanh")
    with pytest.raises(ValueError, match="K = 8"):
        functional.norm_linear(torch.randn(3, 4), torch.randn(16, 8))


def test_diagnostics_see_fused_layers() -> None:
    class WithLoss(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean()

    model = mixprec.convert(WithLoss(), "fp8", fuse=True)
    ops = mixprec.audit(model, torch.randn(2, 9, WIDTH), sqnr=True).ops
    assert {"mlp.1", "mlp.3", "attention.proj"} <= {op.module for op in ops if "y" in op.lost}
    model, x = mixprec.convert(feed_forward(), "fp8", fuse=True), torch.randn(ROWS, WIDTH)
    with torch.no_grad(), mixprec.audit(model) as audit:
        model(x)
    assert [*audit.flops] == ["fp8"]
    with mixprec.simulate("hopper"):
        y = model(x)
    assert not torch.equal(y, model(x))
    torch.testing.assert_close(y, model(x), rtol=0.1, atol=0.1)


ALONE = [
    (partial(nn.RMSNorm, WIDTH), 0.05),  # small, so that eps shows
    (partial(nn.GELU, approximate="tanh"), 3.0),
]


@pytest.mark.parametrize(("kind", "largest"), ALONE, ids=["norm", "activation"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_or_activation_alone_runs_in_one_pass(
    kind: Callable[[], nn.Module], largest: float, dtype: torch.dtype
) -> None:
    plain = kind()
    for p in plain.parameters():
        nn.init.normal_(p)
    exact, fused = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    if isinstance(exact, nn.RMSNorm):
        exact.eps = torch.finfo(torch.float32).eps  # for any dtype, as torch computes in FP32
    model = mixprec.convert(nn.ModuleList([nn.Linear(2, 2), fused]), "bf16", fuse=True)
    assert type(fused.forward.__self__).__name__ in ("FusedNorm", "FusedActivation")
    for shape in ((3, 5, WIDTH), (WIDTH,), (0, WIDTH)):
        x = largest * torch.randn(shape).to(dtype)
        wanted, got, unfused = (
            gradients(module, given)
            for module, given in ((exact, x.double()), (fused, x), (plain, x))
        )
        for key, value in got.items():
            assert (value.shape, value.dtype) == (unfused[key].shape, unfused[key].dtype)
            floor = sqnr(wanted[key], unfused[key]) - 12.0
            assert x.numel() == 0 or sqnr(wanted[key], value) > floor, key
    x = torch.randn(3, WIDTH, requires_grad=True)
    fused(x).add_(1).sum().backward()  # writes to what no backward pass reads
    with functional.twice_differentiable():
        torch.autograd.grad(fused(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice_differentiable"):
        torch.autograd.grad(fused(x).sum(), x, create_graph=True)
    mixprec.unconvert(model)
    assert "forward" not in vars(fused)


class Core(nn.Module):
    """Attention, and the layer whose recipe holds for it."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.proj, self.dtype = nn.Linear(16, 16), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.view(1, 2, -1, 16).to(self.dtype)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)


@pytest.mark.parametrize("recipe", ["fp16", "bf16", "fp8"])
def test_attention_in_torchs_autocast_with_another_dtype(recipe: str) -> None:
    model = mixprec.convert(Core(torch.float16), recipe, fuse=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(torch.randn(8, 16, requires_grad=True))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()


class Mixed(Core):
    """The operands that rotary positions in FP32 leave of 16-bit products."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = self.proj(x).unflatten(-1, (2, 8))[None].transpose(1, 2)
        q = v.float() * 1.01
        return F.scaled_dot_product_attention(q, q, v)


def test_attention_in_torchs_autocast_casts_operands_of_several_dtypes() -> None:
    model = mixprec.convert(Mixed(), "bf16", fuse=True)
    ends, seen = [], []
    for run in (model, torch.compile(model, backend="eager", fullgraph=True)):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with profile() as p, torch.autocast("cpu", torch.bfloat16):
            y = run(x)
        y.float().square().sum().backward()
        ends.append([y, x.grad])
        seen.append([e.key for e in p.key_averages()])
    assert ends[0][0].dtype == torch.bfloat16
    assert all(map(torch.equal, *ends))
    assert all("mixprec::attention" in names for names in seen)
    with torch.autocast("cpu", torch.bfloat16), mixprec.autocast(enabled=False):
        assert float(sqnr(model(x), y)) > 35
    with pytest.raises(RuntimeError, match="dtype"):
        model(x.bfloat16())  # outside of autocast it is torch's error


def test_a_subclass_sees_the_function_that_was_called() -> None:
    seen = []

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(func)
            return super().__torch_function__(func, *args, **kwargs)

    class Model(Core):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(-1, (2, 8))

    mixprec.convert(Model(), "bf16", fuse=True)(torch.randn(3, 16).as_subclass(Own))
    assert torch.Tensor.unflatten in seen


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_an_overflow_of_a_norms_sum_is_not_finite(norm: Callable[[int], nn.Module]) -> None:
    x = torch.full((2, WIDTH), 1e19)
    x[0, ::2] = -2e19
    y = mixprec.convert(feed_forward(norm(WIDTH)), "bf16", fuse=True)(x)
    assert not y[0].isfinite().any()


def test_pickles_of_earlier_versions_find_their_classes() -> None:
    """Protocol 0 has names as lines of text."""
    block = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32), nn.RMSNorm(16), nn.GELU("tanh"))
    model = mixprec.convert(block, "fp8", fuse=True, saved="int8")
    data = pickle.dumps(model, 0)
    for now, former in (
        ("_replaced\nCompressed", "_compressed\nCompressedForward"),
        ("_scope\nFusionScope", "_marked\nMarked"),
        ("_fused\nFusedNorm", "_one_pass\nFusedNorm"),
        ("_fused\nFusedActivation", "_one_pass\nFusedActivation"),
    ):
        new, old = (f"mixprec.nn.{x}\n".encode() for x in (now, former))
        assert new in data
        data = data.replace(new, old)
    loaded = pickle.loads(data)
    assert [type(replaced_of(m)) for m in loaded.modules()] == [
        type(replaced_of(m)) for m in model.modules()
    ]
