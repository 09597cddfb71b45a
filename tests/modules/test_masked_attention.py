"""Boolean masks of attention that are causal or hide nothing, in eager and in compiled code."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from cases import normal
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import profile

import mixprec
from mixprec.ops.masked_attention import HAS_KERNEL, mask_pattern

B, H, T, D = 2, 4, 9, 8
ONES = torch.ones(B, 1, T, T, dtype=torch.bool)
CAUSAL = ONES.tril()


def with_one_changed(mask: torch.Tensor, b: int, i: int, j: int) -> torch.Tensor:
    mask = mask.clone()
    mask[b, :, i, j] = ~mask[b, :, i, j]
    return mask


# Of the mask, whether attention without it is causal; None: there is no such one.
MASKS: dict[str, tuple[torch.Tensor, bool | None]] = {
    "ones": (ONES, False),
    "ones, broadcast": (ONES[:1, :, :1], False),
    "ones of two dimensions": (ONES[0, 0], False),
    "causal": (CAUSAL, True),
    "causal, a view": (CAUSAL[:1].expand(B, H, T, T), True),
    "causal of two dimensions": (CAUSAL[0, 0], True),
    "one hidden": (with_one_changed(ONES, 1, 8, 0), None),
    "one more seen": (with_one_changed(CAUSAL, 1, 7, 8), None),
    "one less seen": (with_one_changed(CAUSAL, 1, 8, 3), None),
    "padding": (CAUSAL & (torch.arange(T) < 6), None),
    "padding on the left": (CAUSAL & (torch.arange(T) > 1), None),
    "a window": (CAUSAL & ~ONES.tril(-4), None),
    "reversed": (ONES.triu(), None),
    "hidden keys, broadcast": ((torch.arange(T) < 6).expand(B, 1, 1, T), None),
    "a causal mask transposed in memory": (CAUSAL.mT.contiguous().mT, None),
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(H * D, 3 * H * D) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: Any, causal: bool = False) -> torch.Tensor:
        for layer in self.qkv:
            q, k, v = (y.transpose(1, 2) for y in layer(x).unflatten(2, (3, H, D)).unbind(2))
            y = scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
            x = x + y.transpose(1, 2).flatten(2)
        return x


def run(model: Any, parameters: Any, autocast: bool, *args: Any) -> list[torch.Tensor]:
    x = normal((B, T, H * D), torch.float32, seed=1).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(x, *args)
    inputs = [x, *parameters.parameters()]
    return [y.detach(), *torch.autograd.grad(y, inputs, normal(y.shape, y.dtype, seed=2))]


@pytest.mark.skipif(not HAS_KERNEL, reason="mixprec._C is not built")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_only_masks_without_effect_are_left_out(compiled: bool, autocast: bool) -> None:
    """Every other mask goes to torch's kernel, with the bits of a model that is not fused."""
    torch._dynamo.reset()
    plain = mixprec.convert(Attention(), "bf16")
    fused = mixprec.convert(copy.deepcopy(plain), "bf16", fuse=True)
    call, torchs = fused, plain
    if compiled:
        call, torchs = (
            torch.compile(m, backend="aot_eager", fullgraph=True) for m in (fused, plain)
        )
    for name, (mask, causal) in MASKS.items():
        run(call, fused, autocast, mask)  # compiles
        with profile() as p:
            got = run(call, fused, autocast, mask)
        names = [event.name for event in p.events()]
        if causal is None:
            wanted = run(torchs, plain, autocast, mask)
        else:
            wanted = run(fused, fused, autocast, None, causal)
        assert all(map(torch.equal, got, wanted)), name
        ours = names.count("mixprec::attention"), names.count("mixprec::attention_backward")
        assert ours == ((0, 0) if causal is None else (2, 2)), name
        assert names.count("mixprec::mask_pattern") == (1 if compiled else 2), name


def test_a_mask_with_other_values_is_no_new_program() -> None:
    torch._dynamo.reset()
    counters.clear()
    plain = mixprec.convert(Attention(), "bf16")
    model = mixprec.convert(copy.deepcopy(plain), "bf16", fuse=True)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    for name in ("ones", "causal", "padding"):
        mask, causal = MASKS[name]
        same = plain if causal is None else model
        wanted = run(same, same, False, mask)
        assert all(map(torch.equal, run(call, model, False, mask), wanted)), name
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
    plain = Writes(mixprec.convert(Attention(), "bf16"), copies)
    model = Writes(mixprec.convert(copy.deepcopy(plain.attention), "bf16", fuse=True), copies)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    for name in ("one hidden", "padding"):
        mask, _ = MASKS[name]
        wanted = run(plain.attention, plain, False, mask)
        assert all(map(torch.equal, run(call, model, False, mask.clone()), wanted)), name


@pytest.mark.skipif(not HAS_KERNEL, reason="mixprec._C is not built")
def test_a_pattern_is_known_from_each_value() -> None:
    """Every mask of 3 queries and up to 3 keys."""
    for keys in (1, 2, 3):
        causal = torch.ones(3, keys, dtype=torch.bool).tril()
        for values in itertools.product((False, True), repeat=3 * keys):
            mask = torch.tensor(values).view(3, keys)
            pattern = 2 if mask.all() else int(torch.equal(mask, causal))
            assert mask_pattern(mask) == pattern
            both = torch.stack([causal, mask]).unsqueeze(1)
            assert mask_pattern(both) == (pattern if torch.equal(mask, causal) else 0)
    for shape in ((0, 1, 3, 3), (1, 1, 0, 3), (1, 1, 3, 0)):
        assert mask_pattern(torch.ones(shape, dtype=torch.bool)) == 0
    for wrong in (torch.ones(3, 3), torch.ones(3, dtype=torch.bool)):
        with pytest.raises(RuntimeError, match=r"mask must be bool \[\.\.\., T, S\]"):
            mask_pattern(wrong)
