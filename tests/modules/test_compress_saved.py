"""compress_saved: which of the tensors that autograd saves are kept in how many bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cases import for_each
from layer_cases import ROWS, WIDTH, feed_forward, model_and_batch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import mixprec
from mixprec.functional import attention, mlp
from mixprec.memory.compress_saved import recorded
from mixprec.memory.forms import Mask, Negative
from mixprec.memory.packed import Codes, Saved

Bits = int | None  # None: the tensor is kept as it is


def bits_of(t: torch.Tensor | Saved) -> Bits:
    if not isinstance(t, Saved):
        return None
    codes = [p.bits for p in t.parts.pieces if isinstance(p, Codes)]
    return sum(codes) + isinstance(t.parts.form, (Mask, Negative))


def saved(
    run: Callable[[], object], bits: Any = "int8", **options: Any
) -> list[tuple[str, torch.Tensor | Saved]]:
    """The kind of each tensor that run() saves, and what is kept of it, in order."""
    found: list[tuple[str, torch.Tensor | Saved]] = []
    with recorded(lambda *kept: found.append(kept)), mixprec.compress_saved(bits, **options):
        run()
    return found


def kinds(run: Callable[[], object], bits: Any = "int8", **options: Any) -> set[tuple[str, Bits]]:
    return {(kind, bits_of(t)) for kind, t in saved(run, bits, **options)}


@for_each("bits, linear, activation", [("int8", 8, 8), ("int4", 4, 4)])
def test_what_an_op_saves_decides(bits: str, linear: int, activation: int) -> None:
    x = torch.randn(4, 8, 64, 32, requires_grad=True) * 1
    w, other = torch.randn(32, 32, requires_grad=True), ("other", None)
    of_linear, weight = ("linear", linear), ("linear", None)
    of_attention = {("attention", 16), ("attention", 12), ("attention", None)}  # q, y, logsumexp
    for run, expected in (
        (lambda: F.linear(x, w), {of_linear, weight}),
        (lambda: F.linear(x, w.t().contiguous()), {of_linear, weight}),
        (lambda: mixprec.functional.linear(x, w, recipe="bf16"), {of_linear, weight}),
        (lambda: mixprec.functional.linear(x, w, recipe="fp8"), {weight}),  # in 8 bits already
        (lambda: x @ x.transpose(-1, -2), {("attention", 8)}),
        (lambda: F.gelu(x), {("activation", activation)}),
        (lambda: mlp(x, w, w, recipe="bf16"), {("activation", activation), ("activation", None)}),
        (lambda: F.layer_norm(x, (32,)), {("norm", activation), ("norm", None)}),  # rstd, mean
        (lambda: F.scaled_dot_product_attention(x, x, x), of_attention),
        (lambda: attention(x, x, x), of_attention),
        (lambda: x.relu(), {("activation", 1)}),
        (lambda: F.elu(x), {("activation", 9)}),
        (lambda: F.elu(x * 1, inplace=True), {("activation", None)}),  # the result
        (lambda: x.sigmoid(), {("activation", 8)}),
        (lambda: F.cross_entropy(x.flatten(0, 2), torch.zeros(2048).long()), {("loss", None)}),
        (lambda: x.double() * x.double(), {("activation", None)}),
        (lambda: x[:1, :1] * x[:1, :1], {("activation", None)}),  # 2,048 elements
        (lambda: x * torch.ones(64, 32), {("activation", None)}),  # a constant
        (lambda: x.pow(2), {("other", 8)}),
        (lambda: x.square(), {("other", 8)}),
        # Backward may divide by it or compare it.
        (lambda: x.pow(3), {other}),
        (lambda: x.pow(-1), {other}),
        (lambda: x.exp(), {other}),
        (lambda: x.amax(-1), {other}),
        (lambda: x.abs(), {other}),
        (lambda: x.norm(), {other}),  # not mixprec's norm
        (lambda: torch.linalg.vector_norm(x), {other}),
        (lambda: torch.linalg.inv(x[..., :32, :]), {other}),
        (lambda: x / (x.detach() + 9), {other}),
        (lambda: 1 / x, {other}),
        (lambda: torch.arcsin(x), {other}),
        (lambda: torch.special.logit(x), {other}),
        (lambda: F.rrelu(x, 0.1, 0.3, training=True), {other}),
        (lambda: F.lp_pool1d(x.flatten(0, 1), 3.0, 4), {other}),
    ):
        assert kinds(run, bits) == expected


def test_functions_are_known_by_identity() -> None:
    """Each of torch's functions that the table names arrives as the object in the table."""
    x = torch.randn(128, 64, requires_grad=True) * 1
    for run in (
        lambda: x.relu(), lambda: torch.relu(x), lambda: F.relu(x), lambda: torch.relu_(x * 1),
        lambda: (x * 1).relu_(), lambda: x.tanh(), lambda: torch.special.softmax(x, 1),
        lambda: torch.softmax(x, 1), lambda: x.softmax(1), lambda: x**2, lambda: (1 * x) * x,
        lambda: x @ x.t(), lambda: (x * 1).__imul__(x), lambda: F.silu(x), lambda: nn.SiLU()(x),
    ):  # fmt: skip
        assert {bits for _, bits in kinds(run)} & {1, 8}

    def gelu(x: torch.Tensor) -> torch.Tensor:  # another function of the name
        if torch.overrides.has_torch_function_unary(x):
            return torch.overrides.handle_torch_function(gelu, (x,), x)
        return 1 / x

    assert kinds(lambda: gelu(x)) == {("other", None)}


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
        (lambda: F.linear(input=hidden, weight=w.t() * 1), {8}),
    ):
        assert {bits for _, bits in kinds(run)} == expected
    with torch.autocast("cpu", torch.bfloat16):
        assert kinds(lambda: F.linear(hidden, frozen)) == {("linear", None)}
        assert kinds(lambda: F.linear(hidden, w)) == {("linear", 8), ("linear", None)}


def test_an_additive_mask_is_kept() -> None:
    q = torch.randn(2, 4, 64, 32, requires_grad=True)
    mask = torch.zeros(2, 1, 64, 64).index_fill_(3, torch.arange(40, 64), -torch.inf)
    with mixprec.compress_saved("int8"):
        y = F.scaled_dot_product_attention(q * 1, q * 2, q * 3, attn_mask=mask * 1)
    (grad,) = torch.autograd.grad(y.sum(), q)
    assert grad.isfinite().all()


def test_patterns_choose_by_module() -> None:
    model, x = model_and_batch()
    hidden = x.requires_grad_() * 1
    patterns = {"*": 8, "0.mlp.*": "int4", "1": None, "1.*": None}
    found = kinds(lambda: model[0](hidden), patterns, model=model)
    assert found > {("linear", 4), ("linear", 8), ("norm", 4), ("norm", 8), ("activation", 4)}
    assert {bits for _, bits in kinds(lambda: model[1](hidden), patterns, model=model)} == {None}
    assert not any(module._forward_hooks for module in model.modules())


def test_patterns_leave_a_fused_forward_pass_as_it_is() -> None:
    model = feed_forward().append(nn.LayerNorm(WIDTH))
    mixprec.convert(model, "bf16", fuse=True)
    x = torch.randn(ROWS, 2, WIDTH, requires_grad=True) * 1
    plain = model(x)
    for patterns, expected in (
        ({"*": "int4"}, {4}),
        ({"*": "int4", "1": "int8"}, {8, 4}),  # "4" is not a part of the fused ones
        ({"*": "int4", "3": None, "4": None}, set()),
    ):
        found = kinds(lambda: model(x), patterns, model=model)
        ours = {bits for kind, bits in found if kind in ("activation", "norm")}
        assert ours - {None} == expected
        with mixprec.compress_saved(patterns, model=model):
            assert torch.equal(model(x), plain)


def test_a_tensor_is_packed_once() -> None:
    x = torch.randn(128, 64, requires_grad=True) * 1
    w = torch.randn(64, 64, requires_grad=True)

    def written() -> object:
        y = F.linear(x, w)
        x.data.mul_(2)  # which does not change the version
        return y, F.linear(x, w)

    for run, expected in (
        (lambda: (F.linear(x, w), x.view(64, 128) @ w.view(128, 32), x @ w.t()), 1),
        (lambda: (x * x, x.square()), 1),
        (lambda: (F.linear(x, w), F.linear(x * 1, w)), 2),
        (lambda: (F.linear(x, w), F.gelu(x)), 2),  # limited values
        # One error in two factors of a gradient would bias it by its variance.
        (lambda: x * torch.sigmoid(F.linear(x, w)), 4),
        (written, 2),
    ):
        results: list[object] = []  # whose graphs hold the parts
        found = saved(lambda run=run, results=results: results.append(run()))
        assert len({id(t.parts) for _, t in found if isinstance(t, Saved)}) == expected


def test_an_address_used_again_is_no_tensor_known() -> None:
    w = torch.randn(64, 64, requires_grad=True)
    with mixprec.compress_saved("int8"):
        for value in (1.0, 2.0, 3.0):  # each x lies where the one before lay
            x = torch.full((128, 64), value) * torch.ones(1)
            (grad,) = torch.autograd.grad((x @ w).sum(), w)
            assert torch.allclose(grad, torch.full_like(grad, 128 * value), rtol=0.01)
            del x


def test_a_negated_view_has_codes_of_its_own() -> None:
    z = torch.complex(torch.randn(8192), torch.randn(8192))
    a, b = (torch.ones(8192, requires_grad=True) for _ in range(2))
    with mixprec.compress_saved("int8"):
        z = z * 1.0
        loss = (a * z.imag).sum() + (b * z.conj().imag).sum()
    loss.backward()
    torch.testing.assert_close(a.grad, -b.grad, rtol=0, atol=0.1)


@for_each("value", [torch.inf, torch.nan])
def test_an_overflow_reaches_the_gradients(value: float) -> None:
    w = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(128, 64) * 1
    x[3, 5] = value
    with mixprec.compress_saved("int4"):
        y = (x * 1) @ w
    # Of rows whose x are finite: without compression the gradient is 0 * value.
    (grad,) = torch.autograd.grad(y[8:].sum(), w)
    assert grad.isnan().any()


WRITES: list[tuple[Callable[[torch.Tensor], Any], bool]] = [
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
@for_each("inside, to_result", [(False, False), (False, True), (True, False), (True, True)])
@for_each("write, is_seen", WRITES)
def test_a_tensor_that_is_written_later_is_an_error(
    function: Any, inside: bool, to_result: bool, write: Any, is_seen: bool
) -> None:
    """As without the block, for what is kept as it is and for what is packed."""
    x = torch.randn(128, 64, requires_grad=True) * 1
    with mixprec.compress_saved("int8") if inside else nullcontext():
        y = function(x)
        with torch.no_grad():
            write(y if to_result else x)
    saves_result = function in (torch.exp, F.relu)
    is_error = is_seen and to_result == saves_result
    match = "modified by an inplace operation"
    with pytest.raises(RuntimeError, match=match) if is_error else nullcontext():
        y.sum().backward()


def test_what_is_saved_ends_with_the_graph() -> None:
    """Without a cycle that Python's collector would have to find, and would not."""
    w = torch.randn(64, 64, requires_grad=True)
    for function in (
        *(torch.exp, torch.relu, lambda x: x / (x * x + 1)),
        lambda x: mlp(x, w, w, recipe="bf16"),
        lambda x: attention(*[x.view(1, 2, 64, 64)] * 3),
    ):
        with mixprec.compress_saved("int8"):
            x = torch.randn(128, 64, requires_grad=True) * 1
            y = function(x)
            storages = [StorageWeakRef(t.untyped_storage()) for t in (x, y)]
        del x, y
        assert all(s.expired() for s in storages)
