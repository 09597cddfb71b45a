"""compress_saved: what is compressed, how far gradients move, and what it composes with."""

from __future__ import annotations

import copy
import gc
import io
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cases import for_each
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec.memory.compress_saved import recorded
from mixprec.memory.forms import Mask, Negative
from mixprec.memory.packed import Codes, Saved

ROWS, WIDTH = 64, 128


class Block(nn.Module):
    """Attention and an MLP, with a buffer that is saved by a product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH))
        self.register_buffer("gate", torch.rand(ROWS, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(4, -1, 3, 4, 32).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + y.transpose(1, 2).reshape(x.shape) * self.gate
        return x + self.mlp(x)


def block(recipe: str | None = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Block()
    return mixprec.convert(model, recipe, **options) if recipe else model


def batch() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    run().float().square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def compressed(model: nn.Module, bits: Any = "int8", **options: Any) -> list[torch.Tensor]:
    x = batch()

    def run() -> torch.Tensor:
        with mixprec.compress_saved(bits, **options):
            return model(x)

    return gradients(model, run)


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(map(torch.equal, a, b))


def error(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """The largest relative error of a gradient, in the Frobenius norm."""
    return max(float((x - y).norm() / y.norm()) for x, y in zip(a, b, strict=True))


def bits_of(t: Saved) -> int:
    codes = [p.bits for p in t.parts.pieces if isinstance(p, Codes)]
    return sum(codes) + isinstance(t.parts.form, (Mask, Negative))


def saved(run: Callable[[], object], bits: Any = "int8", **options: Any) -> list[tuple[str, Any]]:
    """(kind, bits or None for a tensor kept as it is) of each tensor that run() saves, in order."""
    found: list[tuple[str, Any]] = []

    def record(kind: str, t: torch.Tensor | Saved) -> None:
        found.append((kind, bits_of(t) if isinstance(t, Saved) else None))

    with recorded(record), mixprec.compress_saved(bits, **options):
        run()
    return found


@for_each("recipe", [None, "bf16", "fp8"])
@for_each("bits", [("int8", 0.04), ("int4", 0.3)])
def test_gradients_are_close(recipe: str | None, bits: tuple[str, float]) -> None:
    model = block(recipe)
    plain = gradients(model, lambda: model(batch()))
    found = compressed(model, bits[0], seed=0)
    assert 0 < error(found, plain) < bits[1]


def test_the_forward_pass_is_the_same_and_without_gradients_nothing_happens() -> None:
    model, before = block(), torch.get_rng_state()
    with mixprec.compress_saved("int4"), torch.no_grad():
        y = model(batch())
    assert torch.equal(before, torch.get_rng_state())
    with mixprec.compress_saved("int4"):
        assert torch.equal(model(batch()), y)


def test_the_gradients_error_has_mean_zero() -> None:
    x, g = torch.randn(128, 64, requires_grad=True), torch.randn(128, 64)

    def grad(seed: int) -> torch.Tensor:
        with mixprec.compress_saved("int4", seed=seed):
            y = (x * 1.5).square()
        (found,) = torch.autograd.grad(y, x, g)
        return found

    exact = 1.5 * 3 * x.detach() * g
    errors = torch.stack([grad(seed) - exact for seed in range(64)])
    assert errors.abs().mean() > 0.01
    # The mean of 64 independent errors has a 64th of their variance; a bias would add to that.
    assert errors.mean(0).square().mean() < 1.5 / 64 * errors.square().mean()


@for_each("mode", [("int8", [8, 8, 8]), ("int4", [4, 8, 4])])
def test_what_an_op_saves_decides(mode: tuple[str, list[int]]) -> None:
    bits, (of_linear, of_attention, of_activation) = mode
    x = torch.randn(4, 8, 64, 32, requires_grad=True) * 1
    w = torch.randn(32, 32, requires_grad=True)
    for run, expected in (
        (lambda: F.linear(x, w), {("linear", of_linear)}),
        (lambda: F.linear(x, w.t().contiguous()), {("linear", of_linear), ("linear", None)}),
        (lambda: x @ x.transpose(-1, -2), {("attention", of_attention)}),
        (lambda: F.gelu(x), {("activation", of_activation)}),
        (lambda: F.layer_norm(x, (32,)), {("norm", of_activation), ("norm", None)}),  # rstd, mean
        (lambda: F.scaled_dot_product_attention(x, x, x), {("attention", 16), ("attention", 8)}),
        (lambda: x.relu(), {("activation", 1)}),
        (lambda: F.elu(x), {("activation", 9)}),
        (lambda: F.elu(x * 1, inplace=True), {("activation", None)}),  # the result
        (lambda: x.sigmoid(), {("activation", 8)}),
        (lambda: torch.linalg.vector_norm(x), {("other", None)}),
        (lambda: x.norm(), {("other", None)}),  # not mixprec's norm
        (lambda: x.pow(3), {("other", None)}),
        (lambda: F.cross_entropy(x.flatten(0, 2), torch.zeros(2048).long()), {("loss", None)}),
        (lambda: x / (x.detach() + 9), {("other", None)}),
        (lambda: x.exp(), {("other", None)}),
        (lambda: x.amax(-1), {("other", None)}),  # x == amax in backward
        (lambda: x.pow(2), {("other", 8)}),
        (lambda: x.pow(-1), {("other", None)}),
        (lambda: torch.linalg.inv(x[..., :32, :]), {("other", None)}),
        (lambda: x.square(), {("other", 8)}),
        (lambda: x.abs(), {("other", None)}),  # the sign of x
        (lambda: x.double() * x.double(), {("activation", None)}),
        (lambda: x[:1, :1] * x[:1, :1], {("activation", None)}),  # 2,048 elements
        (lambda: x * torch.ones(64, 32), {("activation", None)}),  # a constant
    ):
        found = set(saved(run, bits))
        if ("attention", 8) in expected or expected == {("linear", of_linear)}:
            found.discard((next(iter(expected))[0], None))  # logsumexp, the weight
        assert found == expected


def test_values_that_are_kept_anyway_are_not_compressed() -> None:
    """Parameters, their views and casts, buffers, inputs; results without a gradient are."""
    x, w = torch.randn(128, 64), nn.Parameter(torch.randn(64, 64))
    frozen, hidden = torch.randn(64, 64), torch.randn(128, 64, requires_grad=True) * 1
    for run, expected in (
        (lambda: x @ w, {None}),
        (lambda: hidden.relu() @ w.t(), {1, 8, None}),
        (lambda: hidden @ w.t().bfloat16().float(), {8, None}),
        (lambda: hidden * x, {None}),
        (lambda: hidden * x.reshape(64, 128).view(128, 64), {None}),
        (lambda: x.relu() @ w, {8}),
        (lambda: F.linear(hidden, frozen), {None}),
    ):
        assert {bits for _, bits in saved(run)} == expected
    with torch.autocast("cpu", torch.bfloat16):
        assert saved(lambda: F.linear(hidden, frozen)) == [("linear", None)]
        assert {b for _, b in saved(lambda: F.linear(hidden, w))} == {8, None}


def test_nothing_is_left_on_tensors() -> None:
    """torch.save would store it."""
    model, made = block("bf16").bfloat16(), []
    with mixprec.compress_saved("int8"):
        model(batch().bfloat16())
        made.append(torch.ones(64) * 2)
    for t in (*model.parameters(), *model.buffers(), *made):
        assert not vars(t)


def test_an_additive_mask_is_kept() -> None:
    q = torch.randn(2, 4, 64, 32, requires_grad=True)
    mask = torch.zeros(2, 1, 64, 64).index_fill_(3, torch.arange(40, 64), -torch.inf)
    with mixprec.compress_saved("int8"):
        y = F.scaled_dot_product_attention(q * 1, q * 2, q * 3, attn_mask=mask * 1)
    y.sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()


def test_a_tensor_is_packed_once() -> None:
    x = torch.randn(128, 64, requires_grad=True) * 1
    w = torch.randn(64, 64, requires_grad=True)
    parts: list[Any] = []

    def record(kind: str, t: torch.Tensor | Saved) -> None:
        if isinstance(t, Saved):
            parts.append(t.parts)

    def count(run: Callable[[], object]) -> int:
        parts.clear()
        with recorded(record), mixprec.compress_saved("int8"):
            kept = run()
        del kept
        return len(set(map(id, parts)))

    def written() -> object:
        y = F.linear(x, w)
        x.data.mul_(2)  # which does not change the version
        return y, F.linear(x, w)

    for run, expected in (
        (lambda: (F.linear(x, w), x.view(64, 128) @ w.view(128, 32), x @ w.t()), 1),
        (lambda: (x * x, x.square()), 1),
        (lambda: (F.linear(x, w), F.linear(x * 1, w)), 2),
        (lambda: (F.linear(x, w), F.gelu(x)), 2),  # limited values
        (lambda: x * torch.sigmoid(F.linear(x, w)), 4),  # see below
        (written, 2),
    ):
        assert count(run) == expected


@for_each("function", [lambda x, w: x * (x @ w), lambda x, w: (x @ x.t()) @ x, "bilinear"])
def test_errors_are_not_multiplied_with_themselves(function: Any) -> None:
    """One error in two factors of a gradient would bias it by its variance."""
    x, w = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
    x[:, 3] = 100
    x.requires_grad_()

    def grads() -> list[torch.Tensor]:
        a = x * 1
        y = F.bilinear(a, a, w[None]) if function == "bilinear" else function(a, w)
        return list(torch.autograd.grad(y.sum() / 64, [x, w][: 1 + (y.shape[-1] == 1)]))

    exact = grads()
    errors = []
    for seed in range(100):
        with mixprec.compress_saved("int4", seed=seed):
            errors.append([a - b for a, b in zip(grads(), exact, strict=True)])
    for one in map(torch.stack, zip(*errors, strict=True)):
        assert one.mean(0).square().mean() < 1.5 / 100 * one.square().mean()


def test_codes_are_freed_and_an_address_used_again_is_no_tensor_known() -> None:
    w = torch.randn(64, 64, requires_grad=True)
    with mixprec.compress_saved("int8"):
        for value in (1.0, 2.0, 3.0):  # each x lies where the one before lay
            x = torch.full((128, 64), value) * torch.ones(1)
            (grad,) = torch.autograd.grad((x @ w).sum(), w)
            assert torch.allclose(grad, torch.full_like(grad, 128 * value), rtol=0.01)
            del x
    gc.collect()


def test_strided_tensors_come_back_where_they_were() -> None:
    base = torch.randn(64, 3, 128, requires_grad=True) * 1
    for view in (base[:, 1], base.transpose(0, 2), base[:, :, ::2], base[:, 1].t()):
        with mixprec.compress_saved("int8"):
            y = view * view
        kept = y.grad_fn._saved_self  # type: ignore[union-attr]
        assert kept.shape == view.shape
        assert (kept - view).abs().max() < 0.05


@for_each("value", [torch.inf, torch.nan])
def test_an_overflow_reaches_the_gradients(value: float) -> None:
    w = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(128, 64) * 1
    x[3, 5] = value
    with mixprec.compress_saved("int4"):
        y = (x * 1) @ w
    y[8:].sum().backward()  # whose x are finite: without compression the gradient is 0 * value
    assert w.grad is not None
    assert w.grad.isnan().any()


def test_seeds_determine_the_bits() -> None:
    model = block()
    first = compressed(model, seed=3)
    assert equal(first, compressed(model, seed=3))
    assert not equal(first, compressed(model, seed=4))
    torch.manual_seed(5)
    drawn, next_one = compressed(model), compressed(model)
    assert not equal(drawn, next_one)
    torch.manual_seed(5)
    assert equal(drawn, compressed(model))


def test_a_resumed_run_goes_on_with_the_same_bits(tmp_path: Any) -> None:
    def run(steps: range, path: Any, load: bool) -> list[torch.Tensor]:
        model = block("bf16", saved="int4")
        optimizer = mixprec.optim.AdamW(model.parameters())
        if load:
            mixprec.load_checkpoint(path, model=model, optimizer=optimizer)
        for _ in steps:
            gradients(model, lambda: model(batch()))
            optimizer.step()
        if not load:
            mixprec.save_checkpoint(path, model=model, optimizer=optimizer)
        return [p.detach().clone() for p in model.parameters()]

    run(range(2), tmp_path / "a.pt", False)
    expected = run(range(4), tmp_path / "b.pt", False) if torch.manual_seed(0) else []
    torch.manual_seed(0)
    run(range(2), tmp_path / "a.pt", False)
    torch.manual_seed(99)
    assert equal(run(range(2, 4), tmp_path / "a.pt", True), expected)


def test_patterns_choose_by_module() -> None:
    model, x = block(), batch().requires_grad_() * 1
    found = saved(lambda: model(x), {"mlp": 8, "mlp.1": "int4", "*.2": None}, model=model)
    assert {b for kind, b in found if kind in ("norm", "attention")} == {None}
    assert {b for kind, b in found if kind == "activation"} >= {4}
    assert [b for kind, b in found if kind == "linear"].count(8) == 1
    assert not any(module._forward_hooks for module in model.modules())


@for_each(
    "case",
    [
        ("int2", None, 'must be "int8", "int4", 8 or 4, got \'int2\''),
        ({"*": 3}, block, "got 3"),
        ({"*.mlp": 8}, block, r"match no module of the model: \['\*.mlp'\]"),
        ({"*": 8}, None, "need model="),
    ],
)
def test_errors(case: tuple[Any, Any, str]) -> None:
    bits, model, message = case
    with (
        pytest.raises(ValueError, match=message),
        mixprec.compress_saved(bits, model=model and model()),
    ):
        raise AssertionError("entered")
    if model is not None or not isinstance(bits, dict):
        with pytest.raises(ValueError, match=message):
            mixprec.convert(block(), "bf16", saved=bits)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_keeps_its_inputs(reentrant: bool) -> None:
    """The forward pass that it computes again has no reason to be right on average."""
    model, x = block("bf16").bfloat16(), batch().bfloat16().requires_grad_()

    def run() -> torch.Tensor:
        return checkpoint(model, x * 2, use_reentrant=reentrant)

    plain = gradients(model, run)

    def inside() -> torch.Tensor:
        with mixprec.compress_saved("int8", seed=0):
            return run()

    assert equal(gradients(model, inside), plain)


def test_backward_twice_and_second_derivatives() -> None:
    model = block()
    with mixprec.compress_saved("int8", seed=0):
        loss = model(batch()).square().mean()
    params = list(model.parameters())
    first = torch.autograd.grad(loss, params, retain_graph=True)
    assert equal(list(first), list(torch.autograd.grad(loss, params)))
    layer, x = mixprec.nn.Linear(128, 128, recipe="bf16"), batch().requires_grad_()

    def penalty() -> list[torch.Tensor]:
        with mixprec.functional.twice_differentiable():
            (g,) = torch.autograd.grad(layer(x * 1).square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(g.square().mean(), [x, layer.weight]))

    plain = penalty()
    with mixprec.compress_saved("int8", seed=0):
        assert 0 < error(penalty(), plain) < 0.05


def test_threads_do_not_see_each_other_and_exceptions_restore() -> None:
    found: list[Any] = []
    x = torch.randn(128, 64, requires_grad=True)

    def other() -> None:
        y = F.gelu(x * 2)
        found.append(y.grad_fn._saved_self)  # type: ignore[union-attr]

    def fail() -> None:
        with mixprec.compress_saved("int8"):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            with mixprec.compress_saved("int4"):
                _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        fail()
    other()
    assert len(found) == 2
    assert all(torch.equal(kept, x * 2) for kept in found)


def test_with_autocast() -> None:
    model = block("fp8")
    for context in (torch.autocast("cpu", torch.bfloat16), mixprec.autocast("bf16")):

        def run(context: Any = context) -> torch.Tensor:
            with context:
                return model(batch())

        plain = gradients(model, run)
        with mixprec.compress_saved("int8", seed=0):
            assert 0 < error(gradients(model, run), plain) < 0.1


def test_convert_runs_the_model_compressed_until_unconvert() -> None:
    model = block("bf16", saved="int8")
    names = set(model.state_dict())
    plain, reference = block("bf16"), compressed

    def grads(m: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        return gradients(m, lambda: m(batch()))

    torch.manual_seed(1)
    expected = reference(plain)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    twin = copy.deepcopy(model)
    for m in (model, twin, torch.load(buffer, weights_only=False)):
        assert equal(grads(m), expected)
    assert twin.forward.module is twin
    assert names == set(plain.state_dict())
    assert equal(grads(mixprec.convert(twin, "bf16")), grads(plain))
    with pytest.raises(ValueError, match="recipe must be"):
        mixprec.convert(model, "fp9")
    assert equal(grads(model), expected)
    mixprec.unconvert(model)
    assert "forward" not in vars(model)
    assert type(model.qkv) is nn.Linear


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_code_saves_as_ever() -> None:
    """In one graph, which each further block uses again."""
    model, converted, x = block(), block("bf16", saved="int8"), batch()
    counter = CompileCounterWithBackend("aot_eager")
    plain = gradients(model, lambda: model(x))

    def inside(x: torch.Tensor) -> torch.Tensor:
        with mixprec.compress_saved("int8"):
            return model(x)

    for i, (function, around) in enumerate(((model, True), (inside, False), (converted, False))):
        run = torch.compile(function, backend=counter, fullgraph=True)
        params = converted if function is converted else model

        def call(run: Any = run, around: bool = around) -> torch.Tensor:
            with mixprec.compress_saved("int8") if around else nullcontext():
                return run(x)

        first = gradients(params, call)
        assert equal(first, gradients(params, call))
        assert counter.frame_count == i + 1
        assert error(first, plain) < 0.05


WRITTEN: list[tuple[Callable[[torch.Tensor], Any], bool]] = [
    (lambda x: x.mul_(2), True),
    (lambda x: x.view(-1)[:1].zero_(), True),
    (lambda x: x.detach().mul_(2), True),
    (lambda x: mixprec.unscale_([x.detach()], torch.tensor(2.0), torch.zeros(1)), True),
    (lambda x: x.data.mul_(2), False),  # which no version counts
    (lambda x: x * 2, False),
]


@for_each(
    "function", [torch.exp, F.gelu, F.relu, lambda x: x * x, lambda x: F.layer_norm(x, (64,))]
)
def test_a_tensor_that_is_written_later_is_an_error(function: Any) -> None:
    """As without the block, for what is kept as it is and for what is packed."""
    for inside in (False, True):
        for saves_result in (False, True):
            for write, expected in WRITTEN:
                x = torch.randn(128, 64, requires_grad=True) * 1
                with mixprec.compress_saved("int8") if inside else nullcontext():
                    y = function(x)
                    with torch.no_grad():
                        write(y if saves_result else x)
                saved_result = function in (torch.exp, F.relu)
                if expected and saves_result == saved_result:
                    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                        y.sum().backward()
                else:
                    y.sum().backward()


def test_what_is_saved_ends_with_the_graph() -> None:
    """Without a cycle that Python's collector would have to find, and would not."""
    w = torch.randn(64, 64, requires_grad=True)
    for function in (
        *(torch.exp, torch.relu, lambda x: x / (x * x + 1)),
        lambda x: mixprec.functional.mlp(x, w, w, recipe="bf16"),
        lambda x: mixprec.functional.attention(*[x.view(1, 2, 64, 64)] * 3),
    ):
        with mixprec.compress_saved("int8"):
            x = torch.randn(128, 64, requires_grad=True) * 1
            y = function(x)
            storages = [StorageWeakRef(t.untyped_storage()) for t in (x, y)]
        del x, y
        assert all(s.expired() for s in storages)


def test_patterns_leave_a_fused_forward_pass_as_it_is() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.LayerNorm(128), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), nn.LayerNorm(128)
    )
    mixprec.convert(model, "bf16", fuse=True)
    x = batch().requires_grad_() * 1
    plain = model(x)
    for patterns, expected in (
        ({"*": "int4"}, {4}),
        ({"*": "int4", "1": "int8"}, {8, 4}),  # "4" is not a part of the fused ones
        ({"*": "int4", "3": None, "4": None}, {None}),
    ):
        found = saved(lambda: model(x), patterns, model=model)
        ours = {bits for kind, bits in found if kind in ("activation", "norm")}
        assert ours - {None} == expected - {None}
        with mixprec.compress_saved(patterns, model=model):
            assert torch.equal(model(x), plain)
    model[1].register_forward_hook(lambda *_: None)
    assert not torch.equal(model(x), plain)  # one by one: another rounding


def test_functions_are_known_by_identity() -> None:
    """Each of torch's functions that the table names arrives as the object in the table."""
    x = torch.randn(128, 64, requires_grad=True) * 1
    for run in (
        lambda: x.relu(), lambda: torch.relu(x), lambda: F.relu(x), lambda: torch.relu_(x * 1),
        lambda: (x * 1).relu_(), lambda: x.tanh(), lambda: torch.special.softmax(x, 1),
        lambda: torch.softmax(x, 1), lambda: x.softmax(1), lambda: x**2, lambda: (1 * x) * x,
        lambda: x @ x.t(), lambda: (x * 1).__imul__(x), lambda: F.silu(x), lambda: nn.SiLU()(x),
    ):  # fmt: skip
        assert {bits for _, bits in saved(run)} & {1, 8}

    def gelu(x: torch.Tensor) -> torch.Tensor:  # another function of the name
        if torch.overrides.has_torch_function_unary(x):
            return torch.overrides.handle_torch_function(gelu, (x,), x)
        return 1 / x

    assert saved(lambda: gelu(x)) == [("other", None)]


@pytest.mark.parametrize(
    "function",
    [
        torch.arcsin,
        torch.special.logit,
        torch.abs,
        lambda x: F.rrelu(x, 0.1, 0.3, training=True),
        lambda x: F.lp_pool1d(x[None], 3.0, 4),
        lambda x: 1 / x,
    ],
)
def test_what_unknown_ops_save_is_kept(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Their backward may divide by it or compare it."""
    gradients = []
    for mode in (None, "int8"):
        x = (torch.linspace(0.001, 0.999, 8192)).requires_grad_()
        torch.manual_seed(0)
        with nullcontext() if mode is None else mixprec.compress_saved(mode, seed=1):
            function(x * 1.0).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_compiled_code_in_16_bits_keeps_what_it_saves() -> None:
    compiled = torch.compile(lambda x: torch.log(x * 1.0).sum(), backend="aot_eager")
    x = (torch.rand(8192) + 1e-3).bfloat16().requires_grad_()
    with mixprec.compress_saved("int8"):
        compiled(x + 0).backward()
    torch.testing.assert_close(x.grad, (1 / x.detach().float()).bfloat16())


def test_patterns_in_several_threads() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    mixprec.convert(model, "bf16", saved={"0": 4, "1": None})
    with ThreadPoolExecutor(4) as pool:
        inputs = [torch.randn(64, 64) for _ in range(200)]
        assert len(list(pool.map(lambda x: model(x).sum().backward(), inputs))) == 200


def test_a_negated_view_has_codes_of_its_own() -> None:
    z = torch.complex(torch.randn(8192), torch.randn(8192))
    a, b = (torch.ones(8192, requires_grad=True) for _ in range(2))
    with mixprec.compress_saved("int8"):
        z = z * 1.0
        loss = (a * z.imag).sum() + (b * z.conj().imag).sum()
    loss.backward()
    torch.testing.assert_close(a.grad, -b.grad, rtol=0, atol=0.1)
