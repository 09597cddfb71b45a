"""functional.attention: what torch's scaled_dot_product_attention gives, in every mode of torch."""

from __future__ import annotations

import copy
from typing import Any

import independent as ind
import pytest
import torch
from cases import WIDE, for_each, normal, observed, pairwise
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import mixprec
from mixprec.functional import attention
from mixprec.functional._attention import run_attention

Tensors = tuple[torch.Tensor, ...]
UNIT = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def operands(dtype: torch.dtype = torch.float32, heads: int = 2, t: int = 9) -> Tensors:
    sizes = ((2, 4, t, 16), (2, heads, t, 16), (2, heads, t, 16))
    return tuple(normal(s, dtype, i).requires_grad_() for i, s in enumerate(sizes))


def with_grads(function: Any, args: Tensors, **options: Any) -> Tensors:
    y = function(*args, **options)
    g = normal(tuple(y.shape), y.dtype, seed=7)
    return y.detach(), *torch.autograd.grad(y, args, g)


@for_each("dtype, causal, heads", pairwise(WIDE, (False, True), (1, 2, 4)))
def test_as_torch(backend: str, dtype: torch.dtype, causal: bool, heads: int) -> None:
    args = operands(dtype, heads)
    wide = tuple(x.detach().double().requires_grad_() for x in args)
    for scale in (None, 0.1):
        got = with_grads(attention, args, causal=causal, scale=scale)
        want = with_grads(
            scaled_dot_product_attention, wide, is_causal=causal, scale=scale, enable_gqa=True
        )
        for y, exact in zip(got, want, strict=True):
            assert y.dtype == dtype
            assert (y.double() - exact).abs().max() <= UNIT[dtype] * (1 + exact.abs().max())
    assert got[0].transpose(1, 2).is_contiguous()


@for_each("dtype, causal, is_bool", pairwise(WIDE, (False, True), (False, True)))
def test_masks_as_torch(backend: str, dtype: torch.dtype, causal: bool, is_bool: bool) -> None:
    """Of each number of dimensions; also what is torch's, as in FP64 or for the mask's gradient."""
    args = operands(dtype, 2)
    wide = tuple(x.detach().double().requires_grad_() for x in args)
    sees = torch.ones(9, 9, dtype=torch.bool).tril() if causal else torch.ones(1, 1).bool()
    for shape in ((9, 9), (4, 9, 9), (2, 1, 9, 9), (2, 4, 1, 9)):
        values = normal(shape, torch.float32, 5)
        mask = values > -0.5 if is_bool else values.masked_fill(values < -1, -torch.inf)
        mask[..., 0] = True if is_bool else 0.0
        both = mask & sees if is_bool else mask.double().masked_fill(~sees, -torch.inf)
        want = with_grads(scaled_dot_product_attention, wide, attn_mask=both, enable_gqa=True)
        given = mask if is_bool else mask.clone().requires_grad_()
        for got in (
            with_grads(attention, args, mask=mask, causal=causal),
            with_grads(attention, wide, mask=mask if is_bool else mask.double(), causal=causal),
            with_grads(attention, args, mask=given, causal=causal),
        ):
            for y, exact in zip(got, want, strict=True):
                assert (y.double() - exact).abs().max() <= UNIT[dtype] * (1 + exact.abs().max())


def test_what_the_kernel_does_not_take_is_torchs() -> None:
    q, k, v = operands(torch.float64)
    want = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.equal(attention(q, k, v, causal=True), want)
    q, k, v = (x[:, :2].detach() for x in operands(heads=2))
    assert attention(q[0], k[0], v[0]).shape == q[0].shape
    assert attention(q, k, v[..., :3]).shape == (*q.shape[:3], 3)
    by_torch = torch.func.grad(lambda q: attention(q, k, v).sum())(q)
    by_hand = torch.func.grad(lambda q: ((q @ k.mT / 4).softmax(-1) @ v).sum())(q)
    assert torch.allclose(by_torch, by_hand, atol=1e-6)
    with pytest.raises(RuntimeError):
        attention(q, k.half(), v)


@for_each("wanted", [(0,), (1,), (2,), (0, 2)])
def test_only_what_requires_a_gradient_gets_one(wanted: tuple[int, ...]) -> None:
    args = operands()
    every = with_grads(attention, args)[1:]
    some = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(args)]
    g = normal((2, 4, 9, 16), torch.float32, seed=7)
    attention(*some).backward(g)
    for i, x in enumerate(some):
        assert (x.grad is not None) == (i in wanted)
        if x.grad is not None:
            ind.assert_same_bits(x.grad, every[i])


@for_each("low", [torch.bfloat16, torch.float16])
def test_one_key_gives_no_gradient_to_q_and_k_of_an_fp32_model(
    backend: str, low: torch.dtype
) -> None:
    args = [x[:, :, :1].detach().requires_grad_() for x in operands(heads=4)]
    y = run_attention(*args, False, None, low)
    dq, dk, dv = torch.autograd.grad(y, args, normal(tuple(y.shape), torch.float32, 7))
    assert not dq.any()
    assert not dk.any()
    assert dv.any()


def test_second_derivative_is_refused() -> None:
    q, k, v = operands()
    y = attention(q, k, v)
    with pytest.raises(RuntimeError, match=r"no derivative.*SDPBackend\.MATH"):
        torch.autograd.grad(y.sum(), q, create_graph=True)


@for_each("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_the_operands(dtype: torch.dtype) -> None:
    args = operands(heads=4)
    low = tuple(x.detach().to(dtype).requires_grad_() for x in args)
    want = with_grads(attention, low, causal=True)
    with torch.autocast("cpu", dtype):
        got = with_grads(attention, args, causal=True)
        ind.assert_same_bits(torch.ops.mixprec.attention(*args, True, 0.25)[0], want[0])
    ind.assert_same_bits(got[0], want[0])
    for x, y in zip(got[1:], want[1:], strict=True):
        assert x.dtype == torch.float32
        ind.assert_same_bits(x, y.float())


# convert of nn.MultiheadAttention and of torch's Transformer


B, L, S, E, H = 2, 6, 5, 32, 4
CAUSAL = torch.ones(L, S).triu(1).bool()
PADDING = torch.tensor([[False] * 4 + [True], [False] * 3 + [True] * 2])
FLOATS = torch.randn(B * H, L, S, generator=torch.Generator().manual_seed(0))

# Of the module, and of the call; which inputs are the same tensor.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "self": ({"batch_first": True}, {}, "q=k=v"),
    "self, no weights": ({}, {"need_weights": False}, "q=k=v"),
    "encoder and decoder": ({"batch_first": True}, {"attn_mask": CAUSAL}, "k=v"),
    "three inputs": ({"bias": False}, {"attn_mask": FLOATS, "need_weights": False}, ""),
    "widths": ({"kdim": 24, "vdim": 40}, {"key_padding_mask": PADDING}, ""),
    "widths, no bias": ({"kdim": 24, "vdim": 40, "bias": False}, {"need_weights": False}, ""),
    "added keys": ({"add_bias_kv": True, "add_zero_attn": True}, {"key_padding_mask": PADDING}, ""),
    "added keys, masks": (
        {"add_bias_kv": True, "batch_first": True},
        {"attn_mask": FLOATS, "key_padding_mask": PADDING.float() * -9, "need_weights": False},
        "k=v",
    ),
    "per head": ({}, {"average_attn_weights": False, "attn_mask": CAUSAL}, "k=v"),
    "causal": ({}, {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}, "k=v"),
    "causal, weights": ({}, {"attn_mask": CAUSAL, "is_causal": True}, "k=v"),
}


def inputs(module: dict[str, Any], same: str, batched: bool) -> list[torch.Tensor]:
    widths = (E, module.get("kdim", E), module.get("vdim", E))
    shapes = [(B, length, width) for length, width in zip((L, S, S), widths, strict=True)]
    q, k, v = (torch.randn(shape) for shape in shapes)
    k = q if same == "q=k=v" else k
    v = v if same == "" else k
    unique = {id(x): x if batched else x[0] for x in (q, k, v)}
    if batched and not module.get("batch_first"):
        unique = {name: x.transpose(0, 1) for name, x in unique.items()}
    unique = {name: x.clone().requires_grad_() for name, x in unique.items()}
    return [unique[id(x)] for x in (q, k, v)]


def results(model: nn.Module, args: list[torch.Tensor], call: dict[str, Any]) -> list[Any]:
    """The results, and the gradients of inputs and parameters."""
    y, weights = model(*args, **call)
    leaves = [*{id(x): x for x in args}.values(), *model.parameters()]
    return [y, weights, *torch.autograd.grad(y.square().sum(), leaves)]


@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
@pytest.mark.parametrize("case", CASES)
def test_computes_what_torch_does(case: str, batched: bool) -> None:
    options, call, same = CASES[case]
    if not batched:
        one = {id(PADDING): PADDING[0], id(FLOATS): FLOATS[:H]}
        call = {k: one.get(id(v), v[0] if k == "key_padding_mask" else v) for k, v in call.items()}
    plain = nn.MultiheadAttention(E, H, **options)
    ours = mixprec.convert(copy.deepcopy(plain), "fp16")
    assert isinstance(ours, mixprec.nn.MultiheadAttention)
    args = inputs(options, same, batched)
    wanted, got = results(plain, args, call), results(ours, args, call)
    for x, y in zip(got, wanted, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert x.dtype == y.dtype
            torch.testing.assert_close(x, y, rtol=2e-3, atol=2e-3 * y.abs().max().item())
    with mixprec.autocast(enabled=False):
        assert torch.equal(ours(*args, **call)[0], wanted[0])


def test_every_projection_uses_the_recipe_and_drops_out_as_torch_does() -> None:
    ours = mixprec.convert(nn.MultiheadAttention(E, H, dropout=0.5, batch_first=True), "fp8")
    x, seen = torch.randn(B, L, E), []
    with observed(lambda kind, name, a, b: seen.append((kind, name, a, b))):
        y, weights = ours(x, x, x)
        (y.sum() + weights.sum()).backward()
    forward = [one for one in seen if one[0] == "forward"]
    assert forward == [("forward", "", "e4m3", "e4m3"), ("forward", "out_proj", "e4m3", "e4m3")]
    assert len(seen) == 5, "x needs no gradient"
    assert (weights == 0).any()
    ours.eval()
    assert not (ours(x, x, x)[1] == 0).any()


def test_masks_that_do_not_fit_are_errors_as_in_torch() -> None:
    ours, x = mixprec.convert(nn.MultiheadAttention(E, H), "bf16"), torch.randn(L, B, E)
    with pytest.raises(RuntimeError, match="is_causal is a hint and needs attn_mask"):
        ours(x, x, x, is_causal=True)
    for mask in (torch.zeros(L + 1, L), torch.zeros(1, L), torch.zeros(B, L, L)):
        with pytest.raises(RuntimeError, match="attn_mask must have shape"):
            ours(x, x, x, attn_mask=mask)
    with pytest.raises(RuntimeError, match=r"key_padding_mask must have shape \(2, 6\)"):
        ours(x, x, x, key_padding_mask=torch.zeros(1, L))


@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed"])
def test_a_transformer_is_converted_whole_and_runs_by_the_recipe_in_eval_mode(recipe: str) -> None:
    model = nn.Transformer(E, H, 1, 1, 64, batch_first=True, dropout=0.0)
    plain = copy.deepcopy(model).eval()
    mixprec.convert(model, recipe).eval()
    assert mixprec.nn.kinds.coverage(model).left == {}
    source, target = torch.randn(B, S, E), torch.randn(B, L, E)
    seen: set[str] = set()
    with torch.no_grad(), observed(lambda kind, name, a, b: seen.add(name)):
        y = model(source, target, src_key_padding_mask=PADDING)
    assert len(seen) == 10, "two feed-forward layers of two, three attentions of two"
    expected = plain(source, target, src_key_padding_mask=PADDING)
    torch.testing.assert_close(y, expected, atol=0.5, rtol=0)
    if recipe == "fp8-delayed":
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(source, target), model(source, target))


def test_weights_near_zero_have_gradients_near_zero() -> None:
    """Subnormal numbers in FP32, of scores that are far apart."""
    q, k, v = (
        normal((2, 3, 128, 64), torch.bfloat16, seed=i).mul(10).requires_grad_() for i in range(3)
    )
    y = mixprec.functional.attention(q, k, v, causal=True)
    g = normal(y.shape, torch.bfloat16, seed=3)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
    wanted = torch.autograd.grad(exact, wide, g.double())
    for got, want in zip(torch.autograd.grad(y, (q, k, v), g), wanted, strict=True):
        assert (got - want).norm() < 0.02 * want.norm()
