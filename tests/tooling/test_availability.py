"""is_available and why_not: an answer for every device, with the reason."""

from __future__ import annotations

import re

import pytest
import torch

import mixprec
from mixprec.availability import why_not_cuda
from mixprec.recipes import RECIPES, Recipe

GPUS = {
    "GTX 1080": (6, 1), "V100": (7, 0), "T4": (7, 5), "A100": (8, 0), "RTX 3090": (8, 6),
    "L4": (8, 9), "H200": (9, 0), "B200": (10, 0), "RTX 5090": (12, 0),
}  # fmt: skip
FP16 = {"V100", "T4", "A100", "RTX 3090", "L4", "H200", "B200", "RTX 5090"}
BF16 = FP16 - {"V100", "T4"}
FP8 = BF16 - {"A100", "RTX 3090"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_nvidia_from_pascal_to_blackwell(recipe: str) -> None:
    native = {"fp16": FP16, "bf16": BF16}.get(recipe, FP8)
    if RECIPES[recipe].is_block:
        reason = why_not_cuda(RECIPES[recipe], (10, 0), "B200")
        assert reason is None if recipe != "mxfp4" else "decoded to bf16" in str(reason)
        assert "decoded to bf16" in str(why_not_cuda(RECIPES[recipe], (9, 0), "H100"))
        return
    for gpu, capability in GPUS.items():
        reason = why_not_cuda(Recipe.parse(recipe), capability, gpu)
        assert (reason is None) == (gpu in native), gpu
        # What is missing, and what is lost
        assert reason is None or re.search(rf"^{gpu} \(.*recipe runs.*speed is not gained", reason)


def test_devices_without_kernels_have_a_reason() -> None:
    assert why_not_cuda(Recipe.parse("fp8"), (8, 0), "A100") == (
        "A100 (Ampere, compute capability 8.0) has no tensor cores for fp8, which came with Ada or "
        "Hopper (8.9); the recipe runs, memory is saved as with the format, speed is not gained"
    )
    for device in ("xpu", "mps", "xla", "hpu", "meta"):
        for recipe in RECIPES:
            assert not mixprec.is_available(recipe, device)
            assert len(mixprec.why_not(recipe, device) or "") > 20


def test_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "fnuz" in (mixprec.why_not("fp8", "cuda") or "")
    assert mixprec.is_available("bf16", "cuda")


def test_cuda_without_and_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert mixprec.why_not("bf16", "cuda") == "this torch is built without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert mixprec.why_not("bf16", "cuda:0") == "torch sees no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    assert mixprec.is_available("bf16")
    assert "A100" in (mixprec.why_not("fp8", 0) or "")


def test_the_cpu() -> None:
    assert "decoded exactly" in (mixprec.why_not("fp8", "cpu") or "")
    assert "fp32" in (mixprec.why_not("fp16", "cpu") or "")
    bf16 = mixprec.why_not("bf16", "cpu")
    assert bf16 is None or "instructions for bf16" in bf16


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="recipe must be"):
        mixprec.why_not("fp9", "cpu")
    with pytest.raises(RuntimeError):
        mixprec.is_available("fp8", "gpu")
