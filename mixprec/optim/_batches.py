"""Params in batches of one kind, and the norms of their gradients, read before a step."""

from __future__ import annotations

import operator
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from .. import _masters
from .._local_gradients import LOW_PRECISION, PLAIN, any_sharded, gradient_of, local, placed_like
from ..distributed import Ranks
from ..grad_report import GradCounts
from ..ops.grad_stats import grad_stats_op
from ..ops.scale import clip_coef_op
from ._state import Policy


@dataclass
class Batch:
    """The params of one call of an update op: of one group, on one device."""

    group: int
    moments: tuple[str, ...]
    policy: Policy
    params: list[torch.Tensor]  # as the optimizer holds them
    data: list[torch.Tensor]  # their parts on this rank: the same list without DTensors
    grads: list[torch.Tensor]
    states: list[dict[str, Any]]
    has_master: bool  # or remainder; all of them, or none

    @property
    def device(self) -> torch.device:
        return self.grads[0].device


@dataclass
class _Known:
    """The params of a group after the last step, to detect changes by other code."""

    kinds: tuple[Any, ...]  # ids, dtypes, sizes of the states, moments
    addresses: list[int]
    versions: list[int]
    params: list[torch.Tensor]
    data: list[torch.Tensor]  # the parts on this rank
    has_master: bool | None  # all of them, or none, in one batch; None: several batches


def _versions(params: list[torch.Tensor], data: list[torch.Tensor]) -> list[int]:
    """Of params and their parts: a write to a DTensor is none to its part, and the other way
    round."""
    own = [part._version for part in data]
    if data is params:
        return own
    return [p._version + version for p, version in zip(params, own, strict=True)]


class Batches:
    """Makes the batches of every step, and records the params after it."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._known: dict[int, _Known] = {}  # by group
        self._changes = _masters.Changes.count  # after the last step
        self._current: dict[int, _Known] = {}
        # By batch: the steps in its states, and the buffer whose elements they are.
        self._steps: dict[tuple[Any, ...], tuple[list[torch.Tensor], torch.Tensor]] = {}
        self.met_low_precision = self.met_main_grad = False
        # Other code has written all params of a group since the last step, as DDP does, or has
        # begun to give them gradients of its own.
        self.all_written = False

    def of_group(
        self,
        g: int,
        params: list[torch.Tensor],
        state: MutableMapping[Any, dict[str, Any]],
        moments: tuple[str, ...],
        policy: Policy,
    ) -> Iterator[Batch]:
        """Those of the params of a group that have gradients, with their state prepared.

        It works on whole lists, because this is most of a step's Python time.
        """
        grads: list[Any] = [p.grad for p in params]
        if "main_grad" in set().union(*map(vars, params)):
            self.all_written |= not self.met_main_grad
            self.met_main_grad = True
            grads = [gradient_of(p) for p in params]
        if type(None) in set(map(type, grads)):
            params = [p for p, grad in zip(params, grads, strict=True) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        if not params:
            return
        data = params
        if not PLAIN.issuperset(map(type, params)) and any_sharded(params):
            data = list(map(local, params))
            grads = [local(placed_like(grad, p)) for grad, p in zip(grads, params, strict=True)]
        states = list(map(state.__getitem__, params))
        dtypes, versions = [p.dtype for p in data], _versions(params, data)
        # Assigning p.data leaves the version as it is.
        addresses = list(map(torch.Tensor.data_ptr, data))
        now = (list(map(id, params)), dtypes, list(map(len, states)), moments)
        known = self._known.get(g) if self._changes == _masters.Changes.count else None
        if known is not None and known.kinds != now:
            known = None
        if known is not None and (known.addresses, known.versions) == (addresses, versions):
            has_master = known.has_master
        else:
            unchanged: set[tuple[int, int, int]] = set()
            if known is not None:
                unchanged = set(zip(now[0], known.addresses, known.versions, strict=True))
            keys = list(zip(now[0], addresses, versions, strict=True))
            self.all_written |= bool(unchanged) and unchanged.isdisjoint(keys)
            _masters.attach()
            each = zip(params, grads, states, addresses, versions, strict=True)
            for p, grad, param_state, address, version in each:
                if (id(p), address, version) in unchanged:
                    continue
                if grad.layout != torch.strided:
                    raise ValueError(
                        f"{self._who}: gradients must be dense, got layout {grad.layout} for a "
                        f"param of shape {tuple(p.shape)}; for an Embedding use sparse=False"
                    )
                policy.prepare(p, param_state, moments)
            kinds = {(_has_master(s), p.device) for s, p in zip(states, data, strict=True)}
            has_master = kinds.pop()[0] if len(kinds) == 1 else None
            now = (now[0], dtypes, list(map(len, states)), moments)
            self.met_low_precision |= any(dtype in LOW_PRECISION for dtype in dtypes)
        self._current[g] = _Known(now, addresses, versions, params, data, has_master)
        if has_master is not None:
            yield Batch(g, moments, policy, params, data, grads, states, has_master)
            return
        split: dict[tuple[bool, torch.device], Batch] = {}
        for p, part, grad, param_state in zip(params, data, grads, states, strict=True):
            kind = (_has_master(param_state), part.device)
            batch = split.setdefault(kind, Batch(g, moments, policy, [], [], [], [], kind[0]))
            batch.params.append(p)
            batch.data.append(part)
            batch.grads.append(grad)
            batch.states.append(param_state)
        yield from split.values()

    def remember(self) -> None:
        """Call after the step: later writes to the params are made by other code."""
        if self._changes != _masters.Changes.count:  # also of groups that had no gradients
            self._known = {}
        for known in self._current.values():
            known.versions = _versions(known.params, known.data)
        self._known.update(self._current)
        self._current = {}
        self._changes = _masters.Changes.count

    def steps(self, batch: Batch) -> torch.Tensor:
        """The `step` of each state of the batch in one tensor; those in the states are views."""
        steps = [s["step"] for s in batch.states]
        key = (batch.group, batch.device, batch.has_master)
        known, buffer = self._steps.get(key, ((), None))
        if buffer is None or len(known) != len(steps) or not all(map(operator.is_, known, steps)):
            counts = (torch.as_tensor(s, dtype=torch.float32, device=batch.device) for s in steps)
            buffer = torch.stack([count.reshape(()) for count in counts])
            views = list(buffer.unbind())
            for s, view in zip(batch.states, views, strict=True):
                s["step"] = view
            self._steps[key] = (views, buffer)
        return buffer


def _has_master(state: dict[str, Any]) -> bool:
    return "master" in state or "remainder" in state


def on_device(device: torch.device, scalar: torch.Tensor | None) -> torch.Tensor | None:
    return None if scalar is None else scalar.to(device, non_blocking=True)


def read_norms(
    batches: list[Batch],
    inv_scale: torch.Tensor | None,
    found_inf: torch.Tensor,
    counts: GradCounts | None,
) -> dict[int, torch.Tensor]:
    """Read all gradients once: set `found_inf` (fp32, one element, on any device) in place, and
    return, by group, fp64 squared norms on found_inf's device, whose sum is the group's."""
    home = found_inf.device
    by_device: dict[torch.device, list[Batch]] = {}
    for batch in batches:
        by_device.setdefault(batch.device, []).append(batch)
    sums: dict[int, torch.Tensor] = {}
    for device, here in by_device.items():
        grads = [g for batch in here for g in batch.grads]
        flag = found_inf if device == home else torch.zeros_like(found_inf, device=device)
        sum_sq = torch.zeros(len(grads), dtype=torch.float64, device=device)
        params = [p for batch in here for p in batch.params]
        whole = all(batch.data is batch.params for batch in here)
        elements = None if whole else [grad.numel() for grad in grads]
        table = None if counts is None else counts.table(device, params, elements)
        grad_stats_op(grads, on_device(device, inv_scale), flag, sum_sq, table)
        if device != home:
            found_inf.masked_fill_((flag != 0).to(home, non_blocking=True), 1.0)
            sum_sq = sum_sq.to(home, non_blocking=True)
        sizes = [len(batch.grads) for batch in here]
        parts = sum_sq.split(sizes) if len(sizes) > 1 else (sum_sq,)
        for batch, part in zip(here, parts, strict=True):
            before = sums.get(batch.group)
            sums[batch.group] = part if before is None else torch.cat([before, part])
    return sums


def agree_norms(
    ranks: Ranks,
    batches: list[Batch],
    found_inf: torch.Tensor,
    sums: dict[int, torch.Tensor],
    groups: list[dict[str, Any]],
) -> dict[int, torch.Tensor]:
    """Reduce the flag and the squared norms of each group over all ranks that share the params.

    sums: of this rank, from `read_norms`; a rank may have no gradient of a group, or none at all.
    """
    order = sorted(sums)
    params = [p for g in order for b in batches if b.group == g for p in b.params]
    home = found_inf.device
    none = torch.zeros(0, dtype=torch.float64, device=home)
    mine = torch.cat([sums[g] for g in order]) if sums else none
    scopes = [g for g in order for _ in range(sums[g].numel())]
    everyone = [p for group in groups for p in group["params"]]
    totals = ranks.agree_(found_inf, mine, params, scopes, len(groups), everyone)
    return {g: totals[g : g + 1] for g in range(len(groups))}


def clip_factors(
    sums: dict[int, torch.Tensor], groups: list[dict[str, Any]], max_grad_norm: float | None
) -> dict[int, torch.Tensor]:
    """By group, the factor that clips its gradients: by its own norm if it has its own limit, else
    by the norm of all groups without one."""
    clips = {}
    rest = []
    for g in sums:
        limit = groups[g].get("max_grad_norm")
        if limit is not None:
            clips[g] = clip_coef_op(sums[g], float(limit))
        else:
            rest.append(g)
    if max_grad_norm is not None and rest:
        parts = [sums[g] for g in rest]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        clips |= dict.fromkeys(rest, clip_coef_op(joined, float(max_grad_norm)))
    return clips
