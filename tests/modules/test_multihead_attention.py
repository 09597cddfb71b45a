"""convert of nn.MultiheadAttention and of torch's Transformer: the same function, by a recipe."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import mixprec
from mixprec.functional import observed

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
