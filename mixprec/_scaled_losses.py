"""Which backward passes begin at a loss that a GradScaler has scaled."""

from __future__ import annotations

from collections import deque

import torch

# By autograd's number. Not per thread: a pass has a thread for each device.
_passes: deque[int] = deque(maxlen=64)
_marks = [False]  # whether any optimizer asks


def start() -> None:
    """Losses are marked from here on."""
    _marks[0] = True


def mark(loss: torch.Tensor) -> None:
    """Record the backward passes through this loss; not in compiled code."""
    if not torch.compiler.is_compiling() and _marks[0] and loss.requires_grad:
        loss.register_hook(_record)


def is_scaled(task: int) -> bool:
    """Whether this backward pass has gone through a marked loss."""
    return task in _passes


def _record(_: torch.Tensor) -> None:
    _passes.append(torch._C._current_graph_task_id())
