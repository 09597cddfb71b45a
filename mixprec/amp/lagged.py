"""Device values read on the host without waiting for the device."""

from __future__ import annotations

from collections import deque

import torch


class Lagged:
    """The latest value of a small tensor whose copy to the host has completed."""

    def __init__(self) -> None:
        self._arrived: torch.Tensor | None = None
        self._pending: deque[tuple[torch.Tensor, torch.Event | None]] = deque()

    def push(self, tensor: torch.Tensor) -> None:
        """Start to copy the current value of `tensor`."""
        if tensor.device.type == "cpu":
            self._arrived = tensor.clone()
            return
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # a graph would overwrite the same copy at every replay
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        event = torch.Event(tensor.device)
        event.record()
        self._pending.append((pinned, event))

    def latest(self) -> list[int] | None:
        """The latest copy that is complete, None before the first."""
        while self._pending and self._pending[0][1].query():  # type: ignore[union-attr]
            self._arrived = self._pending.popleft()[0]
        return None if self._arrived is None else self._arrived.tolist()
