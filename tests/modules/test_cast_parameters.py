"""Which parameters and buffers cast_parameters casts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mixprec

LOW = torch.bfloat16


class LlamaRMSNorm(nn.Module):
    """As in transformers: derives from nn.Module alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


class NormalizedLinear(nn.Linear):
    """Has a norm in its name and a matrix for a weight."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = LlamaRMSNorm(4), nn.Linear(4, 2)
        self.mixed, self.batch_norm = NormalizedLinear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("inv_freq", torch.ones(2))
        self.register_buffer("attn_mask", torch.ones(2))


def test_norms_are_known_by_name_and_shape() -> None:
    block = mixprec.cast_parameters(Block(), LOW)
    assert block.norm.weight.dtype == torch.float32
    assert {p.dtype for p in block.batch_norm.parameters()} == {torch.float32}
    assert {p.dtype for p in block.mixed.parameters()} == {LOW}
    assert {b.dtype for b in block.buffers() if b.is_floating_point()} == {torch.float32}


def test_such_a_norm_returns_the_dtype_of_its_input() -> None:
    norm = LlamaRMSNorm(4)
    for dtype in (LOW, LOW, torch.float32):  # again, and back
        mixprec.cast_parameters(norm, dtype)
    assert len(norm._forward_hooks) == 1
    for dtype in (LOW, torch.float16, torch.float32):
        assert norm(torch.ones(2, 4, dtype=dtype)).dtype == dtype


def test_patterns_add_parameters_to_keep_and_buffers_to_cast() -> None:
    model = nn.Sequential(Block())
    mixprec.cast_parameters(model, LOW, keep_fp32=["*.router.*"], buffers=["*.attn_mask"])
    assert {p.dtype for p in model[0].router.parameters()} == {torch.float32}
    assert {p.dtype for p in model[0].mixed.parameters()} == {LOW}
    assert model[0].attn_mask.dtype == LOW
    assert model[0].inv_freq.dtype == model[0].batch_norm.running_mean.dtype == torch.float32


def test_a_weight_that_is_tied_is_kept_under_either_name() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    mixprec.cast_parameters(model, LOW, keep_fp32=["b.weight"])
    assert model["a"].weight.dtype == torch.float32
    assert model["a"].bias.dtype == LOW


@pytest.mark.parametrize("option", ["keep_fp32", "buffers"])
def test_a_pattern_without_a_match_changes_nothing(option: str) -> None:
    block = Block()
    with pytest.raises(ValueError, match=rf"cast_parameters: {option} has 'routr\.\*', which mat"):
        mixprec.cast_parameters(block, LOW, **{option: ["routr.*"]})
    with pytest.raises(TypeError, match=f"{option} must be a list of patterns"):
        mixprec.cast_parameters(block, LOW, **{option: "router.*"})
    assert block.router.weight.dtype == torch.float32
