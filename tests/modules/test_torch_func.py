"""The transforms of torch.func over converted layers: bits of loops over the samples."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import independent as ind
import pytest
import torch
from cases import for_each
from models import Model
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, stack_module_state, vjp, vmap
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec.functional import (
    attention,
    grouped_linear,
    linear,
    mlp,
    norm_linear,
    rotary,
)
from mixprec.functional._derivatives import apply
from mixprec.functional._one_pass import RowNorm
from mixprec.recipes import RECIPES
from mixprec.stats import Monitor

Tensors = tuple[torch.Tensor, ...]
# But for those that draw random numbers in forward, which a loop does in another order.
STATELESS = [name for name, r in RECIPES.items() if not (r.is_delayed or r.backward)]
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(32, 16), (4, 32)),
    "row": (lambda: nn.Linear(32, 16, bias=False), (32,)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding="same", groups=2), (2, 4, 6, 6)),
    "pointwise": (lambda: nn.Conv2d(4, 6, 1), (2, 4, 6, 6)),
    "block": (lambda: nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)), (3, 32)),
}


def same(got: Any, want: Any) -> None:
    for x, y in zip(got, want, strict=True):
        ind.assert_same_bits(x.contiguous(), y.contiguous())


class Task:
    """A converted layer with its parameters, samples, and the gradients of each by a loop."""

    def __init__(self, kind: str, recipe: str, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        make, shape = LAYERS[kind]
        self.layer = mixprec.convert(make(), recipe).to(dtype)
        self.params = {name: p.detach() for name, p in self.layer.named_parameters()}
        self.xs = torch.randn(3, *shape).to(dtype)
        self.random = {"randomness": "different"} if RECIPES[recipe].is_random else {}

    def loss(self, params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(self.layer, params, (x,)).float().square().sum()

    def by_loop(self) -> list[Tensors]:
        torch.manual_seed(1)
        found = []
        for x in self.xs:
            x = x.clone().requires_grad_()
            wanted = [*self.layer.parameters(), x]
            y = self.layer(x).float().square().sum()
            found.append(torch.autograd.grad(y, wanted))
        return found


@for_each("dtype", [torch.float32, torch.bfloat16])
@for_each("kind, recipe", [(kind, recipe) for recipe in STATELESS for kind in LAYERS])
def test_grad_and_gradients_of_each_sample(kind: str, recipe: str, dtype: torch.dtype) -> None:
    task = Task(kind, recipe, dtype)
    of_each, want = grad(task.loss, argnums=(0, 1)), task.by_loop()
    torch.manual_seed(1)
    for x, expected in zip(task.xs, want, strict=True):
        of_params, of_x = of_each(task.params, x)
        same([*of_params.values(), of_x], expected)
    outputs = torch.stack([task.layer(x) for x in task.xs])
    same(vmap(task.layer, **task.random)(task.xs), outputs)
    torch.manual_seed(1)
    of_params, of_x = vmap(of_each, (None, 0), **task.random)(task.params, task.xs)
    if kind != "block" or not task.random:  # two layers draw in another order
        same([*of_params.values(), of_x], [torch.stack(t) for t in zip(*want, strict=True)])


@for_each("recipe", ["bf16", "fp8", "mxfp8"])
def test_other_transforms(recipe: str) -> None:
    task = Task("linear", recipe)
    layer, xs, x = task.layer, task.xs, task.xs[0]
    y, pull = vjp(layer, x)
    jacobian = jacrev(layer)(x)
    rows = torch.eye(y.numel()).view(y.numel(), *y.shape)
    same([jacobian.flatten(0, 1)], [torch.stack([pull(g)[0] for g in rows])])
    # The gradient of a sum over vmap, and vmap in vmap.
    total = grad(lambda p: vmap(task.loss, (None, 0))(p, xs).sum())(task.params)
    layer.zero_grad()
    torch.stack([layer(one).square().sum() for one in xs]).sum().backward()
    same(total.values(), [p.grad for p in layer.parameters()])
    grid = torch.randn(2, 3, 4, 32)
    want = torch.stack([torch.stack([layer(one) for one in row]) for row in grid])
    same(vmap(vmap(layer))(grid), want)
    same(vmap(layer, 1, 2)(grid[0].movedim(0, 1)), want[0].movedim(0, 2))
    assert vmap(layer)(torch.zeros(0, 4, 32)).shape == (0, 4, 16)
    # Models in an ensemble, and the ordinary backward pass of a vmap.
    models = [Task("linear", recipe).layer for _ in range(2)]
    nn.init.ones_(models[1].weight)
    params, buffers = stack_module_state(models)
    many = vmap(lambda p, b: functional_call(layer, (p, b), (x,)))(params, buffers)
    same(many, [model(x) for model in models])
    many.square().sum().backward()
    for n, model in enumerate(models):
        model(x).square().sum().backward()
        same([params[name].grad[n] for name in params], [p.grad for p in model.parameters()])


@for_each("recipe", ["bf16", "fp8-block"])
def test_fused_functions(recipe: str) -> None:
    w, v, u, ones = torch.randn(16, 32), torch.randn(32, 16), torch.randn(16, 32), torch.ones(32)
    heads, turn = (1, 2, 4, 4), (torch.ones(4, 2), torch.zeros(4, 2))
    functions: dict[str, Callable[[torch.Tensor], Any]] = {
        "norm_linear": lambda x: norm_linear(x, (w, u), norm_weight=ones, recipe=recipe),
        "residual": lambda x: norm_linear(x, w, norm="layer", residual=x * 2, recipe=recipe),
        "mlp": lambda x: (mlp(x, w, v, gate=u, act="silu", norm="rms", recipe=recipe),),
        "same": lambda x: (linear(x, x, recipe=recipe),),
        "twice": lambda x: norm_linear(x, w, residual=x, recipe=recipe),
        "norm": lambda x: (apply("norm", RowNorm, x, ones, None, 1e-6, False, torch.bfloat16),),
        "attention": lambda x: (attention(*(x.view(heads),) * 3, causal=True),),
        "rotary": lambda x: (rotary(x.view(heads), *turn),),
        "wide": lambda x: linear(x, w, recipe=recipe).square().unbind(),
    }
    xs = torch.randn(2, 1, 32)
    for name, function in functions.items():

        def loss(x: torch.Tensor, function: Any = function) -> torch.Tensor:
            return sum(y.float().square().sum() for y in function(x))

        leaves = [x.clone().requires_grad_() for x in xs]
        want = torch.stack([torch.autograd.grad(loss(x), x)[0] for x in leaves])
        got = vmap(grad(loss))(xs)
        outputs = [torch.stack(y) for y in zip(*map(function, xs), strict=True)]
        if name == "attention":  # torch's kernels there
            torch.testing.assert_close((got, *vmap(function)(xs)), (want, *outputs))
        else:
            same((got, *vmap(function)(xs)), (want, *outputs))


@for_each("kind", LAYERS)
def test_second_derivatives_and_forward_mode_are_refused(kind: str) -> None:
    """Also where the first gradient depends on an input through what was saved alone."""
    task = Task(kind, "fp8")
    x, message = task.xs[0], r"reverse mode only .*not jvp.*enabled=False"
    linear_loss = lambda p, x: functional_call(task.layer, p, (x,)).sum()  # noqa: E731
    first = lambda p: grad(linear_loss, argnums=1)(p, x).sum()  # noqa: E731
    for call in (
        lambda: jvp(task.layer, (x,), (x,)),
        lambda: hessian(lambda x: task.layer(x).sum())(x),
        lambda: grad(lambda x: grad(lambda x: task.layer(x).square().sum())(x).sum())(x),
        lambda: grad(first)(task.params),
        lambda: jacrev(first)(task.params),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()
    with mixprec.autocast(enabled=False):
        assert hessian(lambda x: task.layer(x).sum())(x).shape == (*x.shape, *x.shape)


def test_recipes_with_state_are_refused() -> None:
    x = torch.randn(4, 32)
    clip = dataclasses.replace(RECIPES["fp16"], name="fp16-clip", clip_activations=True)
    for recipe, what in (("fp8-delayed", "fp8-delayed, which keeps state"), (clip, "fp16-clip")):
        for make, shape in LAYERS.values():
            layer = mixprec.convert(make(), recipe)
            with pytest.raises(RuntimeError, match=f"do not support recipe {what}.*enabled=False"):
                grad(lambda x, layer=layer: layer(x).sum())(torch.randn(shape))
    layer = mixprec.nn.Linear(32, 16)
    layer.weight.main_grad = torch.zeros(16, 32)
    with pytest.raises(RuntimeError, match=r"linear: .* do not support weights with main_grad"):
        vmap(layer)(x)
    nvfp4 = mixprec.nn.Linear(32, 16, recipe="nvfp4-1x16")
    with pytest.raises(RuntimeError, match="pass randomness=\"different\", got 'error'"):
        vmap(nvfp4)(x)


def test_a_monitor_leaves_out_what_torch_func_runs_and_audit_does_not() -> None:
    task = Task("linear", "fp8")
    run = functools.partial(vmap(grad(lambda x: task.layer(x).sum())), task.xs)
    with Monitor(task.layer, every=1) as monitor:
        run()
        monitor.step()
        task.layer(task.xs[0]).sum().backward()
        monitor.step()
    assert {r["step"]: len(r["tensors"]) for r in monitor.records} == {0: 0, 1: 4}
    with mixprec.audit(task.layer, sqnr=True) as audit:
        run()
    losses = {name: lost for op in audit.ops for name, lost in op.lost.items()}
    assert all(20 < losses[name].own < 50 for name in ("y", "grad_weight"))


def test_torch_compile_leaves_transforms_to_torch_func() -> None:
    """Traced, they would give a gradient of 0."""
    task = Task("linear", "fp8")

    def of_each(xs: torch.Tensor) -> torch.Tensor:
        return vmap(grad(lambda x: task.layer(x).square().sum()))(xs)

    with pytest.raises(RuntimeError, match="run_transformed"):
        torch.compile(of_each, backend="aot_eager", fullgraph=True)(task.xs)
    torch._dynamo.reset()
    same(torch.compile(of_each, backend="aot_eager")(task.xs), of_each(task.xs))


@pytest.mark.parametrize("recipe", ["bf16", "fp16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_vmap_in_torchs_autocast_to_any_16_bits(recipe: str, dtype: torch.dtype) -> None:
    layer, x = mixprec.convert(nn.Linear(8, 4), recipe), torch.randn(3, 5, 8)
    with torch.autocast("cpu", dtype):
        y = vmap(layer)(x)
        same([y], [torch.stack([layer(sample).float() for sample in x]).to(dtype)])


# Several gradients in one call: is_grads_batched, and jacobian with vectorize


def fused(*parts: nn.Module) -> Callable[[str], nn.Module]:
    return lambda recipe: mixprec.convert(nn.Sequential(*parts), recipe, fuse=True)


def causal_attention() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (2, 48)).transpose(-2, -3).chunk(3, -1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(-2, -3).flatten(-2))

    return Model(forward, qkv=nn.Linear(32, 96), out=nn.Linear(32, 32))


def experts(recipe: str) -> nn.Module:
    ends, weight = torch.tensor([2, 6], dtype=torch.int32), nn.Parameter(torch.randn(2, 16, 32))
    return Model(lambda self, x: grouped_linear(x, self.w, ends, recipe=recipe), w=weight)


def again(recipe: str) -> nn.Module:
    inner = mixprec.convert(nn.Linear(32, 16), recipe)
    return Model(lambda self, x: checkpoint(self.inner, x, use_reentrant=False), inner=inner)


CLIPPED = dataclasses.replace(mixprec.Recipe.parse("fp16"), clip_activations=True)
BATCHED: dict[str, tuple[Callable[[str], Any], tuple[int, ...]]] = {
    "linear": (lambda r: mixprec.convert(nn.Linear(32, 16), r), (3, 32)),
    "norm": (fused(nn.LayerNorm(32), nn.Linear(32, 32)), (3, 32)),
    "mlp": (fused(nn.RMSNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), (3, 32)),
    "attention": (lambda r: mixprec.convert(causal_attention(), r, fuse=True), (2, 4, 32)),
    "conv": (lambda r: mixprec.convert(nn.Conv2d(4, 8, 3), r), (2, 4, 5, 5)),
    "conv 1": (lambda r: mixprec.convert(nn.Conv2d(4, 8, 1), r), (2, 4, 3, 3)),
    "transposed": (lambda r: mixprec.convert(nn.ConvTranspose1d(4, 8, 3), r), (2, 4, 5)),
    "experts": (experts, (6, 32)),
    "loss": (lambda r: mixprec.nn.LinearCrossEntropy(32, 10, reduction="none", recipe=r), (6, 32)),
    "checkpoint": (again, (3, 32)),
    "clipped": (lambda _: mixprec.convert(nn.Linear(32, 16), CLIPPED), (3, 32)),
}


@for_each("recipe", ["bf16", "fp8", "fp8-rowwise", "fp8-block"])
@for_each("name", BATCHED)
def test_batched_gradients_are_those_of_one_call_each(name: str, recipe: str) -> None:
    make, shape = BATCHED[name]
    torch.manual_seed(0)
    model, x = make(recipe), torch.randn(shape, requires_grad=True)
    args = (torch.arange(6),) if name == "loss" else ()
    inputs = [x, *model.parameters()]
    y = model(x, *args)
    grads = torch.randn(3, *y.shape)
    want = [torch.autograd.grad(y, inputs, g, retain_graph=True) for g in grads]
    got = torch.autograd.grad(model(x, *args), inputs, grads, is_grads_batched=True)
    for batch, parts in zip(got, zip(*want, strict=True), strict=True):
        assert torch.equal(batch, torch.stack(parts))


def test_state_is_refused() -> None:
    layer, x = mixprec.nn.Linear(8, 4, recipe="fp8-delayed"), torch.randn(2, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="keep state"):
        torch.autograd.grad(layer(x), x, torch.ones(3, 2, 4), is_grads_batched=True)


def test_nothing_of_a_node_is_shadowed() -> None:
    """`ctx` is a node of torch's graph, whose name and edges others read."""
    own = set(dir(torch.autograd.function.BackwardCFunction)) - {"saved_tensors"}  # of a stand-in
    for path in (Path(mixprec.__file__).parent).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                is_node = isinstance(node.value, ast.Name) and node.value.id == "ctx"
                assert not (is_node and node.attr in own), f"{path}:{node.lineno}: {node.attr}"
