"""release_gradients=True: each param is updated in backward, when its gradient is complete."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo

from .. import _local_gradients
from .._local_gradients import is_sharded
from ..grad_report import is_set
from . import _batches
from ._settings import NO_NORM

_NO_SCALER = "gradients are applied before it could unscale them; train in bf16 without it"


class ReleasedGradient(torch.Tensor):
    """A tensor without memory in place of a gradient; RuntimeError for each operation on it, so
    that nobody takes it for no gradient: clipping by hand, unscaling, another optimizer's step and
    autograd, which would add to it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, grad: torch.Tensor) -> ReleasedGradient:
        like: Any = {"strides": grad.stride(), "dtype": grad.dtype, "storage_size": 0}
        return torch.Tensor._make_wrapper_subclass(cls, grad.shape, device=grad.device, **like)

    @classmethod
    def __torch_dispatch__(cls, op: Any, *_: Any) -> None:
        raise RuntimeError(
            f"release_gradients=True: {op} needs a gradient that its optimizer has applied in "
            "backward and freed: it cannot be read, clipped, unscaled or added to (no accumulation "
            "over several backward passes) before the next step() or zero_grad()"
        )


def is_released(gradient: torch.Tensor | None) -> bool:
    return type(gradient) is ReleasedGradient


class _Updated(nn.Parameter):
    """A param from its update to step(): RuntimeError if backward reads it, as checkpoints may."""

    __new__ = staticmethod(lambda cls, *args: nn.Parameter(*args))  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        is_value = isinstance(result, torch.Tensor) and func != torch.Tensor.grad.__get__  # type: ignore[union-attr]
        if is_value and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "release_gradients=True: a checkpoint that backward computes again calls "
                f"{func.__name__} on a param that was updated since the forward pass, because its "
                "gradient needs nothing of this checkpoint (detach() or no_grad): leave what reads "
                "it so out of checkpoints"
            )
        return result


class Releases:
    """The hook that updates the params of an optimizer in backward, without keeping it alive."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = weakref.ref(optimizer)
        self._who = type(optimizer).__name__
        self._lock = threading.Lock()  # backward has a thread for each device
        self.batches: dict[int, _batches.Batches] = {}  # by param, each in a batch of its own
        self._is_open = False  # from the first update to the end of step()
        self.rehearses = False  # backward frees gradients, and updates nothing
        self._updated: dict[int, torch.Tensor] = {}

    def watch(self, params: Iterable[torch.Tensor]) -> None:
        """Be the hook of all that are trained, a frozen one when it is no longer."""
        _local_gradients.start()
        for p in params:
            if p.requires_grad and self not in _hooks(p):
                p.register_post_accumulate_grad_hook(self)

    @_disable_dynamo
    def __call__(self, p: torch.Tensor) -> None:
        """Update p with its gradient and free this."""
        # Autograd calls it for an undefined gradient too.
        if self.optimizer() is None or p.grad is None or is_released(p.grad):
            return
        if self.rehearses:
            p.grad = ReleasedGradient(p.grad)
            return
        with self._lock:
            task = torch._C._current_graph_task_id()
            if not self._is_open or task != self._task:
                if (reason := self._refusal(task)) is not None:
                    p.grad = None  # of a pass that is refused, nothing stays
                    raise RuntimeError(f"{self._who}: {reason}")
                self._open(task)
            if id(p) in self._group_of:
                with torch.no_grad():
                    self._update(p)

    def _refusal(self, task: int | None) -> str | None:
        """Why nothing can be updated in this backward pass; task None: in step() without one."""
        optimizer: Any = self.optimizer()
        compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
        reasons = {
            "release_gradients=True takes one backward pass per step(), got a second one, and the "
            "first has updated the params: do not accumulate gradients, and use "
            "checkpoint(..., use_reentrant=False)": self._is_open,
            "release_gradients must be False for create_graph=True": torch.is_grad_enabled(),
            "release_gradients must be False under compiled autograd": (
                compiled is not None and compiled.in_compiled_autograd_region
            ),
            "release_gradients=True takes losses as they are, got one that GradScaler has scaled: "
            + _NO_SCALER: _local_gradients.is_scaled(task),
            NO_NORM: optimizer._clips,
        }
        return _first(reasons) or refusal(optimizer, optimizer._params())

    def _open(self, task: int | None) -> None:
        optimizer: Any = self.optimizer()
        groups = enumerate(optimizer.param_groups)
        self._task = task  # autograd's number of the backward pass
        self._group_of = {id(p): g for g, group in groups for p in group["params"]}
        self._home = optimizer._params()[0].device
        self._flags: list[torch.Tensor] = []  # of overflow, by param
        self._sums: dict[int, list[torch.Tensor]] = {}  # squared norms by group
        optimizer._low |= optimizer._any_low()
        optimizer.grad_counts.start()
        # Other params may have other streams, which have to see what was started on this one.
        self._stream = self._opened = None
        if self._home.type == "cuda":
            self._stream = torch.cuda.current_stream(self._home)
            self._opened = self._stream.record_event()
        self._is_open = True

    def _update(self, p: torch.Tensor) -> None:
        optimizer: Any = self.optimizer()
        if p.is_cuda and self._opened is not None:
            stream = torch.cuda.current_stream(p.device)
            if stream != self._stream:
                stream.wait_event(self._opened)
        g = self._group_of[id(p)]
        self._updated[id(p)] = p
        batches = self.batches.setdefault(id(p), _batches.Batches(self._who))
        group, overflow = optimizer.param_groups[g], None
        kinds = optimizer._moments(group), optimizer._policy_of(group)
        batch = list(batches.of_group(g, [p], optimizer.state, *kinds))
        if optimizer._low:
            overflow = torch.zeros((), dtype=torch.float32, device=p.device)
            sums = _batches.read_norms(batch, None, overflow, optimizer.grad_counts)
            self._sums.setdefault(g, []).extend(sums.values())
            self._flags.append(overflow)
        if overflow is None or is_set(overflow) is not True:
            optimizer._update_batches(batch, None, {}, overflow)
            if type(p) is nn.Parameter:
                p.__class__ = _Updated
        batches.remember()
        p.grad = ReleasedGradient(batch[0].grads[0])

    def close(self) -> None:
        for p in self._updated.values():
            if type(p) is _Updated:
                p.__class__ = nn.Parameter
        self._is_open = False
        self._updated.clear()

    __del__ = close

    def check_idle(self, what: str) -> None:
        if self._is_open:
            raise RuntimeError(
                f"{self._who}.{what}: release_gradients=True has updated the params in backward, "
                "which cannot be undone: call step() after it"
            )

    def step(self, closure: object, scaling: Iterable[object]) -> None:
        """Update the params whose gradients came otherwise, and end the pass."""
        optimizer: Any = self.optimizer()
        with self._lock:
            params = [p for p in optimizer._params() if p.grad is not None]
            late = [p for p in params if not is_released(p.grad)]
            is_scaled = any(value is not None for value in scaling)
            reasons = {
                f"closure must be None with release_gradients=True, got {closure!r}: its backward "
                "pass would update the params whenever it is called": closure is not None,
                f"release_gradients must be False under a GradScaler: {_NO_SCALER}": is_scaled,
                "release_gradients=True has applied a gradient in backward that other code has "
                "replaced since: set it to None": any(id(p) in self._updated for p in late),
            }
            reason = _first(reasons) or (None if self._is_open else self._refusal(None))
            if reason is not None:
                raise RuntimeError(f"{self._who}.step: {reason}")
            if not self._is_open:
                self._open(None)
            for p in late:
                self._update(p)
            self.close()
            for p in params:
                p.grad = None
        optimizer._sums, optimizer._last_skip = {}, None
        if self._flags:
            overflow = torch.stack([f.to(self._home, non_blocking=True) for f in self._flags]).max()
            optimizer._last_skip = is_set(overflow)
            optimizer.grad_counts.finish(optimizer._last_skip)
            optimizer.skipped = optimizer.skipped.to(self._home)
            optimizer.skipped += overflow != 0
        for g, sums in self._sums.items():
            optimizer._sums[g] = torch.cat([s.to(self._home, non_blocking=True) for s in sums])
        self.watch(optimizer._params())


def _first(reasons: dict[str, Any]) -> str | None:
    return next((reason for reason, holds in reasons.items() if holds), None)


def refusal(optimizer: Any, params: list[torch.Tensor]) -> str | None:
    """Why an optimizer cannot update these params, or not in backward; None if it can."""
    for p in params:
        for hook in other_hooks(p, optimizer):
            if isinstance(hook, Releases):
                return (
                    "params must not be those of an optimizer with release_gradients=True, got one "
                    f"of shape {tuple(p.shape)} that {hook._who} updates in backward"
                )
    if not optimizer._release_gradients:
        return None
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    stored = [p for p in params if torch._C._has_storage(p) and p.numel() > 0]
    storages = {p.untyped_storage()._cdata for p in stored}
    hooks = [hook for p in params for hook in _hooks(p)]
    mains = [p for p in params if getattr(p, "main_grad", None) is not None]
    reasons = {
        f"with several ranks, got {ranks}, whose gradients are averaged later": ranks > 1,
        "for params that share a storage": len(storages) < len(stored),
        "for DTensors (FSDP2, tensor parallelism)": any(map(is_sharded, params)),
        "for params with main_grad, which is not freed": bool(mains),
        "for params with other hooks by register_post_accumulate_grad_hook, which would find the "
        "gradient freed, or have it changed late": not all(isinstance(h, Releases) for h in hooks),
    }
    reason = _first(reasons)
    return reason and f"release_gradients must be False {reason}"


def other_hooks(p: torch.Tensor, optimizer: object) -> list[Any]:
    """Those that are not this optimizer's, nor of one that is gone."""
    mine = (None, optimizer)
    return [h for h in _hooks(p) if not isinstance(h, Releases) or h.optimizer() not in mine]


def _hooks(p: torch.Tensor) -> list[Any]:
    return list((p._post_accumulate_grad_hooks or {}).values())
