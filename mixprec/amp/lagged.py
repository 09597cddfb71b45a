"""Numbers of the device, on the host, a little late: nobody waits for them."""

from __future__ import annotations

from collections import deque

import torch


class Lagged:
    """The newest value of a small tensor that has arrived on the host."""

    def __init__(self) -> None:
        self._arrived: torch.Tensor | None = None
        self._on_the_way: deque[tuple[torch.Tensor, torch.Event | None]] = deque()

    def push(self, tensor: torch.Tensor) -> None:
        """Start to copy what `tensor` holds now."""
        if tensor.device.type == "cpu":
            self._arrived = tensor.clone()
            return
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # a graph would copy to the same place at every replay, unnoticed
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        event = torch.Event(tensor.device)
        event.record()
        self._on_the_way.append((pinned, event))

    def latest(self) -> list[int] | None:
        """The newest copy that is complete, None before the first."""
        while self._on_the_way and self._on_the_way[0][1].query():  # type: ignore[union-attr]
            self._arrived = self._on_the_way.popleft()[0]
        return None if self._arrived is None else self._arrived.tolist()
