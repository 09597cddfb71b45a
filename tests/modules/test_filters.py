"""filters.worthwhile: thresholds, and the reasons it logs."""

from __future__ import annotations

import logging

import pytest
import torch
from cases import for_each
from torch import nn

from mixprec.nn import Linear
from mixprec.nn.convert import convert
from mixprec.nn.filters import worthwhile

CASES = [  # in, out, per tensor, per row or block
    (4096, 1024, False, False),
    (4097, 1024, True, False),
    (4096, 1025, True, False),
    (1024, 4096, True, False),
    (1025, 4097, True, True),
    (2048, 4096, True, False),
    (2049, 2049, True, True),
    (8192, 2048, True, False),
]


@for_each("k, n, per_tensor, finer", CASES)
def test_thresholds_of_linear_layers_and_1x1_convolutions(
    k: int, n: int, per_tensor: bool, finer: bool
) -> None:
    want = {"bf16": True, "fp16": True, "fp8": per_tensor, "fp8-delayed": per_tensor}
    want |= {"fp8-rowwise": finer, "fp8-block": finer}
    with torch.device("meta"):
        layers = [nn.Conv2d(k, n, 1, padding=p) for p in (0, "same", "valid")]
        layers += [nn.Linear(k, n)]
    for layer in layers:
        assert {recipe: worthwhile(layer, "up", recipe) for recipe in want} == want
        assert worthwhile(layer, "up") == per_tensor


def test_as_a_filter_of_convert(caplog: pytest.LogCaptureFixture) -> None:
    def kinds(recipe: str, overrides: dict[str, str]) -> list[type]:
        with torch.device("meta"):
            model = nn.ModuleDict({"small": nn.Linear(1024, 1024), "up": nn.Linear(4096, 2048)})
        with caplog.at_level(logging.INFO, logger="mixprec"):
            convert(model, recipe, worthwhile, overrides)
        return [type(m) for m in model.values()]

    assert kinds("fp8", {}) == [nn.Linear, Linear]
    assert caplog.messages[0] == (
        "worthwhile: small (in 1024, out 1024) stays: fp8, in <= 4096 and out <= 1024"
    )
    assert kinds("fp8-rowwise", {"small": "bf16"}) == [Linear, nn.Linear]
    assert "up (in 4096, out 2048) stays: fp8-rowwise, out <= 2048" in caplog.text


@for_each("options", [{"kernel_size": 3}, {"padding": 1}, {"groups": 2}, {"kernel_size": (1, 3)}])
def test_other_convolutions_save_memory_alone(
    options: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    layer = nn.Conv2d(8192, 8192, **{"kernel_size": 1} | options, device="meta")
    with caplog.at_level(logging.INFO, logger="mixprec"):
        recipes = ("fp8", "fp8-delayed", "fp8-rowwise", "fp8-block", "bf16", "fp16")
        assert [worthwhile(layer, "stem", recipe) for recipe in recipes] == [False] * 4 + [True] * 2
    assert caplog.messages[0] == (
        "worthwhile: stem (in 8192, out 8192) stays: fp8, "
        "a convolution that is not 1x1 saves memory, not time"
    )


def test_other_modules_are_none_of_its_business() -> None:
    assert worthwhile(nn.LayerNorm(4), "norm")
