"""A training step of a vision model in each precision: torch's own, and ours as README has it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import mixprec

from . import gpu
from .vision_models import MODELS, Batch, images

WEIGHT_DECAY = 0.05
# A precision is right if its first loss is FP32's within FIRST, and if some updates on one batch
# take off at least FALL of what they take off FP32's. Single gradients cannot be compared: at the
# start batch norm makes those of ResNet-50 chaotic, and torch's own in bf16 and in FP32 have a
# cosine of 0.1 (8 images of 64 x 64). Of a loss of 7.1, eight updates left 0.03 in FP32 and 1.8 in
# FP8 (ResNet-50, 16 images of 224 x 224), which is the least fall that was seen, 0.75 of FP32's.
FIRST, FALL = 0.05, 0.5
LEARNS = 0.1  # what FP32 has to take off the loss, at the least
SKIPS = 16  # loss scales start high: so many steps may come to nothing


@dataclass(frozen=True)
class Precision:
    """How a step computes. label, tf32: as rows say it; tf32 is None where no product is FP32.

    autocast: the dtype of torch.autocast. recipe: of mixprec.convert; None: torch's own layers,
    torch.optim.AdamW(fused=True) and torch's GradScaler.
    """

    label: str
    tf32: bool | None = None
    autocast: torch.dtype | None = None
    recipe: str | None = None
    only_worthwhile: bool = False


PRECISIONS = {
    "fp32": Precision("fp32", tf32=False),
    "tf32": Precision("fp32", tf32=True),
    "autocast-bf16": Precision("autocast-bf16", autocast=torch.bfloat16),
    "autocast-fp16": Precision("autocast-fp16", autocast=torch.float16),
    "bf16": Precision("bf16", autocast=torch.bfloat16, recipe="bf16"),
    "fp16": Precision("fp16", autocast=torch.float16, recipe="fp16"),
    "fp8": Precision("fp8", autocast=torch.bfloat16, recipe="fp8"),
    "fp8-delayed": Precision("fp8-delayed", autocast=torch.bfloat16, recipe="fp8-delayed"),
    "fp8-worthwhile": Precision(
        "fp8-worthwhile", autocast=torch.bfloat16, recipe="fp8", only_worthwhile=True
    ),
}
DEFAULT = ("fp32", "tf32", "autocast-bf16", "autocast-fp16", "bf16", "fp16", "fp8")


@contextlib.contextmanager
def switches(*, tf32: bool, benchmark: bool) -> Iterator[None]:
    """TF32 in products and convolutions, and cuDNN choosing by speed, as given; then as before."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = tf32, tf32, benchmark
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


class Trainer:
    """A model with what trains it: forward, cross entropy, backward, optimizer."""

    def __init__(self, name: str, make: Callable[[], nn.Module], precision: Precision) -> None:
        self.name, self.precision = name, precision
        model, device, dtype = make().train(), gpu.DEVICE.type, precision.autocast
        scaled = dtype == torch.float16
        options: dict[str, Any] = {"lr": MODELS[name].lr, "weight_decay": WEIGHT_DECAY}
        self.optimizer: torch.optim.Optimizer
        self.scaler: torch.amp.GradScaler
        if precision.recipe is None:
            self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **options)
            self.scaler = torch.amp.GradScaler(device, enabled=scaled)
        else:
            assert dtype is not None, "a recipe computes in 16 bits or less"
            keep = mixprec.filters.worthwhile if precision.only_worthwhile else None
            model = mixprec.convert(model, precision.recipe, keep)
            model = mixprec.cast_parameters(model, dtype)
            self.optimizer = mixprec.optim.AdamW(model.parameters(), **options)
            self.scaler = mixprec.GradScaler(enabled=scaled)
        self.model = model

    def batch(self, count: int, seed: int = 0) -> Batch:
        """Images as this precision is given them: 16 bits where the parameters are."""
        ours = self.precision.recipe is not None and self.precision.autocast
        return images(self.name, count, ours or torch.float32, seed)

    def step(self, batch: Batch) -> torch.Tensor:
        """One step; the loss before it, FP32 []. Waits for the device where the scaler does."""
        x, labels = batch
        with self._autocast():
            loss = functional.cross_entropy(self.model(x).float(), labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.precision.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(gpu.DEVICE.type, self.precision.autocast)

    def losses(self, count: int, updates: int) -> list[float]:
        """Before the first and after each of `updates` updates on one batch; fewer losses if too
        many steps were skipped."""
        batch, scale, steps = self.batch(count), self.scaler.get_scale(), 0
        found: list[float] = []
        while len(found) < updates and steps < updates + SKIPS:
            loss = self.step(batch).item()
            steps += 1
            if self.scaler.get_scale() >= scale:  # it backs off when it skips
                found.append(loss)
            scale = self.scaler.get_scale()
        return [*found, self.step(batch).item()]


def wrong(losses: list[float], reference: list[float]) -> str | None:
    """What is wrong with the losses of `Trainer.losses`, beside those of FP32 without TF32."""
    told = f"losses {_words(losses)}, in FP32 {_words(reference)}"
    fell = reference[0] - reference[-1]
    if not all(map(math.isfinite, reference)) or fell < LEARNS:
        return f"FP32 does not learn, so there is nothing to compare with: {told}"
    if not all(map(math.isfinite, losses)):
        return f"a loss is not finite: {told}"
    if len(losses) < len(reference):
        return f"too many steps were skipped: {told}"
    if abs(losses[0] - reference[0]) > FIRST * reference[0]:
        return f"the first loss is not FP32's within {FIRST:.0%}: {told}"
    if losses[0] - losses[-1] < FALL * fell:
        return f"the loss falls by less than {FALL:.0%} of what FP32's does: {told}"
    return None


def _words(losses: list[float]) -> str:
    return " ".join(f"{loss:.3f}" for loss in losses)
