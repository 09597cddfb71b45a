"""A layer's pass in one call of C++ is the same, bit for bit, as op by op."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from layer_cases import saved_tensors
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec.formats import E2M1, E2M3, E3M2, E4M3, E5M2
from mixprec.functional import _group_casts, grouped_linear, operands
from mixprec.ops import linear_pass
from mixprec.recipes import RECIPES, ROLES, Recipe

SHAPES = ((8, 32, 48), (1, 33, 17), (0, 16, 8), (5, 130, 257), ((2, 3), 40, 16), ((2, 2, 2), 7, 5))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MX: Any = {f"{role}_granularity": "mx" for role in ROLES}
OWN = (
    Recipe("any scale", E4M3, E5M2, E4M3, power_of_two_scale=False, w_granularity="row"),
    Recipe("squares", E5M2, E4M3, E4M3, x_granularity="block128x128", g_granularity="row"),
    Recipe("mxfp6", E3M2, E2M3, E2M3, **MX, scale_mode="floor"),
    Recipe("mixed mx", E4M3, E2M1, E5M2, **MX, scale_mode="even", stochastic_rounding=("g",)),
    Recipe("ceil", E5M2, E4M3, E4M3, **MX, scale_mode="ceil"),
)
SHORT = [recipe for recipe in (*RECIPES.values(), *OWN) if recipe.code is not None]


def count(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passes that run in one call from now on."""
    passes: list[str] = []

    def counted(name: str, op: Callable[..., Any], *args: Any) -> Any:
        results = op(*args)  # one that fails runs op by op once more
        passes.append(name)
        return results

    for name in ("linear_forward", "linear_backward"):
        monkeypatch.setattr(linear_pass, name, partial(counted, name, getattr(linear_pass, name)))
    return passes


def both(run: Callable[[], list[torch.Tensor | None]]) -> None:
    """run() has the same results, generator and saved tensors in one call and op by op."""
    found = []
    for backend in (None, "cpp"):
        torch.manual_seed(0)
        with saved_tensors() as saved:
            if backend is None:
                results = run()
            else:
                with mixprec.use_backend(backend):
                    results = run()
        kept = sorted((t.numel() * t.element_size(), str(t.dtype)) for t in saved)
        found.append((results, kept, torch.get_rng_state()))
    (got, kept, state), (expected, other, its_state) = found
    assert kept == other
    assert torch.equal(state, its_state)
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert a.stride() == b.stride()
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def special(t: torch.Tensor, values: bool) -> torch.Tensor:
    """With Inf, NaN, zeros and subnormal numbers in some places."""
    if values and t.numel() > 8:
        t.view(-1)[:4] = torch.tensor([torch.inf, torch.nan, -0.0, 1e-40])
    return t


@pytest.mark.parametrize("recipe", SHORT, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_same_bits(recipe: Recipe, shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lead, k, n = shape
    lead = lead if isinstance(lead, tuple) else (lead,)
    passes, runs = count(monkeypatch), 0
    for i, (x_dtype, w_dtype) in enumerate(itertools.product(DTYPES, DTYPES)):
        torch.manual_seed(i)
        layer = mixprec.nn.Linear(k, n, bias=i % 3 != 1, dtype=w_dtype, recipe=recipe)
        x = special(torch.randn(*lead, k).to(x_dtype), i % 2 == 1)
        x = x.transpose(0, -1).contiguous().transpose(0, -1) if i % 4 == 2 else x
        g = special(torch.randn(*lead, n), i == 4).to(torch.float32 if i == 8 else x_dtype)
        main = torch.randn(n, k) if i % 5 == 3 else None

        def run(
            layer: Any = layer,
            x: torch.Tensor = x,
            g: torch.Tensor = g,
            i: int = i,
            main: Any = main,
        ) -> list[torch.Tensor | None]:
            layer.zero_grad(set_to_none=True)
            x = x.detach().requires_grad_(i % 6 != 5)
            layer.weight.requires_grad_(i % 7 != 6)
            if main is not None:
                layer.weight.main_grad = main.clone()
            before = [b.clone() for b in layer.buffers()]
            y = layer(x)
            if y.dtype == g.dtype and y.requires_grad:
                y.backward(g)
            after = [b.clone() for b in layer.buffers()]
            for buffer, value in zip(layer.buffers(), before, strict=True):
                buffer.copy_(value)
            grads = [x.grad, layer.weight.grad, getattr(layer.weight, "main_grad", None)]
            return [y.detach(), *grads, None if layer.bias is None else layer.bias.grad, *after]

        both(run)
        runs += 1
    assert passes.count("linear_forward") == runs
    assert passes.count("linear_backward") >= runs // 2


GROUPED = [
    *(recipe for recipe in SHORT if _group_casts.in_one_call(recipe)),
    Recipe("squares", E5M2, E4M3, E4M3, w_granularity="block128x128", g_granularity="row"),
    Recipe("rows", E4M3, E4M3, E5M2, power_of_two_scale=False, x_granularity="row"),
    Recipe(
        "blocks", E4M3, E5M2, E4M3, w_granularity="block1x128",
        x_granularity="block1x128", g_granularity="block1x128",
    ),
]  # fmt: skip


@pytest.mark.parametrize("recipe", GROUPED, ids=lambda recipe: recipe.name)
def test_the_same_bits_of_groups(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of experts, with empty groups, rows beyond the last, and operands of any strides."""
    passes, draw, backward = count(monkeypatch), random.Random(recipe.name), 0
    for i in range(24):
        torch.manual_seed(i)
        experts, s = draw.choice((0, 1, 2, 5)), draw.choice((0, 1, 40, 129, 300))
        k, n = (draw.choice((0, 1, 7, 33, 64, 128, 144, 257)) for _ in range(2))
        cuts = sorted(draw.choices(range(s + 1), k=experts))
        x_dtype, w_dtype = draw.choices(DTYPES, k=2)
        x = special(torch.randn(s, k), draw.random() < 0.2) * torch.rand(s, 1) * 10
        weight = special(torch.randn(experts, n, k), draw.random() < 0.1).to(w_dtype)
        x, g = x.to(x_dtype), special(torch.randn(s, n), draw.random() < 0.1)
        x = x.t().contiguous().t() if draw.random() < 0.3 else x
        swap = draw.choice(((0, 1), (0, 2), (1, 2), (0, 0)))
        weight = weight.transpose(*swap).contiguous().transpose(*swap)
        offs = torch.tensor([[end, 0] for end in cuts], dtype=torch.int32).view(experts, 2)[:, 0]
        main = torch.randn(experts, n, k) if draw.random() < 0.3 else None
        needs = draw.choice(((True, True), (True, True), (True, False), (False, True)))
        scale = torch.tensor(draw.choice(([0.0, 0.0], [8.0, 64.0])))
        dtype, no_grad = draw.choice((None, *DTYPES)), draw.random() < 0.1

        def run(
            x: Any = x, w: Any = weight, g: Any = g, offs: Any = offs, main: Any = main,
            needs: Any = needs, scale: Any = scale, dtype: Any = dtype, no_grad: bool = no_grad,
        ) -> list[torch.Tensor | None]:  # fmt: skip
            x, w = x.detach().requires_grad_(needs[0]), w.detach().requires_grad_(needs[1])
            if main is not None:
                w.main_grad = main.clone()
            state = operands.Delayed(scale, torch.zeros(()), torch.zeros(()))
            with torch.set_grad_enabled(not no_grad):
                y = grouped_linear(x, w, offs, recipe=recipe, delayed=state, out_dtype=dtype)
            if y.requires_grad:
                y.backward(g.to(y.dtype))
            versions = torch.tensor([t._version for t in state])
            main_grad = getattr(w, "main_grad", None)
            return [y.detach(), x.grad, w.grad, main_grad, *state, versions]

        both(run)
        backward += not no_grad
    assert passes.count("linear_forward") == 24
    assert passes.count("linear_backward") == backward


@pytest.mark.parametrize("recipe", GROUPED, ids=lambda recipe: recipe.name)
def test_groups_that_are_seen_later(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode around backward() sees the ops, of what one call saved and of what a checkpoint saves
    once more."""
    passes, offs = count(monkeypatch), torch.tensor([0, 70, 201], dtype=torch.int32)
    found = []
    for seen, again in itertools.product((False, True), (False, True)):
        torch.manual_seed(0)
        x, weight = torch.randn(203, 48).requires_grad_(), torch.randn(3, 48, 48).requires_grad_()
        state = operands.Delayed(torch.tensor([8.0, 64.0]), torch.zeros(()), torch.zeros(()))
        run = partial(grouped_linear, recipe=recipe, delayed=state)
        once = partial(checkpoint, run, use_reentrant=False) if again else run
        y = once(x, weight, offs)
        assert passes == ["linear_forward"]
        with Count() if seen else torch.enable_grad() as mode:
            y.backward(torch.ones_like(y))
        assert len(passes) == 1 + (not seen) * (1 + again)
        passes.clear()
        assert not seen or mode.names.count("mixprec::gemm_grouped") == 2 + again  # type: ignore
        found.append((x.grad, weight.grad, *state))
    assert all(torch.equal(a, b) for row in found for a, b in zip(row, found[0], strict=True))


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8-delayed", "mxfp8"])
def test_several_passes_of_one_layer(recipe: str) -> None:
    """Accumulation with cast weights, a checkpoint, a fused module with a shared cast, Conv2d 1x1,
    attention's projections, torch.autocast."""
    torch.manual_seed(0)
    x = torch.randn(4, 6, 32)

    def model() -> Any:
        torch.manual_seed(1)
        return mixprec.convert(
            nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8)), recipe
        )

    def grads(m: nn.Module, *outputs: torch.Tensor) -> list[torch.Tensor | None]:
        sum(y.float().square().mean() for y in outputs).backward()  # type: ignore[union-attr]
        return [*(y.detach() for y in outputs), *(p.grad for p in m.parameters()), *m.buffers()]

    def reused() -> list[torch.Tensor | None]:
        m = model()
        with mixprec.reuse_weights(m):
            return grads(m, m(x), m(2 * x))

    def checkpointed() -> list[torch.Tensor | None]:
        m, leaf = model(), x.clone().requires_grad_()
        return [*grads(m, checkpoint(m, leaf, use_reentrant=False)), leaf.grad]

    def autocast() -> list[torch.Tensor | None]:
        m = model()
        with torch.autocast("cpu", torch.bfloat16):
            y = m(x)
        return grads(m, y)

    def region() -> list[torch.Tensor | None]:
        m = model()
        with mixprec.autocast("fp8-rowwise"):
            y = m(x)
        return grads(m, y)

    def attention() -> list[torch.Tensor | None]:
        torch.manual_seed(1)
        m = mixprec.convert(nn.MultiheadAttention(32, 4, batch_first=True), recipe)
        return grads(m, m(x, x, x, need_weights=False)[0])

    def pointwise() -> list[torch.Tensor | None]:
        torch.manual_seed(1)
        m = mixprec.convert(nn.Sequential(nn.Conv2d(4, 8, 1)), recipe)
        return grads(m, m(x.view(1, 4, 6, 32)))

    def compressed() -> list[torch.Tensor | None]:
        m = model()
        with mixprec.compress_saved(bits=8):
            return grads(m, m(x))

    for run in (reused, checkpointed, autocast, region, attention, pointwise):
        both(run)
    results = []
    for backend in (None, "cpp"):
        with mixprec.use_backend(backend) if backend else torch.enable_grad():
            torch.manual_seed(2)
            results.append(compressed())
    assert all(a is None or torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8-rowwise", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("frozen", [(), ("up",), ("down",), ("gate", "up", "x"), ("down", "x")])
def test_fused_products(
    recipe: str, frozen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, n = count(monkeypatch), 33
    shapes = {"up": (64, n), "gate": (64, n), "down": (n, 64), "b": (64,), "c": (n,), "w": (n,)}

    def leaves() -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        made = {name: torch.randn(*shape) / 4 for name, shape in shapes.items()}
        made["x"] = torch.randn(2, 5, n).bfloat16()
        return {name: t.requires_grad_(name not in frozen) for name, t in made.items()}

    def mlp() -> list[torch.Tensor | None]:
        t = leaves()
        t["down"].main_grad = torch.ones(n, 64)  # type: ignore[attr-defined]
        y = mixprec.functional.mlp(
            *(t["x"], t["up"], t["down"], t["b"], t["c"]), gate=t["gate"], act="silu",
            norm="rms", norm_weight=t["w"], recipe=recipe,
        )  # fmt: skip
        y.backward(torch.randn_like(y))
        return [y.detach(), *(v.grad for v in t.values()), t["down"].main_grad]  # type: ignore[attr-defined]

    def heads() -> list[torch.Tensor | None]:
        t = leaves()
        weights, biases = (t["up"], t["gate"]), (t["b"], None)
        y, z, total = mixprec.functional.norm_linear(
            t["x"], weights, biases, norm_weight=t["w"], residual=t["x"], recipe=recipe
        )
        (y.float().sum() + z.float().square().sum() + total.float().sum()).backward()
        return [y.detach(), z.detach(), *(v.grad for v in t.values())]

    for run, products in ((mlp, 3), (heads, 2)):
        passes.clear()
        both(run)
        assert passes.count("linear_forward") == products
        assert passes.count("linear_backward") == (run is mlp)


def test_an_error_of_a_hook_is_raised_once() -> None:
    layer, packed = mixprec.nn.Linear(16, 8, recipe="fp8"), []

    def pack(t: torch.Tensor) -> torch.Tensor:
        packed.append(t)
        raise RuntimeError("full")

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        pytest.raises(RuntimeError, match="full"),
    ):
        layer(torch.randn(2, 16, requires_grad=True))
    assert len(packed) == 1


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_what_has_to_see_each_op_does(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = mixprec.nn.Linear(16, 16, recipe="fp8"), torch.randn(4, 16, requires_grad=True)
    passes = count(monkeypatch)
    with Count() as mode:
        y = layer(x)
    assert not passes
    assert {"mixprec::quantize", "mixprec::gemm"} <= {*mode.names}
    y = layer(x)
    assert passes.pop() == "linear_forward"
    with Count() as mode:
        y.backward(torch.ones_like(y))
    assert not passes
    assert {"mixprec::quantize", "mixprec::gemm"} <= {*mode.names}
    with mixprec.simulate("h100"):
        layer(x)
    torch.func.vmap(layer)(x)
    torch.func.grad(lambda t: layer(t).sum())(x)
    torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    with mixprec.functional.twice_differentiable():
        layer(x)
    layer(x.detach().as_subclass(type("Own", (torch.Tensor,), {})))
    mixprec.audit(nn.Sequential(layer), (x,), loss=torch.sum)
    assert not passes
    y = layer(x)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    y = layer(x)
    one = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)[0]
    grads = torch.autograd.grad(y, x, torch.ones(2, *y.shape), is_grads_batched=True)[0]
    assert torch.equal(grads[1], one)
    assert passes == ["linear_forward", "linear_forward", "linear_backward"]


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "mxfp8"])
def test_how_many_calls_of_python(recipe: str) -> None:
    layer = mixprec.nn.Linear(16, 16, recipe=recipe)
    x, calls = torch.randn(4, 16, requires_grad=True), []

    def profile(frame: Any, event: str, _: object) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    def counted(run: Callable[[], Any]) -> int:
        run()
        calls.clear()
        sys.setprofile(profile)
        try:
            run()
        finally:
            sys.setprofile(None)
        return len(calls)

    assert counted(lambda: layer(x)) <= 26, calls  # with the lambda
    y = layer(x)
    g = torch.ones_like(y)
    assert counted(lambda: y.backward(g, retain_graph=True)) <= 31, calls


def test_what_is_wrong_is_said_as_before() -> None:
    layer = mixprec.nn.Linear(16, 8, recipe="fp8")
    with pytest.raises(ValueError, match=r"x must be \[..., K\] with K = 16"):
        layer(torch.randn(2, 15))
    layer.bias = nn.Parameter(torch.randn(7))
    with pytest.raises(ValueError, match=r"gemm: bias must have shape \[N\]"):
        layer(torch.randn(2, 16))
    x = torch.randn(2, 16).bfloat16().requires_grad_()
    for recipe, change, message in (
        ("bf16", lambda m: m.weight.untyped_storage().resize_(0), "out of bounds for storage"),
        ("bf16", lambda m: m.half(), "must both be"),
        ("bf16", lambda m: setattr(m.weight, "data", torch.ones(8, 3).bfloat16()), "invalid"),
        ("fp8", lambda m: setattr(m.weight, "main_grad", -torch.ones(8, 16).T), "main_grad"),
    ):
        layer = mixprec.nn.Linear(16, 8, bias=False, dtype=torch.bfloat16, recipe=recipe)
        y = layer(x)
        change(layer)
        run = partial(layer, x) if recipe == "fp8" else partial(y.backward, torch.ones_like(y))
        with pytest.raises((RuntimeError, ValueError), match=message):
            run()
    y = mixprec.nn.Linear(16, 8, recipe="bf16")(x)
    with pytest.raises(ValueError, match="must be a dense tensor"):
        y.backward(torch.ones(2, 8, dtype=y.dtype).to_sparse())
    narrow = mixprec.nn.Linear(1, 8, dtype=torch.bfloat16, recipe="bf16")
    y = narrow(x[:, :1])
    narrow.weight.data = torch.ones(8, 5).bfloat16()
    with pytest.raises(RuntimeError, match="shape"):
        y.backward(torch.ones_like(y))
    w, other = torch.randn(16, 16), torch.randn(9, 16)
    parsed = mixprec.Recipe.parse("fp8-rowwise")
    for given, message in ((other, "shape"), (w, "use_t=True")):
        kept = operands.cast(given, "w", parsed, None, use_t=given is other)
        with pytest.raises((RuntimeError, ValueError), match=message):
            mixprec.functional.linear(x, w, recipe=parsed, quantized_weight=kept)
    x, w, offs = torch.randn(4, 16).bfloat16(), torch.randn(2, 8, 16).bfloat16(), [1, 4]
    for change, message in (
        (lambda w, offs: offs.data.fill_(9), "ends of the groups"),
        (lambda w, offs: offs.zero_(), "modified by an inplace operation"),
        (lambda w, offs: w.untyped_storage().resize_(0), "out of bounds for storage"),
        (lambda w, offs: setattr(w, "data", torch.ones(2, 8, 3).bfloat16()), "invalid"),
        (lambda w, offs: setattr(w, "main_grad", torch.zeros(2, 8, 15)), "main_grad"),
    ):
        ends, weight = torch.tensor(offs, dtype=torch.int32), nn.Parameter(w.clone())
        y = grouped_linear(x.requires_grad_(), weight, ends, recipe="bf16")
        change(weight, ends)
        again = partial(grouped_linear, x, weight, ends, recipe="bf16")
        run = again if message == "main_grad" else partial(y.backward, torch.ones_like(y))
        with pytest.raises((RuntimeError, ValueError), match=message):
            run()
    layer = mixprec.nn.Linear(16, 8, recipe="fp8-delayed")
    layer.weight.main_grad = torch.zeros(8, 15)
    with pytest.raises(ValueError, match="main_grad"):
        layer(torch.randn(2, 16))
