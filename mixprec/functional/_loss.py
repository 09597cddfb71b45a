"""The cross entropy of logits: its settings, and what becomes of the statistics of the rows."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ._derivatives import Tensors

REDUCTIONS = ("none", "mean", "sum")


class Loss(NamedTuple):
    """How the loss is computed of logits: see the arguments of `linear_cross_entropy`."""

    ignore_index: int
    reduction: str
    label_smoothing: float
    z_loss: float
    softcap: float  # 0: none

    def check(self, op: str) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueError(
                f'{op}: reduction must be "none", "mean" or "sum", got {self.reduction!r}'
            )
        if type(self.ignore_index) is not int:
            raise TypeError(f"{op}: ignore_index must be an int, got {self.ignore_index!r}")
        for name in ("label_smoothing", "z_loss", "softcap"):
            if not isinstance(value := getattr(self, name), (int, float)):
                raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(
                f"{op}: label_smoothing must be between 0 and 1, got {self.label_smoothing}"
            )
        for name in ("z_loss", "softcap"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(
                    f"{op}: {name} must be finite and 0 or more, got {getattr(self, name)}"
                )

    def reduced(self, rows: torch.Tensor, valid: torch.Tensor, classes: int) -> Tensors:
        """The loss, and the logsumexp of each row, from the statistics of the rows."""
        maximum, total, picked, sums = rows.unbind(1)
        logsumexp = maximum + total.log()
        losses = logsumexp - (1.0 - self.label_smoothing) * picked
        if self.label_smoothing > 0:
            losses = losses - self.label_smoothing / classes * sums
        if self.z_loss > 0:
            losses = losses + self.z_loss * logsumexp.square()
        losses = torch.where(valid, losses, 0.0)
        if self.reduction == "none":
            return losses, logsumexp
        loss = losses.sum()
        return loss if self.reduction == "sum" else loss / valid.sum(), logsumexp


def cross_entropy(logits: torch.Tensor, target: torch.Tensor, how: Loss) -> torch.Tensor:
    """The same loss of logits [..., V], as torch computes it."""
    how.check("cross_entropy")
    logits, labels = logits.reshape(-1, logits.shape[-1]).float(), target.reshape(-1)
    logits = how.softcap * (logits / how.softcap).tanh() if how.softcap > 0 else logits
    losses = torch.nn.functional.cross_entropy(
        logits,
        labels,
        ignore_index=how.ignore_index,
        reduction="none",
        label_smoothing=how.label_smoothing,
    )
    valid = labels != how.ignore_index
    if how.z_loss > 0:
        squares = how.z_loss * logits.logsumexp(-1).square()
        losses = losses + torch.where(valid, squares, 0.0)
    if how.reduction == "none":
        return losses.view(target.shape)
    return losses.sum() if how.reduction == "sum" else losses.sum() / valid.sum()
