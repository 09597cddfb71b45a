"""LoRA and DoRA of peft on converted models and on bases frozen in 8 and in 4 bits."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import (
    DELAYED,
    INFS,
    STEPS,
    Case,
    assert_same_bits,
    batches,
    loop,
    network,
    run_program,
    state,
)
from torch import nn

import mixprec
from mixprec.frozen import FORMATS, FrozenLinear

peft = pytest.importorskip("peft", reason="the package peft is not installed")

CASE = Case(DELAYED, torch.bfloat16, {"max_grad_norm": 0.5})
ADAPTED = ("0", "3")  # the linear layers of `network`


def adapted(use_dora: bool, model: nn.Module | None = None, **options: Any) -> Any:
    config = peft.LoraConfig(r=4, target_modules=[*ADAPTED], use_dora=use_dora, **options)
    torch.manual_seed(3)
    return peft.get_peft_model(network() if model is None else model, config)


def convert(model: Any) -> Any:
    return mixprec.cast_parameters(mixprec.convert(model, DELAYED), torch.bfloat16)


def freeze(model: Any, fmt: str) -> Any:
    return mixprec.freeze(model.to(torch.bfloat16), fmt)[0]


BASES = {
    "converted to fp8-delayed": convert,
    **{f"frozen to {fmt}": partial(freeze, fmt=fmt) for fmt in FORMATS},
}
bases = pytest.mark.parametrize("base", BASES)
methods = pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])


@bases
@methods
def test_training(base: str, use_dora: bool) -> None:
    """50 steps of LoRA and DoRA with an overflow, and a resume: only the adapters, never in FP8"""
    data = batches(STEPS)
    *whole, norms = loop(CASE, BASES[base](adapted(use_dora)), data)
    half = loop(CASE, BASES[base](adapted(use_dora)), data[: STEPS // 2])
    names = ("model", "optimizer", "scheduler")
    saved = {n: copy.deepcopy(o.state_dict()) for n, o in zip(names, half, strict=False)}
    *resumed, later = loop(CASE, BASES[base](adapted(use_dora)), data[STEPS // 2 :], saved)
    assert_same_bits(state(*resumed), state(*whole))
    assert list(map(repr, norms[STEPS // 2 :])) == list(map(repr, later))  # NaN is NaN

    model, optimizer, scheduler, _ = whole
    assert optimizer.skipped == len(INFS)
    assert scheduler.last_epoch == STEPS - len(INFS)
    low = (mixprec.nn.Linear, FrozenLinear)
    for name, module in model.named_modules():
        if name.endswith("base_layer"):
            assert isinstance(module, low)
        elif "lora_" in name:
            assert not isinstance(module, low)
    start = dict(BASES[base](adapted(use_dora)).named_parameters())
    for name, p in model.named_parameters():
        assert p.requires_grad == ("lora_" in name)
        assert torch.equal(p, start[name]) != p.requires_grad


def with_adapters_of(source: Any, use_dora: bool, weights: dict[str, torch.Tensor]) -> Any:
    """Plain torch and peft: a network with `weights` and the adapters of `source`."""
    plain = network().to(torch.bfloat16)
    plain.load_state_dict(weights)
    plain = adapted(use_dora, plain)
    state = {name: p for name, p in source.state_dict().items() if "lora_" in name}
    for name, p in plain.named_parameters():
        if name in state:
            p.data = state[name].clone()  # in its dtype
    return plain


@pytest.mark.parametrize("safe", [False, True], ids=["", "safe"])
@bases
@methods
def test_merge_and_unload(base: str, use_dora: bool, safe: bool) -> None:
    """merge_and_unload equals that of the plain model; frozen layers are decoded, then merged"""
    model, *_ = loop(CASE, BASES[base](adapted(use_dora)), batches(10, infs=()))
    weights = network().to(torch.bfloat16).state_dict()
    for name in ADAPTED:
        layer = model.get_submodule(f"base_model.model.{name}.base_layer")
        if isinstance(layer, FrozenLinear):
            weights[f"{name}.weight"] = layer.decoded(torch.bfloat16)
    want = with_adapters_of(model, use_dora, weights).merge_and_unload(safe_merge=safe)
    x = batches(1, infs=())[0][0].bfloat16()
    before = model(x)
    copied = copy.deepcopy(model)
    merged = model.merge_and_unload(safe_merge=safe)
    for name, p in want.named_parameters():
        assert torch.equal(merged.get_parameter(name).to(p.dtype), p), name
    kind = mixprec.nn.Linear if base.startswith("converted") else nn.Linear
    assert [type(merged.get_submodule(name)) for name in ADAPTED] == [kind, kind]
    assert mixprec.testing.sqnr(before, merged(x)) > 20
    assert torch.equal(copied(x), before)


@bases
def test_modules_to_save(base: str) -> None:
    """modules_to_save stay trainable, and are not frozen"""
    config = peft.LoraConfig(target_modules=["0"], modules_to_save=["3"])
    model = BASES[base](peft.get_peft_model(network(), config))
    model(torch.ones(2, 16).bfloat16()).float().sum().backward()
    head = model.get_parameter("base_model.model.3.modules_to_save.default.weight")
    assert head.requires_grad
    assert head.grad is not None


def test_example(tmp_path: Path) -> None:
    """The program in examples/ runs as it stands"""
    assert "merged" in run_program(tmp_path, "train_peft.py")
