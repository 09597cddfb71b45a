"""norm_linear, mlp, their modules, and convert(fuse=True)."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import name
from torch import nn
from torch.overrides import TorchFunctionMode

import mixprec
from mixprec import functional
from mixprec.functional import operands
from mixprec.nn import MLP, GatedMLP, MLPSpec, NormLinear, NormSpec, register_fusion
from mixprec.recipes import RECIPES
from mixprec.testing import sqnr

ALL = tuple(RECIPES)
WITHOUT_STATE = tuple(r for r, recipe in RECIPES.items() if not recipe.is_delayed)
WIDTH, HIDDEN, ROWS = 48, 160, 70
MXFP8, FP32 = RECIPES["mxfp8"], torch.float32
# recipes of block formats, and the dtypes of what the fused ops return
MX = {
    "mxfp8": (MXFP8, {torch.float8_e4m3fn}),
    "e5m2 gradients": (replace(MXFP8, g="e5m2"), {torch.float8_e4m3fn, torch.float8_e5m2}),
    "stochastic": (replace(MXFP8, stochastic_rounding=("g",)), {torch.float8_e4m3fn, FP32}),
    "hadamard": (replace(MXFP8, hadamard=True), {FP32}),
    "scale_mode": (replace(MXFP8, scale_mode="even"), {FP32}),
    "mxfp4": (RECIPES["mxfp4"], {FP32}),
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False))
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x).view(*x.shape[:2], 3, 3, 16)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, HIDDEN),
            nn.GELU(),
            nn.Linear(HIDDEN, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


def model_and_batch() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 8))
    return model, torch.randn(2, ROWS, WIDTH)


def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output and all gradients of the mean square of the output."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.float().square().mean().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return {"y": y.detach(), "x": x.grad, **grads}


@pytest.mark.parametrize("recipe", ALL, ids=name)
def test_a_fused_model_is_as_accurate_as_the_unfused_one(recipe: str) -> None:
    model, x = model_and_batch()
    exact = gradients(copy.deepcopy(model).double(), x.double())
    plain = mixprec.convert(copy.deepcopy(model), recipe)
    fused = mixprec.convert(copy.deepcopy(model), recipe, fuse=True)
    for _ in range(2):  # with delayed scales, once with the first ones and once with the next
        expected, got = gradients(plain, x), gradients(fused, x)
        mixprec.update_scales(plain), mixprec.update_scales(fused)
    assert expected.keys() == got.keys()
    for key in exact:
        of_plain, of_fused = (float(sqnr(exact[key], r[key])) for r in (expected, got))
        assert of_fused > of_plain - 3.0, (key, of_plain, of_fused)


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8-block", "mxfp8"])
def test_the_roundings_are_those_that_the_docstrings_name(recipe: str) -> None:
    """norm, cast, product in 16 bits, activation, cast, product, from single ops, bit for bit."""
    torch.manual_seed(0)
    x, norm_weight = torch.randn(ROWS, WIDTH), torch.rand(WIDTH)
    gate, up, down = (
        torch.randn(s) / 7 for s in ((HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN))
    )
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


@pytest.mark.parametrize("recipe", WITHOUT_STATE, ids=name)
def test_the_modules_learn_like_torchs(recipe: str) -> None:
    torch.manual_seed(0)
    block = nn.ModuleList(
        (
            NormLinear(WIDTH, (WIDTH, 16), norm="layer", recipe=recipe),
            GatedMLP(WIDTH, HIDDEN, norm="rms", recipe=recipe),
            MLP(WIDTH, HIDDEN, act="relu2", recipe=recipe),
        )
    )
    x, residual = (torch.randn(2, 5, WIDTH) for _ in range(2))

    def forward(x: torch.Tensor) -> torch.Tensor:
        y, small, total = block[0](x, residual)
        return block[2](block[1](y) + total).sum() + small.sum()

    def grads() -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        forward(leaf).backward()
        found = [leaf.grad, *(p.grad for p in block.parameters())]
        block.zero_grad()
        return found

    got = grads()
    with mixprec.autocast(enabled=False):
        expected = grads()
    floor = {4: 2, 8: 8, 16: 30}[RECIPES[recipe].x.bits]
    for a, b in zip(got, expected, strict=True):
        assert float(sqnr(b, a)) > floor


def test_names_parameters_and_state_stay_and_unconvert_restores_the_classes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, x = model_and_batch()
    kinds, keys = [type(m) for m in model.modules()], list(model.state_dict())
    with caplog.at_level(logging.INFO, logger="mixprec"):
        mixprec.convert(model, "bf16", fuse=True)
    assert "norm, linear, activation, linear (2)" in caplog.text
    assert "whose forward passes are not known: Attention (2)" in caplog.text
    assert list(model.state_dict()) == keys
    y = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), y)
    mixprec.convert(model, "bf16")  # again, without fuse
    assert not torch.equal(model(x), y)
    mixprec.convert(model, "bf16", fuse=True)
    assert torch.equal(model(x), y)
    mixprec.unconvert(model)
    assert [type(m) for m in model.modules()] == kinds
    assert not any("forward" in vars(m) for m in model.modules())


def test_what_is_not_fused_is_listed_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[0].register_forward_hook(lambda *_: None)
    with caplog.at_level(logging.INFO, logger="mixprec"):
        mixprec.convert(model, "bf16", fuse=True)
    assert (
        "fused nothing; not fused: 0, because of hooks on a layer, norm or activation"
        in caplog.text
    )


def test_hooks_and_regions_run_the_modules_one_by_one() -> None:
    model, x = model_and_batch()
    plain = mixprec.convert(copy.deepcopy(model), "bf16")
    fused = mixprec.convert(model, "bf16", fuse=True)
    mlp, expected = fused[0].mlp, plain[0].mlp(x)
    assert not torch.equal(mlp(x), expected)
    seen = []
    handle = mlp[1].register_forward_hook(lambda module, inputs, y: seen.append(y))
    assert torch.equal(mlp(x), expected)
    assert len(seen) == 1
    handle.remove()
    with mixprec.autocast(enabled=False):
        exact = mlp(x)
    mixprec.unconvert(fused)
    assert torch.equal(exact, fused[0].mlp(x))


@pytest.mark.parametrize("recipe", list(MX))
def test_mx_of_the_fused_ops_is_that_of_quantize(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as with FP32 values that are cast by an op of their own; which recipes do."""
    given, casts_to = MX[recipe]
    seen = set()
    of = operands.OperandCast.make

    def recorded(*arguments: Any) -> operands.OperandCast:
        seen.add(of(*arguments).cast.dtype)
        return of(*arguments)

    def plain(*arguments: Any) -> operands.OperandCast:
        return of(*arguments)._replace(cast=operands._UNCAST)

    model, x = model_and_batch()
    mixprec.convert(model, given, fuse=True)
    results = []
    for how in (recorded, plain):
        monkeypatch.setattr(operands.OperandCast, "make", staticmethod(how))
        torch.manual_seed(1)
        results.append(gradients(model, x))
    assert seen == casts_to
    for key, value in results[0].items():
        assert torch.equal(value, results[1][key]), key


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8-delayed", "mxfp8"])
def test_compiled_as_eager(recipe: str) -> None:
    model, x = model_and_batch()
    mixprec.convert(model, recipe, fuse=True)
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    expected = gradients(model, x)
    y = compiled(x)
    y.float().square().mean().backward()
    assert torch.equal(y, expected["y"])
    for n, p in twin.named_parameters():
        assert torch.equal(p.grad, expected[n]), n


def errors() -> Iterator[tuple[str, object]]:
    x, w = torch.randn(3, 8), torch.randn(16, 8)
    yield "act must be one of silu", lambda: functional.mlp(x, w, w.t(), act="tanh")
    yield "up and gate must be", lambda: functional.mlp(x, w, w, act="silu")
    yield 'norm must be "rms"', lambda: functional.norm_linear(x, w, norm="batch")
    yield "fp8-delayed keeps state", lambda: functional.norm_linear(x, w, recipe="fp8-delayed")
    yield "K = 8", lambda: functional.norm_linear(x[:, :4], w)
    yield "act must be one of", lambda: MLP(8, 16, act="tanh")


@pytest.mark.parametrize(
    ("message", "call"), [*errors()], ids=lambda v: v if isinstance(v, str) else ""
)
def test_errors(message: str, call: object) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("recipe", ["fp16", "fp8", "fp8-delayed"])
def test_a_resumed_run_has_the_same_bits(recipe: str, tmp_path: Path) -> None:
    def start(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(Block(), nn.Linear(WIDTH, 8))
        mixprec.convert(model, recipe, fuse=True)
        return model, mixprec.optim.AdamW(model.parameters(), lr=1e-2)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            model(torch.randn(2, 9, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            mixprec.update_scales(model)

    model, optimizer = start(0)
    train(model, optimizer, range(3))
    mixprec.save_checkpoint(tmp_path / "run", model=model, optimizer=optimizer, step=3)
    train(model, optimizer, range(3, 6))
    resumed, its_optimizer = start(1)
    mixprec.load_checkpoint(tmp_path / "run", model=resumed, optimizer=its_optimizer)
    train(resumed, its_optimizer, range(3, 6))
    for key, value in model.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key


def test_sqnr_and_simulate_see_fused_layers() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x).square().mean()

    data = [torch.randn(2, 9, WIDTH) for _ in range(2)]
    report = mixprec.compare(WithLoss, data, ("fp32", "fp8"), fuse=True, sqnr=True)
    assert {"block.mlp.1", "block.mlp.3", "block.attention.proj"} <= set(report.rows[1].sqnr)
    model, x = model_and_batch()
    mixprec.convert(model, "fp8", fuse=True)
    with mixprec.simulate("hopper"):
        y = model(x)
    assert not torch.equal(y, model(x))
    torch.testing.assert_close(y, model(x), rtol=0.1, atol=0.1)


class PlusOne(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.normalized_shape, 1 + self.weight, self.bias, self.eps)


def chain(norm: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.LayerNorm(WIDTH) if norm is None else norm
    return nn.Sequential(norm, nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))


def test_modules_that_are_replaced_or_patched_after_fusing_are_used() -> None:
    x = torch.randn(3, WIDTH)
    changes: dict[str, Callable[[nn.Sequential], object]] = {
        "another layer": lambda m: m.__setitem__(1, nn.Linear(WIDTH, 64)),
        "a layer less": lambda m: m.__delitem__(0),
        "a layer more": lambda m: m.insert(0, nn.Tanh()),
        "8-bit weights": mixprec.freeze,
        "a forward of its own": lambda m: setattr(m[2], "forward", torch.tanh),
        "a hook": lambda m: m[2].register_forward_hook(lambda module, inputs, y: 2 * y),
    }
    for what, change in changes.items():
        plain = mixprec.convert(chain(), "bf16")
        fused = mixprec.convert(copy.deepcopy(plain), "bf16", fuse=True)
        for model in (plain, fused):
            torch.manual_seed(1)
            change(model)
        assert torch.equal(fused(x), plain(x)), what
    assert torch.equal(fused[:2](x), plain[:2](x)), "a slice"


def test_norms_that_compute_something_else_are_left() -> None:
    x = 0.05 * torch.randn(9, WIDTH)
    for norm, dtype in ((PlusOne(WIDTH), torch.float32), (nn.RMSNorm(WIDTH), torch.bfloat16)):
        model = chain(norm).to(dtype)
        with torch.no_grad():
            exact = copy.deepcopy(model).float()(x.to(dtype).float())
        y = mixprec.convert(model, "bf16", fuse=True)(x.to(dtype))
        assert float(sqnr(exact, y)) > 35, type(norm).__name__  # RMSNorm: its eps is that of FP32
        assert y[0].shape == model(x[0].to(dtype)).shape, "one row"


def test_flop_share_counts_fused_layers() -> None:
    model = mixprec.convert(chain(), "bf16", fuse=True)
    assert mixprec.stats.flop_share(model, torch.randn(3, WIDTH)) == 1.0


def test_a_norm_alone_runs_in_one_pass() -> None:
    torch.manual_seed(0)
    norm = nn.RMSNorm(WIDTH)
    nn.init.normal_(norm.weight)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(3, 5, WIDTH).to(dtype)
        exact, fused, alone = (copy.deepcopy(norm) for _ in range(3))
        exact.double().eps = torch.finfo(torch.float32).eps
        model = nn.ModuleList([nn.Linear(2, 2), fused])
        mixprec.convert(model, "bf16", fuse=True)
        inputs = [x.double(), x.clone(), x.clone()]
        outputs = []
        for module, given in zip((exact, fused, alone), inputs, strict=True):
            outputs.append(module(given.requires_grad_()))
            outputs[-1].square().sum().backward()
        assert outputs[1].dtype == outputs[2].dtype
        for want, got, plain in (
            outputs,
            [given.grad for given in inputs],
            [module.weight.grad for module in (exact, fused, alone)],
        ):
            assert float(sqnr(want, got)) > float(sqnr(want, plain)) - 6.0
        with functional.twice_differentiable():
            y = fused(x.float().requires_grad_())
            torch.autograd.grad(y.sum(), fused.weight, create_graph=True)
        y = fused(x.float().requires_grad_())
        with pytest.raises(RuntimeError, match="twice_differentiable"):
            torch.autograd.grad(y.sum(), fused.weight, create_graph=True)
        mixprec.unconvert(model)
        assert "forward" not in vars(fused)


class SiLUActivation(nn.Module):
    """With the name of a class of transformers, and another formula."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * F.silu(x)


class Scaled(nn.GELU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Sub(nn.SiLU):
    """Without a forward pass of its own, but what calls it."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().__call__(x)


class LlamaMLP(nn.Module):
    """With the text of the class of transformers, over layers that mean something else."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64)
        self.down_proj, self.act_fn = nn.Linear(64, WIDTH), SiLUActivation()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Own(nn.Sequential):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_what_only_resembles_a_known_class_runs_as_it_is() -> None:
    x = torch.randn(5, WIDTH)
    models: list[nn.Module] = [
        *(
            nn.Sequential(nn.Linear(WIDTH, 64), act(), nn.Linear(64, WIDTH))
            for act in (SiLUActivation, Scaled, Sub)
        ),
        LlamaMLP(),
        Own(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)),
        nn.Sequential(PlusOne(WIDTH), nn.Linear(WIDTH, 64)),
        nn.Sequential(nn.LayerNorm((5, WIDTH)), nn.Linear(WIDTH, 64)),
    ]
    for model in models:
        plain = mixprec.convert(copy.deepcopy(model), "bf16")
        fused = mixprec.convert(model, "bf16", fuse=True)
        assert torch.equal(fused(x), plain(x)), model


def test_a_registered_class_is_fused_and_only_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.g, self.eps = nn.Parameter(torch.rand(WIDTH)), 1e-3

        @staticmethod
        def mean_square(x: torch.Tensor) -> torch.Tensor:
            return x.square().mean(-1, keepdim=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (self.mean_square(x) + self.eps).rsqrt() * self.g

    class Feed(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.norm, self.act = norm, nn.GELU()
            self.a, self.b = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return self.b(self.act(self.a(given)))

    class Child(Feed):
        pass

    register_fusion(Norm, lambda m: NormSpec(WIDTH, m.eps, m.g))
    register_fusion(Feed, lambda m: MLPSpec((m.a,), m.act, m.b))
    x = torch.randn(9, WIDTH)
    for kind, expected in ((Feed, "FusedMLP"), (Child, "Marked")):
        model = nn.Sequential(Norm(), kind(Norm()))
        exact = copy.deepcopy(model)(x)
        mixprec.convert(model, "bf16", fuse=True)
        assert [type(m.forward).__name__ for m in model] == ["FusedNorm", expected]
        assert float(sqnr(exact, model(x))) > 40
        assert torch.equal(model[1](given=x), model[1](x))
        with pytest.raises(TypeError, match="unexpected keyword"):
            model[1](x=x)
        model[0].eps = 10.0  # read in each pass
        assert model(x).norm() < 0.9 * exact.norm()
    with monkeypatch.context() as patch:
        patch.setattr(Norm, "mean_square", staticmethod(torch.zeros_like))
        torch.testing.assert_close(model[0](x), x * model[0].g / 10**0.5, msg="another method")
    monkeypatch.setattr(Norm, "forward", lambda self, x: 3 * x)
    assert torch.equal(model[0](x), 3 * x), "its forward pass was replaced"
    with pytest.raises(TypeError, match="kind must be a subclass"):
        register_fusion(F.gelu, lambda m: "gelu")
    with pytest.raises(TypeError, match="describe must be callable"):
        register_fusion(Norm, "gelu")


def test_convert_finishes_or_leaves_the_model_as_it_was() -> None:
    class Bad(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = nn.Sequential(*chain(), Bad())
    x, names = torch.randn(3, WIDTH), [type(m) for m in model.modules()]
    expected = model(x)
    register_fusion(Bad, lambda m: 7)
    with pytest.raises(TypeError, match="describe of Bad must return"):
        mixprec.convert(model, "fp8-delayed", fuse=True)
    assert [type(m) for m in model.modules()] == names
    assert torch.equal(model(x), expected)
    register_fusion(Bad, lambda m: None)
    mixprec.convert(model, "fp8-delayed", fuse=True, saved="int8")
    model(x).sum().backward()
    state, y = copy.deepcopy(model.state_dict()), model(x)
    register_fusion(Bad, lambda m: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mixprec.convert(model, "fp16", fuse=True)
    assert torch.equal(model(x), y)
    assert all(map(torch.equal, state.values(), model.state_dict().values()))
    register_fusion(Bad, lambda m: None)


def test_fused_norms_raise_and_return_what_torchs_do() -> None:
    norms = (
        lambda: nn.LayerNorm(WIDTH),
        lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
        lambda: nn.LayerNorm(WIDTH, bias=False).bfloat16(),
        lambda: nn.RMSNorm(WIDTH),
        lambda: nn.RMSNorm(WIDTH, elementwise_affine=False),
    )
    inputs = [torch.randn(s) for s in ((3, WIDTH), (WIDTH,), (0, WIDTH), (3, 8), ())]
    inputs += [inputs[0].to(d) for d in (torch.bfloat16, torch.float16, torch.float64)]
    inputs += [torch.randint(9, (3, WIDTH))]
    for norm in norms:
        fused = nn.ModuleList([nn.Linear(2, 2), norm()])
        plain = copy.deepcopy(fused[1])
        mixprec.convert(fused, "bf16", fuse=True)
        for x in inputs:
            for region in (False, True):
                ends = []
                for module in (plain, fused[1]):
                    try:
                        with mixprec.autocast() if region else nullcontext():
                            y = module(x)
                        ends.append((y.dtype, y.shape))
                    except (RuntimeError, IndexError, ValueError) as error:
                        ends.append(str(error))
                assert ends[0] == ends[1], (plain, x.dtype, x.shape)


@pytest.mark.parametrize("around", ["inside", "outside"])
def test_regions_hold_for_attention_wherever_they_begin(around: str) -> None:
    class Core(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, enabled: bool) -> torch.Tensor:
            q = x.view(1, 2, -1, 16)
            with mixprec.autocast(enabled=enabled) if around == "inside" else nullcontext():
                return F.scaled_dot_product_attention(q, q, q)

    core, x = mixprec.convert(Core(), "bf16", fuse=True), torch.randn(8, 16)
    plain = Core()(x, True)
    for enabled in (True, False):
        with mixprec.autocast(enabled=enabled) if around == "outside" else nullcontext():
            assert torch.equal(core(x, enabled), plain) is not enabled


def test_gelu_tanh_runs_in_one_pass() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.act = nn.Linear(WIDTH, 64), nn.GELU(approximate="tanh")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(self.up(x)).add_(1)

    model = mixprec.convert(Both(), "bf16", fuse=True)
    assert type(model.act.forward).__name__ == "FusedActivation"
    for shape in ((3, 5, WIDTH), (WIDTH,), (0, WIDTH)):
        for dtype in (torch.float32, torch.bfloat16):
            x = 3 * torch.randn(shape)[..., :40].to(dtype)
            ends = []
            for act, to in ((model.act, dtype), (nn.GELU(approximate="tanh"), torch.float64)):
                given = x.detach().to(to).requires_grad_()
                y = act(input=given)
                y.square().sum().backward()
                assert y.dtype == to
                ends += [y, given.grad]
            for got, exact in zip(ends[:2], ends[2:], strict=True):
                torch.testing.assert_close(got, exact.to(dtype), rtol=0.02, atol=1e-3)
    gradients(model, torch.randn(3, WIDTH))
    mixprec.unconvert(model)
    assert "forward" not in vars(model.act)


class Typed(nn.Module):
    """Code that reads its own class."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unfused = nn.Linear(8, 8), nn.Linear(8, 8), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return self.a(x) + self.b(x) * (2 if type(self) is Typed else 5)


def test_classes_stay_and_patched_ones_are_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Typed(), torch.randn(3, 8)
    plain = mixprec.convert(copy.deepcopy(model), "bf16")
    fused = mixprec.convert(model, "bf16", fuse=True)
    assert torch.equal(fused(x), plain(x))
    assert Typed.calls == 2
    forward = nn.Sequential.forward
    plain, fused = mixprec.convert(chain(), "bf16"), mixprec.convert(chain(), "bf16", fuse=True)
    x = torch.randn(3, WIDTH)
    monkeypatch.setattr(nn.Sequential, "forward", lambda self, x: 10 * forward(self, x))
    assert torch.equal(fused(x), plain(x))


def test_modes_of_the_program_see_torchs_functions() -> None:
    class Log(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.add(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    seen: set[str] = set()
    model, x = model_and_batch()
    plain = mixprec.convert(copy.deepcopy(model), "bf16")
    mixprec.convert(model, "bf16", fuse=True)
    with Log():
        y = model(x)
    assert {"scaled_dot_product_attention", "layer_norm", "gelu"} <= seen
    assert torch.equal(y, plain(x))


def test_attention_in_torchs_autocast_with_another_dtype() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.proj(x).view(1, 2, -1, 16).half()
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    model = Halves()
    for recipe in ("fp16", "bf16", "fp8"):
        mixprec.convert(model, recipe, fuse=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = model(torch.randn(8, 16))
        assert y.dtype == torch.bfloat16
        y.float().sum().backward()


def test_an_overflow_of_a_norms_sum_is_not_finite() -> None:
    x = torch.full((2, WIDTH), 1e19)
    x[0, ::2] = -2e19
    for norm in (nn.LayerNorm, nn.RMSNorm):
        y = mixprec.convert(chain(norm(WIDTH)), "bf16", fuse=True)(x)
        assert not y[0].isfinite().any(), norm


class Copied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.k = nn.Linear(WIDTH, 8), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * self.k

    def clone(self) -> nn.Module:
        other = type(self)()
        vars(other).update({k: v for k, v in vars(self).items() if not k.startswith("_")})
        other.load_state_dict(self.state_dict())
        return other


def test_copies_of_all_kinds_compute_from_what_they_hold() -> None:
    x = torch.randn(3, WIDTH)
    model = mixprec.convert(Copied(), "bf16", fuse=True)
    y, clone, shallow = model(x), model.clone(), copy.copy(model)
    shallow.k = 4.0
    assert torch.equal(shallow(x), 2 * y)
    assert torch.equal(copy.deepcopy(shallow)(x), 2 * y)
    with torch.no_grad():
        model.a.weight.zero_()
    torch.testing.assert_close(clone(x), y, rtol=0.02, atol=0.02)
    clone(x).sum().backward()
    assert clone.a.weight.grad is not None
    bound = MethodType(model.forward, model)
    assert torch.equal(bound(x), model(x)), "as accelerate binds it"

    class Five(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 5 * super().forward(x)

    plain, fused = mixprec.convert(chain(), "bf16"), mixprec.convert(chain(), "bf16", fuse=True)
    plain.__class__ = fused.__class__ = Five
    assert torch.equal(plain(x), fused(x))


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_a_fused_model_is_exported(strict: bool) -> None:
    x = torch.randn(3, WIDTH)
    model = mixprec.convert(chain(), "fp8", fuse=True)
    exported = torch.export.export(model, (x,), strict=strict)
    assert torch.equal(exported.module()(x), model(x))
