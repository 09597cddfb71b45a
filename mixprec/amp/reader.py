"""The gradients of the optimizers that a GradScaler drives: read for it, counted, reported."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection

import torch

from ..distributed import Ranks
from ..grad_report import GradCounts, Overflow, Underflow, is_set, namer, worst_first
from ..ops import grad_stats_
from .optimizers import any_flag, gradients, params_of


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


def check_(
    grads: list[torch.Tensor],
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """`ops.unscale_` that leaves the gradients as they are."""
    sum_sq = torch.empty(len(grads), dtype=torch.float64, device=found_inf.device)
    grad_stats_(grads, inv_scale, found_inf, sum_sq, counts)


class GradReader:
    """Reads gradients for optimizers of torch, and has the counts of those that read their own."""

    def __init__(self, ranks: Ranks, model: torch.nn.Module | None = None) -> None:
        """ranks: those that must agree. model: whose names the reports use."""
        self.ranks, self._model = ranks, None if model is None else weakref.ref(model)
        self.counts: weakref.WeakKeyDictionary[torch.optim.Optimizer, GradCounts] = (
            weakref.WeakKeyDictionary()
        )

    def read(
        self,
        optimizer: torch.optim.Optimizer,
        op: Callable[..., None],
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Run `ops.unscale_` or `check_` on the gradients of `optimizer`. Returns one flag for all
        devices and ranks, {} if there are no gradients."""
        per_device = gradients(optimizer, allow_fp16=allow_fp16)
        counts = getattr(optimizer, "grad_counts", None)
        if not isinstance(counts, GradCounts):
            counts = self.counts.get(optimizer) or GradCounts()
        self.counts[optimizer] = counts
        counts.start()
        home, flags = found_inf.device, []
        with torch.no_grad():
            for device, (params, grads) in per_device.items():
                flags.append(found_inf.to(device, copy=True))
                table = counts.table(device, params, [g.numel() for g in grads])
                op(grads, inv_scale.to(device, non_blocking=True), flags[-1], table)
        everyone = params_of(optimizer)
        is_local = self.ranks.is_local(everyone)
        if not flags and is_local:
            return {}
        found_inf = any_flag(flags, home) if flags else found_inf
        if not is_local:
            none = torch.zeros(0, dtype=torch.float64, device=home)
            self.ranks.agree_(found_inf, none, [], [], 0, everyone)
        counts.finish(is_set(found_inf))
        return {home: found_inf}

    def underflow_share(self, stepped: Collection[int], home: torch.device) -> torch.Tensor | None:
        """The largest share of subnormal numbers of the optimizers with these ids, if known."""
        counts = [counts for o, counts in self.counts.items() if id(o) in stepped]
        shares = [each.underflow_share(home) for each in counts]
        known = [share for share in shares if share is not None]
        return torch.stack(known).max() if known else None

    def overflows(self, model: torch.nn.Module | None) -> list[Overflow]:
        optimizers, name = list(self.counts), self._namer(model)
        return worst_first([each for o in optimizers for each in self.counts[o].overflows(name)])

    def underflows(self, model: torch.nn.Module | None) -> list[Underflow]:
        optimizers, name = list(self.counts), self._namer(model)
        return [each for o in optimizers for each in self.counts[o].underflows(name)]

    def _namer(self, model: torch.nn.Module | None) -> Callable[[torch.Tensor], str]:
        if model is None and self._model is not None:
            model = self._model()
        return namer(list(self.counts), model)

    def __reduce__(self) -> tuple[type[GradReader], tuple[Ranks]]:
        return GradReader, (self.ranks,)  # the rest is valid in this process only
