"""Batches of every kind, and losses inside of outputs, where a function calls the model."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import for_each
from torch import nn

import mixprec
from mixprec.diagnostics.passes import map_tensors

X, Y = torch.ones(4, 16), torch.zeros(4, 8)
Pair = namedtuple("Pair", "x target")


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Squares(nn.Module):
    """Returns what `wrap` makes of its output; the loss is in it where there is a target."""

    def __init__(self, wrap: Any = Output) -> None:
        super().__init__()
        self.linear, self.wrap = nn.Linear(16, 8), wrap

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None, unit: str = "") -> Any:
        y = self.linear(x)
        return self.wrap(y, None if target is None else (y - target).square().mean())


BATCHES = [
    (X, Y),
    [X, Y],
    Pair(X, Y),
    {"x": X, "target": Y},
    UserDict(x=X, target=Y),  # as BatchEncoding of transformers is one
    {"target": Y, "x": X, "unit": "m"},
]


@for_each("batch", BATCHES)
def test_every_function_takes_every_batch(batch: Any) -> None:
    model = mixprec.convert(Squares(), "bf16")
    assert [*mixprec.audit(model, batch).decided] == ["recipe bf16"]
    optimizer = mixprec.optim.AdamW(model.parameters())
    assert mixprec.memory_report(model, optimizer, batch).saved_total > 0
    lean, _ = mixprec.lean(Squares(), batch=batch, verbose=False)
    assert lean.linear.weight.dtype == torch.bfloat16


WRAPS = (Output, lambda logits, loss: {"loss": loss, "logits": logits}, lambda _, loss: loss)


@for_each("wrap", WRAPS)
def test_losses_in_outputs(wrap: Any) -> None:
    model = Squares(wrap)
    assert mixprec.memory_report(model, torch.optim.SGD(model.parameters()), (X, Y)).gradients > 0


@pytest.mark.parametrize(
    ("wrap", "got"),
    [
        (Output, "Output"),
        (WRAPS[1], "dict"),
        (lambda logits, loss: logits, r"shape \(4, 8\)"),
        (lambda logits, loss: Output(logits, logits), r"shape \(4, 8\)"),
    ],
)
def test_outputs_without_a_loss(wrap: Any, got: str) -> None:
    model = Squares(wrap)
    optimizer = torch.optim.SGD(model.parameters())
    message = f"the loss must be one number, got {got}: "
    with pytest.raises(ValueError, match=f"^memory_report: {message}pass loss=, a function of the"):
        mixprec.memory_report(model, optimizer, X)
    loss = mixprec.memory_report(Squares(), optimizer, X, lambda output: output.logits.sum())
    assert loss.total > 0


def test_nested_batches_keep_their_kind() -> None:
    nested = {"a": [X, "text"], "b": Pair(X, {"c": (3, X)})}
    low = map_tensors(torch.Tensor.half, nested)
    assert low["a"][1] == "text"
    assert isinstance(low["b"], Pair)
    assert (low["b"].target["c"][0], low["b"].target["c"][1].dtype) == (3, torch.float16)
