"""audit of models of transformers and diffusers: owners, FLOPs, who decided, and no
finding without a fault."""

from __future__ import annotations

import functools
import re
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from audited_models import FAMILIES, MODELS, loss_of, make
from torch import nn

import mixprec

PRODUCTS = ("product", "convolution")
CONVERTED = ("bf16", "bf16 fused", "fp8")
OTHER_FINDINGS = {  # beside those of layers that have no recipe, or no autocast
    # The scan is in FP32, and so is the stream of the residuals, which is cast for the next norm.
    **dict.fromkeys((("Mamba", way) for way in CONVERTED), r"\(MambaMixer\): fp32, because"),
    ("Mamba", "bf16 model"): r"layers.1.norm: a tensor is cast from fp32 to bf16 and back",
}


def flops_by_hand(layer: Any, args: tuple[Any, ...], out: Any) -> tuple[int, int]:
    """FLOPs of the products with the weights of a layer, forward and backward. Backward has one for
    the gradient of the weight, and one for that of an input that has one."""
    x = args[0] if args else None
    # In a reentrant checkpoint the backward pass comes with the second forward pass.
    has_gradient = not torch.is_grad_enabled() or getattr(x, "requires_grad", False)
    if isinstance(getattr(layer, "gate_up_proj", None), nn.Parameter):
        pairs = args[1].numel()  # of a token and an expert
        once = 2 * pairs * (layer.gate_up_proj[0].numel() + layer.down_proj[0].numel())
    elif type(layer).__name__.endswith("TopKRouter"):
        once = 2 * x.numel() * layer.weight.shape[0]
    elif type(layer).__name__ == "Conv1D":  # of GPT-2
        once = 2 * x.numel() * layer.nf
    elif isinstance(layer, nn.Linear):
        once = 2 * x.numel() * layer.out_features
    elif isinstance(layer, nn.modules.conv._ConvNd):
        once = 2 * out.numel() * layer.weight[0].numel()
    else:
        return 0, 0
    return once, once * (1 + has_gradient)


def expected(model: nn.Module, batch: dict[str, Any]) -> tuple[Counter[str], Counter[str]]:
    """FLOPs of each layer, forward and backward, from what hooks see in FP32."""
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()

    def add(name: str) -> Any:
        def hook(layer: Any, args: Any, kwargs: Any, out: Any) -> None:
            once, twice = flops_by_hand(layer, (*args, *kwargs.values()), out)
            if once:
                forward[name] += once
                backward[name] += twice

        return hook

    named = model.named_modules()
    handles = [m.register_forward_hook(add(name), with_kwargs=True) for name, m in named]
    model(**batch)
    for handle in handles:
        handle.remove()
    return forward, backward


WAYS = {
    "fp32": ("fp32", "tensor dtype"),
    "torch.autocast": ("bf16", "torch.autocast"),
    "bf16 model": ("bf16", "tensor dtype"),
    "bf16": ("bf16", "recipe bf16"),
    "bf16 fused": ("bf16", "recipe bf16"),
    "fp8": ("fp8", "recipe fp8"),
    "checkpointed": ("fp32", "tensor dtype"),
}


CASES = [
    (name, way) for name in MODELS for way in WAYS if way != "checkpointed" or name in FAMILIES
]


@functools.cache
def autocast_knows_grouped_mm() -> bool:
    """It does not in torch 2.13."""
    x, ends = torch.ones(16, 16), torch.tensor([16], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        return nn.functional.grouped_mm(x, x[None], offs=ends).dtype == torch.bfloat16


def is_left(layer: nn.Module, way: str) -> bool:
    """Whether a layer stays in FP32: convert has no layer for it, or autocast no grouped_mm."""
    kind = type(layer).__name__
    stacked = kind.endswith("Experts")
    if way == "torch.autocast":
        return stacked and not autocast_knows_grouped_mm()
    known = isinstance(layer, (nn.Linear, nn.modules.conv._ConvNd)) or kind == "Conv1D"
    return way in CONVERTED and not (known or stacked)


def in_that_way(model: Any, batch: dict[str, Any], name: str, way: str) -> dict[str, Any]:
    """Change the model, and return its batch."""
    if way == "bf16 model":
        model.bfloat16()
        floats = {k: t for k, t in batch.items() if torch.is_tensor(t) and t.is_floating_point()}
        return batch | {k: t.bfloat16() for k, t in floats.items()}
    if way in CONVERTED:
        mixprec.convert(model, way.split()[0], fuse=way.endswith("fused"))
    elif way == "checkpointed":
        if not model.supports_gradient_checkpointing:
            pytest.skip(f"{name} has no checkpointing")
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return batch


@pytest.mark.filterwarnings("ignore:convert. .* was asked for and reaches")
@pytest.mark.parametrize(("name", "way"), CASES)
def test_layers_own_their_products(name: str, way: str) -> None:
    model, batch = make(name)
    forward, backward = expected(model, batch)
    left = {path: type(m).__name__ for path, m in model.named_modules() if path in forward}
    left = {path: kind for path, kind in left.items() if is_left(model.get_submodule(path), way)}
    batch = in_that_way(model, batch, name, way)
    region = torch.autocast("cpu", torch.bfloat16) if way == "torch.autocast" else nullcontext()
    with region:
        audit = mixprec.audit(model, batch, loss=loss_of)
    ops = [op for op in audit.ops if op.flops]
    got: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    for op in ops:
        path = op.module or ""
        if path in forward and op.kind in PRODUCTS:
            want = WAYS["fp32" if path in left else way]
            assert (op.precision, op.decided) == want, op
            if op.phase in got:
                got[op.phase][path] += op.flops
    assert got == {"forward": forward, "backward": backward}
    assert all(op.module is not None for op in ops)
    findings = [line for line in audit.findings if "the loss" not in line]
    wanted = [rf"\({kind}\): fp32" for kind in {*left.values()}]
    wanted += [OTHER_FINDINGS[name, way]] if (name, way) in OTHER_FINDINGS else []
    assert len(findings) == len(wanted), findings
    assert all(any(re.search(one, line) for line in findings) for one in wanted), findings
    share = sum(n for who, n in audit.decided.items() if who == "unknown")
    assert share <= 0.02 * sum(audit.flops.values())
