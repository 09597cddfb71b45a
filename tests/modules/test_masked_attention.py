"""Attention with a mask in the forward pass of a fused model, in eager and in compiled code."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import normal
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import profile

import mixprec

B, H, T, D = 2, 4, 9, 8
ONES = torch.ones(B, 1, T, T, dtype=torch.bool)
CAUSAL = ONES.tril()
PADDING = torch.arange(T) < 6

MASKS = {
    "ones": ONES,
    "ones, broadcast": ONES[:1, :, :1],
    "ones of two dimensions": ONES[0, 0],
    "causal": CAUSAL,
    "causal, a view": CAUSAL[:1].expand(B, H, T, T),
    "causal of three dimensions": CAUSAL[0],
    "padding": CAUSAL & PADDING,
    "padding on the left": CAUSAL & (torch.arange(T) > 1),
    "a window": CAUSAL & ~ONES.tril(-4),
    "hidden keys, broadcast": PADDING.expand(B, 1, 1, T),
    "transposed in memory": CAUSAL.mT.contiguous().mT,
    "a causal sum": torch.zeros(CAUSAL.shape).masked_fill(~CAUSAL, -torch.inf),
    "a bias": normal((1, H, T, T), torch.float32, 3),
}


class Attention(nn.Module):
    def __init__(self, heads: int = H) -> None:
        super().__init__()
        self.heads = heads  # of k and v
        self.qkv = nn.ModuleList(nn.Linear(H * D, (H + 2 * heads) * D) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: Any, causal: bool = False) -> torch.Tensor:
        for layer in self.qkv:
            heads = layer(x).unflatten(2, (-1, D)).transpose(1, 2)
            q, k, v = heads.split([H, self.heads, self.heads], 1)
            gqa = self.heads != H
            y = scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=gqa)
            x = x + y.transpose(1, 2).flatten(2)
        return x


def run(model: Any, parameters: Any, autocast: bool, *args: Any) -> list[torch.Tensor]:
    x = normal((B, T, H * D), torch.float32, seed=1).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(x, *args)
    inputs = [x, *parameters.parameters()]
    return [y.detach(), *torch.autograd.grad(y, inputs, normal(y.shape, y.dtype, seed=2))]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("heads", [H, 2])
def test_masked_attention_is_fused(compiled: bool, autocast: bool, heads: int) -> None:
    """With the bits that it has without a mask that says the same, and near torch's."""
    plain = mixprec.convert(Attention(heads), "bf16")
    fused = mixprec.convert(copy.deepcopy(plain), "bf16", fuse=True)
    call = torch.compile(fused, backend="aot_eager", fullgraph=True) if compiled else fused
    for name, mask in MASKS.items():
        torch._dynamo.reset()  # there is a limit of programs for one function
        run(call, fused, autocast, mask)  # compiles
        with profile() as p:
            got = run(call, fused, autocast, mask)
        names = [event.name for event in p.events()]
        ours = names.count("mixprec::attention"), names.count("mixprec::attention_backward")
        assert ours == (2, 2), name
        if "ones" in name or "causal" in name or "transposed" in name:
            wanted = run(fused, fused, autocast, None, "ones" not in name)
            assert all(map(torch.equal, got, wanted)), name
        for x, y in zip(got, run(plain, plain, autocast, mask), strict=True):
            assert (x - y).norm() <= 0.03 * y.norm(), name
        assert all(map(torch.equal, got, run(fused, fused, autocast, mask))), name


@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradient_of_a_mask_is_torchs(compiled: bool) -> None:
    torch._dynamo.reset()
    plain = mixprec.convert(Attention(), "bf16")
    fused = mixprec.convert(copy.deepcopy(plain), "bf16", fuse=True)
    call = torch.compile(fused, backend="aot_eager", fullgraph=True) if compiled else fused
    masks = [MASKS["a bias"].clone().requires_grad_() for _ in range(2)]
    for model, mask in zip((call, plain), masks, strict=True):
        model(normal((B, T, H * D), torch.float32, seed=1), mask).sum().backward()
    assert masks[0].grad is not None
    assert torch.equal(masks[0].grad, masks[1].grad)


def test_a_mask_with_other_values_is_no_new_program() -> None:
    torch._dynamo.reset()
    counters.clear()
    model = mixprec.convert(Attention(), "bf16", fuse=True)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    for name in ("ones", "causal", "padding"):
        wanted = run(model, model, False, MASKS[name])
        assert all(map(torch.equal, run(call, model, False, MASKS[name]), wanted)), name
    assert counters["stats"]["unique_graphs"] == 1


class Writes(nn.Module):
    """Of its mask, or of a copy, after attention has read it."""

    def __init__(self, attention: Attention, copies: bool) -> None:
        super().__init__()
        self.attention, self.copies = attention, copies

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        mask = mask.clone() if self.copies else mask
        y: torch.Tensor = self.attention(x, mask)
        mask.logical_not_()
        return y


@pytest.mark.parametrize("copies", [False, True])
def test_a_write_in_compiled_code_comes_after_attention(copies: bool) -> None:
    torch._dynamo.reset()
    model = Writes(mixprec.convert(Attention(), "bf16", fuse=True), copies)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    for name in ("a window", "padding"):
        wanted = run(model.attention, model, False, MASKS[name])
        assert all(map(torch.equal, run(call, model, False, MASKS[name].clone()), wanted)), name
