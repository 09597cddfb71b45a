"""release_gradients=True: each param is updated in backward, when its gradient is complete."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._compile import _disable_dynamo
from torch.autograd.function import BackwardCFunction

from .. import _local_gradients
from .._local_gradients import LOW_PRECISION
from .._originals import Codes
from ..grad_report import is_set
from . import _batches
from ._batches import Batches
from ._recomputation import UpdatedParams
from ._release_hooks import ReleasedGradient, is_released, refusal, watch

if TYPE_CHECKING:
    from ._base import Optimizer

# Code of torch that is on the stack: of a backward pass the first, but nothing in the thread of a
# device; and of a pass within another one, both once more.
_ENTERS = Codes(
    torch.autograd.graph._engine_run_backward.__code__, BackwardCFunction.apply.__code__
)
_NO_SCALER = "gradients are applied before it could unscale them; train in bf16 without it"
PREVIOUS = "previous_sum_sq"  # in a group: the squared norm of its gradients at the step before


@dataclass
class _Pass:
    """One backward pass and the step() after it."""

    task: int | None  # autograd's number of the backward pass; None: there was none before step()
    moments: list[tuple[str, ...]]  # by group
    clips: dict[int, torch.Tensor]
    must_read: bool
    group_of: dict[int, int]  # by param
    updated: set[int] = field(default_factory=set)
    flags: list[torch.Tensor | bool] = field(default_factory=list)  # of overflow, by param
    sums: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # squared norms by group


class Releases:
    """The updates of one optimizer inside its backward passes."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._weak = weakref.ref(optimizer)
        self._who = type(optimizer).__name__
        self._lock = threading.Lock()  # backward has a thread for each device
        self._batches: dict[int, Batches] = {}  # by param, each in a batch of its own
        self._inner: int | None = None  # autograd's number of a pass known to run within another
        self._pass: _Pass | None = None
        self._updated = UpdatedParams()
        self._rehearses = False

    @property
    def _optimizer(self) -> Optimizer:
        optimizer = self._weak()
        assert optimizer is not None, "it calls this"
        return optimizer

    def forget(self) -> None:
        """Treat every param as modified by other code since its last update."""
        self._batches.clear()

    @_disable_dynamo
    def in_backward(self, p: torch.Tensor) -> None:
        """Update p with its gradient and free this; not within another backward pass (reentrant
        checkpointing), where it may not be complete: then step() does it."""
        assert p.grad is not None, "this is called after it was accumulated"
        if self._rehearses:
            if not _is_nested():
                p.grad = ReleasedGradient(p.grad)
            return
        with self._lock:
            task = torch._C._current_graph_task_id()
            if self._pass is None or task != self._pass.task:
                try:
                    self._begin(task)
                except RuntimeError:
                    p.grad = None  # of a pass that is refused, nothing stays
                    raise
            mine = self._pass is not None and id(p) in self._pass.group_of
            if task != self._inner and mine:
                with torch.no_grad():
                    self._update(p)

    def _begin(self, task: int) -> None:
        who = self._who
        if task == self._inner:
            return
        if _is_nested():
            self._inner = task
            warnings.warn(
                f"{who}: release_gradients=True keeps the gradients of backward passes inside "
                "backward until step(): use checkpoint(..., use_reentrant=False)",
                stacklevel=2,
            )
        elif self._pass is not None:
            raise RuntimeError(
                f"{who}: release_gradients=True takes one backward pass per step(), got a second "
                "one, and the first has updated the params: do not accumulate gradients"
            )
        elif torch.is_grad_enabled():
            raise RuntimeError(f"{who}: release_gradients must be False for create_graph=True")
        elif _is_compiled():
            raise RuntimeError(f"{who}: release_gradients must be False under compiled autograd")
        elif _local_gradients.is_scaled(task):
            raise RuntimeError(
                f"{who}: release_gradients=True takes losses as they are, got one that GradScaler "
                f"has scaled: {_NO_SCALER}"
            )
        else:
            self._open(task)

    def _open(self, task: int | None) -> None:
        """Check what can be checked before the first update."""
        optimizer = self._optimizer
        groups = optimizer.param_groups
        params = [p for group in groups for p in group["params"]]
        reason = refusal(params)
        if reason is None and optimizer._clips and optimizer._clip == "current":
            reason = 'clip must be "previous" with max_grad_norm and release_gradients=True'
        if reason is not None:
            raise RuntimeError(f"{self._who}: {reason}")
        group_of = {id(p): g for g, group in enumerate(groups) for p in group["params"]}
        optimizer._low = optimizer._low or any(p.dtype in LOW_PRECISION for p in params)
        sums: dict[int, torch.Tensor] = {}
        if any(PREVIOUS in group for group in groups):
            home = params[0].device
            none = torch.zeros((), dtype=torch.float64, device=home)
            sums = {
                g: group.get(PREVIOUS, none).to(home, non_blocking=True).reshape(1)
                for g, group in enumerate(groups)
            }
        clips = _batches.clip_factors(sums, groups, optimizer.max_grad_norm)
        moments = list(map(optimizer._moments, groups))
        optimizer.grad_counts.start()
        self._pass = _Pass(task, moments, clips, optimizer._low or optimizer._clips, group_of)

    def _update(self, p: torch.Tensor) -> None:
        now, optimizer = self._pass, self._optimizer
        assert now is not None, "opened before"
        g = now.group_of[id(p)]
        now.updated.add(id(p))
        batches = self._batches.get(id(p))
        if batches is None:
            batches = self._batches[id(p)] = Batches(self._who)
        policy = optimizer._policy_of(optimizer.param_groups[g])
        batch = list(batches.of_group(g, [p], optimizer.state, now.moments[g], policy))
        found = None
        skip: torch.Tensor | bool = False
        if now.must_read:
            found = torch.zeros((), dtype=torch.float32, device=p.device)
            sums = _batches.read_norms(batch, None, found, optimizer.grad_counts)
            now.sums.setdefault(g, []).extend(sums.values())
            skip = is_set(found)
            now.flags.append(skip)
        if skip is not True:
            optimizer._update_batches(batch, None, now.clips, found)
            self._updated.add(p)
        batches.remember()
        assert p.grad is not None, "it was in the batch"
        p.grad = ReleasedGradient(p.grad)

    @contextlib.contextmanager
    def rehearsed(self) -> Iterator[None]:
        """A backward pass inside frees the gradients, and updates nothing."""
        self._rehearses = True
        try:
            yield
        finally:
            self._rehearses = False

    def check_idle(self, what: str) -> None:
        if self._pass is not None:
            raise RuntimeError(
                f"{self._who}.{what}: release_gradients=True has updated the params in backward, "
                "which cannot be undone: call step() after it"
            )

    def step(self, closure: object, scaling: Iterable[object]) -> None:
        """Update the params whose gradients came otherwise, and end the pass."""
        if closure is not None:
            raise RuntimeError(
                f"{self._who}.step: closure must be None with release_gradients=True, got "
                f"{closure!r}: its backward pass would update the params whenever it is called"
            )
        if any(value is not None for value in scaling):
            raise RuntimeError(
                f"{self._who}.step: release_gradients must be False under a GradScaler: "
                + _NO_SCALER
            )
        optimizer = self._optimizer
        params = [p for group in optimizer.param_groups for p in group["params"]]
        with self._lock:
            if self._pass is None:
                self._open(None)
            late = [p for p in params if p.grad is not None and not is_released(p.grad)]
            if any(id(p) in self._pass.updated for p in late):  # type: ignore[union-attr]
                raise RuntimeError(
                    f"{self._who}.step: release_gradients=True has applied a gradient in backward "
                    "that other code has replaced since: set it to None"
                )
            for p in late:
                self._update(p)
            for p in params:
                if is_released(p.grad):
                    p.grad = None
            now, self._pass = self._pass, None
            self._updated.clear()
        assert now is not None, "opened above"
        optimizer._sums, optimizer._last_skip = {}, None
        if now.flags:
            self._count(now, params[0].device)
        watch(optimizer, params)

    def _count(self, now: _Pass, home: torch.device) -> None:
        """Skips and norms, as after a step of all params."""
        optimizer = self._optimizer
        flags = [f for f in now.flags if isinstance(f, torch.Tensor)]
        skipped: torch.Tensor | bool = any(f for f in now.flags if isinstance(f, bool))
        if flags:
            skipped = torch.stack([f.to(home, non_blocking=True) for f in flags]).any() | skipped
        optimizer._last_skip = skipped
        optimizer.grad_counts.finish(skipped)
        optimizer.skipped = optimizer.skipped.to(home)
        optimizer.skipped += skipped
        optimizer._sums = {
            g: torch.cat([part.to(home, non_blocking=True) for part in parts])
            for g, parts in now.sums.items()
        }
        none = torch.zeros((), dtype=torch.float64, device=home)
        for g, group in enumerate(optimizer.param_groups if optimizer._clips else ()):
            new = optimizer._sums[g].sum() if g in optimizer._sums else none
            # The norm of a step that overflowed limits nothing: the last finite one stays.
            old = group.get(PREVIOUS, none).to(home, non_blocking=True)
            if isinstance(skipped, bool):
                group[PREVIOUS] = old if skipped else new
            else:
                group[PREVIOUS] = torch.where(skipped, old, new)


def _is_compiled() -> bool:
    """Whether compiled autograd runs the current backward pass."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled is not None and compiled.in_compiled_autograd_region


def _is_nested() -> bool:
    """Whether the current backward pass runs within another one."""
    frame: Any = sys._getframe()
    count = 0
    while frame is not None:
        count += frame.f_code in _ENTERS
        frame = frame.f_back
    return count > 1
