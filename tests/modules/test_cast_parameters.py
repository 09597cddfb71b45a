"""Which parameters and buffers cast_parameters casts."""

from __future__ import annotations

import importlib
import inspect
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import mixprec
from mixprec.nn import known_norms

LOW = torch.bfloat16


class LlamaRMSNorm(nn.Module):
    """The user's own, which may be anything: only its name is that of a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


class AbnormalHead(LlamaRMSNorm):
    """Has the letters in its name."""


class NormalizedLinear(nn.Linear):
    """Has a matrix for a weight."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = LlamaRMSNorm(4), nn.Linear(4, 2)
        self.mixed, self.batch_norm = NormalizedLinear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("inv_freq", torch.ones(2))
        self.register_buffer("attn_mask", torch.ones(2))


def test_torchs_norms_stay_and_those_that_only_have_the_name_are_cast_and_listed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    block = Block()
    block.head, block.other = AbnormalHead(4), AbnormalHead(4)
    with caplog.at_level(logging.INFO, "mixprec"):
        mixprec.cast_parameters(block, LOW, keep_fp32=["other.*"])
    assert {p.dtype for p in block.batch_norm.parameters()} == {torch.float32}
    assert block.other.weight.dtype == torch.float32
    for module in (block.mixed, block.norm, block.head):
        assert {p.dtype for p in module.parameters()} == {LOW}
        assert not module._forward_hooks
    assert {b.dtype for b in block.buffers() if b.is_floating_point()} == {torch.float32}
    assert caplog.messages == [
        "cast_parameters: modules with nothing but vectors are cast to bfloat16: 1 LlamaRMSNorm, "
        "1 AbnormalHead; norms that are not known can stay in FP32 by keep_fp32="
    ]
    caplog.clear()
    mixprec.cast_parameters(Block(), LOW, keep_fp32=["norm.*"])
    mixprec.cast_parameters(Block(), torch.float32)
    assert not caplog.messages


def test_a_norm_of_transformers_stays_and_returns_the_dtype_of_its_input() -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")

    class Derived(modeling.LlamaRMSNorm):
        pass

    for kind in (modeling.LlamaRMSNorm, Derived):
        norm = kind(4)
        for dtype in (LOW, LOW, torch.float32):  # again, and back
            mixprec.cast_parameters(norm, dtype)
        assert len(norm._forward_hooks) == 1
        assert norm.weight.dtype == torch.float32
        for dtype in (LOW, torch.float16, torch.float32):
            x = torch.ones(2, 4, dtype=dtype)
            assert norm(x).dtype == norm(hidden_states=x).dtype == dtype


@pytest.mark.slow
def test_every_known_norm_is_in_transformers_and_owns_vectors() -> None:
    pytest.importorskip("transformers")
    entries = known_norms._TRANSFORMERS.split()
    for entry in entries:
        where = entry.split("/")[:-1]
        importlib.import_module(f"transformers.models.{where[0]}.modeling_{where[-1]}")
    kinds = known_norms.known_norms()
    assert len(kinds) == len(set(kinds)) == len(entries)
    config = SimpleNamespace(hidden_size=8, head_dim=8, num_key_value_heads=2, eps=1e-6)
    norms = []
    for kind in kinds:
        parameters = list(inspect.signature(kind).parameters.values())
        needed = [p.name for p in parameters if p.default is p.empty] or [parameters[0].name]
        given = {"config": config, "feature_dims": (4,)}
        norms.append(kind(*(given.get(name, 8) for name in needed)))
        assert {p.dim() for p in norms[-1].parameters(recurse=False)} == {1}, kind
    model = mixprec.cast_parameters(nn.ModuleList(norms), LOW)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


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
