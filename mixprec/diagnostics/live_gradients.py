"""How many bytes of gradients exist at once in a backward pass that frees each of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch


class LiveGradients:
    """Measures, from the nodes of a loss, what waits for `grad` to be complete: `largest`, in
    bytes. The gradient of a parameter exists from the first node that computes a part of it."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.largest = 0
        self._live: dict[Any, int] = {}
        for node in nodes(loss.grad_fn):
            if hasattr(node, "variable"):  # it accumulates into a leaf
                node.register_hook(partial(self._remove, node))
            elif any(hasattr(edge, "variable") for edge, _ in node.next_functions):
                node.register_hook(partial(self._add, node))

    def _remove(self, node: Any, *_: Any) -> None:
        self._live.pop(node, None)

    def _add(self, node: Any, grads: tuple[torch.Tensor | None, ...], _: Any) -> None:
        for (edge, _), grad in zip(node.next_functions, grads, strict=True):
            if grad is not None and hasattr(edge, "variable"):
                self._live[edge] = grad.numel() * grad.element_size()
        self.largest = max(self.largest, sum(self._live.values()))


def nodes(root: Any) -> Iterator[Any]:
    seen, waiting = set(), [root]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [edge for edge, _ in node.next_functions]
            yield node
