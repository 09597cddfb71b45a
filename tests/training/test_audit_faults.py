"""audit names faults that are planted in training steps, and nothing in steps without one.

The docstring of a fault that was found in another project says where.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from audit_steps import (
    HALF,
    LOW,
    Attention,
    Calls,
    ChunkedLoss,
    D,
    Head,
    InFloat32,
    Tied,
    X,
    autocast_of_another_device,
    bf16,
    converted,
    half_step,
    in_two,
    is_linear,
    layers,
    loss_of,
    mixture,
    scaled,
    step,
    with_optimizer,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mixprec

Make = Callable[[], list[str]]


def partly_frozen(recipe: str) -> nn.Module:
    model = layers()
    model[0].requires_grad_(False)
    return converted(model, recipe)


FAULTS: dict[str, tuple[Any, ...]] = {
    # what is planted, the finding, and the same without the fault, where CLEAN has it not
    "a filter that takes one layer of many": (
        lambda: step(converted(layers(depth=40), module_filter_fn=lambda _, fqn: fqn == "0")),
        r"2, 4, 6 and 36 more \(Linear\): fp32, because mixprec.convert has left it out; 98\.3%",
    ),
    "a tied weight converted once": (
        lambda: step(converted(Tied(), overrides={"out": None})),
        r"out \(Linear\): fp32, because mixprec.convert has left it out",
    ),
    "FP32 in a BF16 model": (
        lambda: step(
            Calls(lambda x, w: (x.float() @ w.float()).to(x.dtype)).bfloat16(), x=X.bfloat16()
        ),
        r"Calls \(Calls\): fp32, to which the program casts its operands; 60\.0%",
        lambda: step(Calls(lambda x, w: x @ w).bfloat16(), x=X.bfloat16()),
    ),
    "a layer that stayed in FP32": (
        lambda: step(in_two(layers().bfloat16(), nn.Linear)),
        r"second \(Linear\): fp32, set by: tensor dtype; 37\.5%",
        lambda: step(in_two(layers().bfloat16(), lambda *size: nn.Linear(*size).bfloat16())),
    ),
    "autocast off around the head": (
        lambda: step(Head(torch.autocast("cpu", enabled=False)), bf16()),
        r"head \(Linear\): fp32, set by: tensor dtype; 37\.5%",
    ),
    "autocast for another device": (
        lambda: step(layers(), autocast_of_another_device()),
        "torch.autocast is on for cuda, and the products run on cpu",
    ),
    "fp16 autocast without a scaler": (
        lambda: step(layers(), torch.autocast("cpu", HALF)),
        "fp16 gradients are not scaled, or audit was not given the scaler",
    ),
    "clipping of scaled gradients": (
        lambda: scaled(layers(), "clip step update"),
        r"gradients were clipped before scaler.unscale_\(optimizer\)",
        lambda: scaled(layers(), "unscale_ clip step update"),
    ),
    "clipping of scaled gradients of ours": (
        lambda: scaled(layers(), "clip step update", scaler=mixprec.GradScaler()),
        r"gradients were clipped before scaler.unscale_\(optimizer\)",
        lambda: scaled(layers(), "unscale_ clip step update", scaler=mixprec.GradScaler()),
    ),
    "a scaler that is never updated": (
        lambda: scaled(layers(), "step"),
        r"scaler.step\(\) was called, and scaler.update\(\) was not: the scale stays",
    ),
    "a disabled scaler": (
        lambda: scaled(layers(), "step update", scaler=torch.amp.GradScaler("cpu", enabled=False)),
        "GradScaler is disabled: fp16 gradients are not scaled",
        lambda: scaled(layers(), "step update", scaler=mixprec.GradScaler()),
    ),
    "a scaler that scales nothing": (
        lambda: step(layers().half(), x=X.half(), scaler=mixprec.GradScaler()),
        r"scaler.scale\(loss\) was not called before backward\(\)",
        lambda: half_step(layers(), loss_of),
    ),
    "a step without the scaler": (
        lambda: scaled(layers(), "plain_step"),
        r"optimizer.step\(\) ran in place of scaler.step\(\)",
    ),
    "a loss scale that has fallen": (
        lambda: scaled(layers(), "step update", scaler=torch.amp.GradScaler("cpu", 2.0**-3)),
        "the loss scale has fallen to 0.125",
        lambda: scaled(layers(), "step update", scaler=torch.amp.GradScaler("cpu", 2.0**9)),
    ),
    "steps that are all skipped": (
        lambda: scaled(layers(), "step update", scaler=torch.amp.GradScaler("cpu", 2.0**40)),
        "GradScaler has skipped every step: gradients are Inf or NaN",
    ),
    "softmax in fp16": (
        lambda: half_step(Calls(lambda x, w: x.softmax(-1)), loss_of),
        "softmax runs in fp16: Calls",
        lambda: half_step(Calls(lambda x, w: x.softmax(-1, dtype=torch.float32)), loss_of),
    ),
    "a loss in bf16": (
        lambda: step(Calls(lambda x, w: F.log_softmax(x, -1)).bfloat16(), x=X.bfloat16()),
        r"Calls: the loss is computed in bf16 \(log_softmax\)",
        lambda: step(Calls(lambda x, w: F.log_softmax(x.float(), -1)).bfloat16(), x=X.bfloat16()),
    ),
    "a frozen layer in fp8": (
        lambda: step(partly_frozen("fp8")),
        "0: a frozen weight is cast to fp8 in each pass",
    ),
    "a scaler in FP32": (
        lambda: scaled(layers(), "step update", low=False),
        "no op computes in fp16: it is not needed",
    ),
    "a loss in fp16": (
        lambda: half_step(layers(), lambda y: F.mse_loss(y, torch.zeros_like(y))),
        r"the loss is computed in fp16 \(mse_loss\)",
        lambda: half_step(layers(), lambda y: F.mse_loss(y.float(), torch.zeros_like(y).float())),
    ),
    "norms in fp16": (
        lambda: half_step(layers(nn.LayerNorm(D), nn.Linear(D, D)), loss_of),
        "norms run in fp16, with their weights: 4$",
        lambda: half_step(layers(InFloat32(D), nn.Linear(D, D)), loss_of),
    ),
    "a cast and back in a residual": (
        lambda: step(Calls(lambda x, w: (x + x.half().float()) @ w)),
        r"test_audit_faults.py:\d+: a tensor is cast from fp32 to fp16 and back at once, 1x$",
        lambda: step(Calls(lambda x, w: (x + x.relu()) @ w)),
    ),
    "a head whose gradient is summed in BF16": (
        lambda: step(in_two(layers(), lambda *size: nn.Linear(*size).bfloat16()), batches=8),
        "gradients are summed in bf16 over 8 backward passes, of second.weight, second.bias",
        lambda: step(in_two(layers(), nn.Linear), batches=8),
    ),
    "attention in FP32": (
        lambda: step(Attention(torch.float32).bfloat16(), x=X.bfloat16()),
        r"Attention \(Attention\): fp32, to which the program casts its operands; \d+\.\d%",
        lambda: step(Attention(LOW).bfloat16(), x=X.bfloat16()),
    ),
    "a learning rate below the last bit": (
        lambda: with_optimizer(layers().bfloat16(), 1e-6, torch.optim.AdamW),
        r"\d+% of the bf16 weights with a gradient did not change in optimizer.step\(\)",
        lambda: with_optimizer(layers().bfloat16(), 1e-6, mixprec.optim.AdamW),
    ),
    "a region without layers": (
        lambda: step(layers(), mixprec.autocast("fp8")),
        "mixprec.autocast fp8 is on, and no product uses it: only layers of mixprec.convert do",
    ),
}


def check(plant: Make, finding: str, *clean: Make) -> None:
    found = plant()
    assert len([line for line in found if re.search(finding, line)]) == 1, found
    assert [line for make in clean for line in make()] == []


@pytest.mark.filterwarnings("ignore:convert. .* was asked for and reaches")
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults(fault: str) -> None:
    check(*FAULTS[fault])


# Steps without a fault


def micro_batches() -> list[str]:
    model = mixprec.cast_parameters(converted(layers()), LOW)
    adamw = mixprec.optim.AdamW(model.parameters(), lr=1e-4, grad_dtype=torch.float32)
    return step(model, batches=8, optimizer=adamw)


def fp16_masters(clip: float | None) -> list[str]:
    model = mixprec.cast_parameters(converted(layers(), "fp16"), HALF)
    sgd = mixprec.optim.SGD(model.parameters(), lr=1e-3, max_grad_norm=clip)
    scaler = mixprec.GradScaler()
    with mixprec.audit(model, optimizer=sgd, scaler=scaler) as audit:
        for _ in range(3):
            scaler.scale(loss_of(model(X))).backward()
            scaler.step(sgd)
            scaler.update()
            sgd.zero_grad()
    return audit.findings


def checkpointed(reentrant: bool) -> list[str]:
    model = layers()

    def forward(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(nn.Sequential.forward, model, x, use_reentrant=reentrant)

    model.forward = forward
    return step(model, bf16(), x=X.clone().requires_grad_())


def frozen() -> list[str]:
    model = layers(nn.Linear(D, D))
    mixprec.freeze(model[:4], "int8")
    return step(mixprec.convert(model, "bf16"))


def recurrent() -> list[str]:
    layer = nn.LSTM(D, D)
    try:
        with bf16():
            layer(X[None])
    except RuntimeError as error:  # of oneDNN, without AVX512
        pytest.skip(f"torch has no LSTM in bf16 on this processor: {error}")
    return step(layer, bf16(), x=X[None], loss=lambda out: loss_of(out[0]))


def convolutions(recipe: str, dtype: torch.dtype = torch.float32) -> list[str]:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    mixprec.cast_parameters(converted(model, recipe), dtype)
    with mixprec.audit(model) as audit:
        loss_of(model(torch.linspace(-1, 1, 384).view(2, 3, 8, 8).to(dtype)))
    return audit.findings


def encoder(recipe: str) -> list[str]:
    model = nn.TransformerEncoderLayer(D, 2, D, batch_first=True)
    return step(converted(model, recipe), x=X[None])


def cross_entropy() -> list[str]:
    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return mixprec.functional.linear_cross_entropy(x, w, torch.arange(8))

    return step(Calls(loss).bfloat16(), x=X.bfloat16(), loss=lambda value: value)


CLEAN: dict[str, Make] = {
    "FP32": lambda: step(layers(), optimizer=None),
    "FP32, AdamW": lambda: with_optimizer(layers(), 1e-3, torch.optim.AdamW),
    "autocast, fp16": lambda: scaled(layers(), "step update"),
    "autocast": lambda: step(layers(nn.LayerNorm(D), nn.Linear(D, D)), bf16()),
    "autocast, checkpoint": lambda: checkpointed(False),
    "autocast, reentrant checkpoint": lambda: checkpointed(True),
    "autocast, LSTM": recurrent,
    "BF16 model": lambda: with_optimizer(layers().bfloat16(), 1e-4, mixprec.optim.AdamW),
    "BF16 model, large updates": lambda: with_optimizer(
        layers().bfloat16(), 0.1, torch.optim.AdamW
    ),
    "BF16 model, loss without logits": cross_entropy,
    "micro-batches": micro_batches,
    "converted": lambda: step(converted(layers())),
    "converted, tied": lambda: step(converted(Tied(), "fp8")),
    "converted, fused": lambda: step(converted(layers(), fuse=True)),
    "converted, delayed scales": lambda: step(converted(layers(), "fp8-delayed")),
    "converted, block formats": lambda: step(converted(layers(), "mxfp8")),
    "converted, in a region": lambda: step(converted(layers(), "fp8"), mixprec.autocast()),
    "converted, in torch.autocast": lambda: step(converted(layers(), "fp8"), bf16()),
    "converted, convolutions": lambda: convolutions("fp8"),
    "converted, attention": lambda: encoder("fp8"),
    "experts": lambda: step(converted(mixture(), "fp8")),
    "fp16 masters": lambda: fp16_masters(None),
    "fp16 masters, clipped": lambda: fp16_masters(0.1),
    "frozen": frozen,
}


@pytest.mark.parametrize("name", CLEAN)
def test_steps_without_a_fault(name: str) -> None:
    assert CLEAN[name]() == []


# Products that no layer computes


class Embedded(nn.Module):
    """The weight of an embedding is that of the head; head(h, weight) computes it."""

    def __init__(self, head: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(64, D), nn.Linear(D, D), head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens)), self.embedding.weight)


HEADS = {
    "linear": F.linear,
    "@": lambda h, w: h @ w.t(),
    "einsum": lambda h, w: torch.einsum("nd,vd->nv", h, w),
    "a copy": lambda h, w: h @ w.clone().t().contiguous(),
    "cast": lambda h, w: (h.double() @ w.double().t()).float(),
    "frozen": lambda h, w: F.linear(h, w.detach()),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_a_head_with_the_weight_of_another_module(head: str, compiled: bool) -> None:
    def found(recipe: str, head: Callable[..., torch.Tensor]) -> list[str]:
        model = converted(Embedded(head), recipe)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        with mixprec.audit(model) as audit:
            loss_of(run(torch.arange(8))).backward()
        return audit.findings

    precision, reason = "fp32", "which mixprec.convert does not reach: call an nn.Linear"
    if head == "cast":
        precision, reason = "fp64", "set by: cast"
    share = "57.1%" if head == "frozen" else "66.7%"
    for recipe in ("bf16", "mxfp8"):
        ours = functools.partial(mixprec.functional.linear, recipe=recipe)
        assert compiled or found(recipe, ours) == []
        (said,) = found(recipe, HEADS[head])
        where = f"Embedded: {precision} in the product with embedding.weight"
        assert said.startswith(f"{where}, {reason}")
        assert said.endswith(f"; {share} of the FLOPs")


# Faults of other projects


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8"])
def test_experts_that_a_converter_of_linear_layers_skipped(recipe: str) -> None:
    """pytorch/torchtitan 3199 (MXFP8) and 3233 (FP8): experts are no nn.Linear, and stayed BF16."""
    low = X.bfloat16()
    check(
        lambda: step(converted(mixture(LOW), recipe, module_filter_fn=is_linear), x=low),
        r"4 \(GroupedExperts\): bf16, because mixprec.convert has left it out; 42\.6%",
        lambda: step(converted(mixture(LOW), recipe), x=low),
    )


def test_experts_that_autocast_does_not_know() -> None:
    """pytorch/pytorch 174763: torch.autocast has no grouped_mm, which stays in FP32."""
    with bf16():
        ends = torch.tensor([D], dtype=torch.int32)
        y = F.grouped_mm(torch.eye(D), torch.eye(D)[None], offs=ends)
    if y.dtype == LOW:
        pytest.skip("the autocast of this torch has grouped_mm")
    check(
        lambda: step(mixture(), bf16()),
        r"4 \(GroupedExperts\): fp32, set by: tensor dtype; 42\.9%",
        lambda: step(converted(mixture())),
    )


def test_a_gradient_summed_in_16_bits_chunk_by_chunk() -> None:
    """linkedin/Liger-Kernel 1391: the gradient of the head is rounded to BF16 after each chunk."""

    def of(dtype: torch.dtype) -> list[str]:
        model = Calls(lambda x, w: ChunkedLoss.apply(x, w, dtype)).bfloat16()
        return step(model, x=X.bfloat16(), loss=lambda value: value)

    found = (
        rf"^.*/audit_steps.py:\d+: 4 products are summed in bf16, .* \[{D}, {D}\]: sum the chunks"
    )
    check(lambda: of(LOW), found, lambda: of(torch.float32))
