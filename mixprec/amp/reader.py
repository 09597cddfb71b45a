"""The optimizers that a GradScaler drives, of torch, of mixprec, or prepared by Accelerate, and
their gradients: read for it, counted, reported."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from .._local_gradients import gradient_of, local
from ..distributed import Ranks, inside_zero
from ..grad_report import GradCounts, Overflow, Underflow, is_set, namer, worst_first
from ..ops import grad_stats_

_ATTACH = "use mixprec.integrations.accelerate.attach(accelerator, scaler) before prepare"


def any_flag(flags: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """One flag on `device`, 0.0 or 1.0: whether any is not 0 (Inf and NaN are not)."""
    here = [flag.reshape(()).to(device, non_blocking=True) for flag in flags]
    return (here[0] != 0 if len(here) == 1 else torch.stack(here).any()).float()


def unscales_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is an optimizer of mixprec, whose step unscales, checks and skips."""
    return hasattr(optimizer, "_step_scaled")


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def has_work(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer of mixprec has a gradient, on this rank or, maybe, on another."""
    params = params_of(optimizer)
    if any(p.grad is not None or gradient_of(p) is not None for p in params):
        return True
    return not optimizer.ranks.is_local(params)  # type: ignore[attr-defined]


def gradients(
    optimizer: torch.optim.Optimizer, *, allow_fp16: bool
) -> dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """By device, the optimizer's params that have gradients, and these gradients (the values of a
    sparse one, the part on this rank of a DTensor). ValueError for fp16 ones unless allow_fp16."""
    per_device: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    ours = unscales_itself(inside_zero(optimizer))  # which reads main_grad
    for p in params_of(optimizer):
        grad = gradient_of(p) if ours else p.grad
        if grad is None:
            continue
        if grad.dtype == torch.float16 and not allow_fp16:
            raise ValueError(
                "Attempting to unscale FP16 gradients. torch's optimizers cannot use them; those "
                "of mixprec.optim unscale them in FP32"
            )
        if grad.is_sparse:
            if grad.dtype == torch.float16:
                # Coalesce first: adding up entries of the same index can overflow.
                grad = p.grad = grad.coalesce()
            grad = grad._values()
        params, grads = per_device.setdefault(grad.device, ([], []))
        params.append(p)
        grads.append(local(grad))
    return per_device


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
        self._sums: weakref.WeakKeyDictionary[torch.optim.Optimizer, Ranks] = (
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
        everyone = params_of(optimizer)
        is_local = self.ranks.is_local(everyone)
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
        if not flags and is_local:
            return {}
        found_inf = any_flag(flags, home) if flags else found_inf
        if not is_local:
            none = torch.zeros(0, dtype=torch.float64, device=home)
            self.ranks.agree_(found_inf, none, [], [], 0, everyone)
        counts.finish(is_set(found_inf))
        return {home: found_inf}

    def underflow_share(self, stepped: Collection[int], home: torch.device) -> torch.Tensor | None:
        """The largest share of subnormal numbers of the optimizers with these ids, if known: the
        same on all ranks that take a step together."""
        shares = []
        for optimizer, counts in self.counts.items():
            if id(optimizer) not in stepped:
                continue
            own, everyone = getattr(optimizer, "ranks", self.ranks), params_of(optimizer)
            # Others than those of norms, whose plans they would replace in each step.
            ranks = self._sums.setdefault(optimizer, Ranks(own.process_group))
            shares.append(
                counts.underflow_share(home, None if own.is_local(everyone) else ranks, everyone)
            )
        known = [share for share in shares if share is not None]
        return torch.stack(known).max() if known else None

    def overflows(self, model: torch.nn.Module | None) -> list[Overflow]:
        name, tables = self._namer(model), self.counts.values()
        return worst_first([each for counts in tables for each in counts.overflows(name)])

    def underflows(self, model: torch.nn.Module | None) -> list[Underflow]:
        name, tables = self._namer(model), self.counts.values()
        return [each for counts in tables for each in counts.underflows(name)]

    def _namer(self, model: torch.nn.Module | None) -> Callable[[torch.Tensor], str]:
        if model is None and self._model is not None:
            model = self._model()
        return namer(self.counts, model)

    def __reduce__(self) -> tuple[type[GradReader], tuple[Ranks]]:
        return GradReader, (self.ranks,)  # the rest is valid in this process only


class Lagged:
    """The latest value of a small tensor whose copy to the host has completed."""

    def __init__(self, values: list[int]) -> None:
        """values: the latest before the first push."""
        self.reported = 0  # multiples of a limit
        # To which the replays of a graph copy: one, made before its capture.
        self._replayed: torch.Tensor | None = None
        self.reset(values)

    def reset(self, values: list[int]) -> None:
        """Drop the copies that are pending; after a load, when no replay is."""
        self._arrived = torch.tensor(values, device="cpu")
        self._pending: deque[tuple[torch.Tensor, torch.Event]] = deque()
        if self._replayed is not None:
            self._replayed.copy_(self._arrived)

    def push(self, tensor: torch.Tensor) -> None:
        """Start to copy the current value of `tensor`."""
        if tensor.device.type == "cpu":
            self._arrived = tensor.clone()
            return
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            if self._replayed is not None:
                self._replayed.copy_(tensor, non_blocking=True)
            return
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        if self._replayed is None:
            self._replayed = torch.empty_like(pinned, pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        event = torch.Event(tensor.device)
        event.record()
        self._pending.append((pinned, event))

    def replay(self) -> None:
        """A graph that has captured `push` was launched."""
        if self._replayed is not None:
            self._arrived = self._replayed
            self._pending.clear()

    def latest(self) -> list[int]:
        """The latest copy that is complete."""
        while self._pending and self._pending[0][1].query():
            self._arrived = self._pending.popleft()[0]
        return self._arrived.tolist()


def unwrap(who: str, optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside Accelerate's wrapper; any other optimizer itself. ValueError where
    Accelerate still accumulates gradients: unscaled and scaled ones would be added."""
    wrapper = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", None)
    if wrapper is None or not isinstance(optimizer, wrapper):
        return optimizer
    if not optimizer.gradient_state.sync_gradients:
        raise ValueError(
            f"{who}: optimizer must have added up its gradients, got one of Accelerate with "
            f"sync_gradients=False: {_ATTACH}"
        )
    return optimizer.optimizer if type(optimizer) is wrapper else optimizer


def step_prepared(scaler: Any, given: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """scaler.step(optimizer); `given`, which wraps it, then knows whether the step was skipped."""
    state = scaler._per_optimizer_states[id(optimizer)]
    if state["stage"] is OptState.READY and not scaler._warned_clipped:
        scaler._warned_clipped = _warn_if_clipped(given, optimizer)
    result = scaler.step(optimizer, *args, **kwargs)
    given._is_overflow = any(bool(flag) for flag in state["found_inf_per_device"].values())
    return result


def _warn_if_clipped(given: Any, optimizer: Any) -> bool:
    """Warn where the gradients, which are scaled, were written once more than they were added up,
    as accelerator.clip_grad_norm_ does; return whether."""
    if dist.is_available() and dist.is_initialized():
        return False  # DDP writes them too
    adds = given.gradient_state.num_steps
    if all(p.grad is None or p.grad._version < adds for p in params_of(optimizer)):
        return False
    warnings.warn(
        "GradScaler.step: gradients were changed while they were scaled; accelerator.clip_grad_"
        f"norm_ and clip_grad_value_ clip scaled ones, by far too much: {_ATTACH}",
        stacklevel=6,  # the caller of step, beyond two frames of _disable_dynamo
    )
    return True
