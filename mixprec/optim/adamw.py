"""AdamW with FP32 master weights: unscale, clip, update and write-back without a host sync."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import ParamsT

from ..ops import adamw_, inv_scale
from . import _gradients, _state

_PARAMS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class _Lists(NamedTuple):
    """The tensors of one call of adamw_: params on one device, all with masters or all without."""

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    states: list[dict[str, Any]]


class AdamW(torch.optim.Optimizer):
    """AdamW (decoupled weight decay) for fp32, bf16, fp16 and fp64 params, in FP32 arithmetic.

    The formula is that of `mixprec.ops.adamw_`, one call per group and kind of param; results
    agree with torch.optim.AdamW within a few units in the last place. lr, betas, eps,
    weight_decay and maximize may differ between param groups.

    master_weights: "auto" and "fp32" keep an FP32 copy of every 16-bit param in
    state[param]["master"]: updates go there, the param is its rounding. None updates 16-bit params
    in place. A master is made at the first step; when someone else has written the param since the
    last step, it is taken over wherever it is not the master's rounding any more (writes through
    `.data` are not seen). max_grad_norm clips the norm of all gradients of all groups together,
    after unscaling, by min(1, max_grad_norm / (norm + 1e-6)).

    state[param]: `exp_avg`, `exp_avg_sq` and `master` in FP32 (FP64 for fp64 params), `step` an
    FP32 tensor on the param's device that counts applied steps. State dicts keep these dtypes,
    and are exchanged with torch.optim.AdamW, both ways, where there are no masters.

    A step is skipped as a whole, leaving params, masters, moments and `step` as they were, when a
    gradient is Inf or NaN and either a GradScaler drives the step, or max_grad_norm is set, or a
    param is 16 bits wide. `skipped` counts such steps on the device. Otherwise (fp32 params, no
    scaler, no clipping) nothing reads the gradients first and a NaN reaches the params, as it
    does in torch.optim. Nothing here waits for the device.

    With `mixprec.GradScaler` or `torch.amp.GradScaler`, gradients stay scaled and are unscaled
    inside the update. Raises ValueError for settings out of range, for a tensor lr and for sparse
    gradients. Source: Decoupled Weight Decay Regularization (Loshchilov, Hutter, 2019).
    """

    # What torch.amp.GradScaler asks of an optimizer that unscales by itself: it sets grad_scale
    # (None after unscale_) and found_inf on the optimizer while it calls step().
    _step_supports_amp_scaling = True
    # What mixprec.GradScaler asks beyond that: step() raises the found_inf that it was handed.
    _raises_found_inf = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        master_weights: str | None = "auto",
        max_grad_norm: float | None = None,
        maximize: bool = False,
    ) -> None:
        if master_weights not in ("auto", "fp32", None):
            raise ValueError(
                f'AdamW: master_weights must be "auto", "fp32" or None, got {master_weights!r}'
            )
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"AdamW: max_grad_norm must be positive, got {max_grad_norm}")
        self.master_weights, self.max_grad_norm = master_weights, max_grad_norm
        self.skipped = torch.zeros((), dtype=torch.int64)
        self._forget()
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "maximize": maximize})

    def _forget(self) -> None:
        """Take every param for one that someone else has written since our last step."""
        # The version, after our own last write, of each param that has a master.
        self._versions: dict[torch.Tensor, int] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of params, with its own settings where it names them."""
        if isinstance(param_group, dict):
            _check_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.dtype not in _PARAMS:
                self.param_groups.pop()
                raise ValueError(f"AdamW: params must be fp32, bf16, fp16 or fp64, got {p.dtype}")

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Do one step with the gradients at hand; return what `closure`, if given, returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        calls = [(group, lists) for group in self.param_groups for lists in self._lists(group)]
        grads: dict[torch.device, list[torch.Tensor]] = {}
        for _, lists in calls:
            grads.setdefault(lists.params[0].device, []).extend(lists.grads)
        if not grads:
            return loss
        found_inf = getattr(self, "found_inf", None)
        grad_scale = getattr(self, "grad_scale", None)
        # Gradients that a scaler's unscale_ has seen are read again only for their norm.
        read = self.max_grad_norm is not None or grad_scale is not None
        if found_inf is None:
            read = read or any(
                p.dtype in _state.LOW_PRECISION for _, ls in calls for p in ls.params
            )
            found_inf = torch.zeros((), device=next(iter(grads))) if read else None
        unscale = None if grad_scale is None else inv_scale(grad_scale)
        scalars = _gradients.scalars_per_device(grads, unscale, found_inf, self.max_grad_norm, read)
        for group, lists in calls:
            self._update(group, lists, scalars[lists.params[0].device])
        if found_inf is not None:
            self.skipped = self.skipped.to(found_inf.device)
            self.skipped += found_inf.reshape(()) != 0
        return loss

    def _lists(self, group: dict[str, Any]) -> Iterator[_Lists]:
        """The group's params that have gradients, their state prepared, in kinds.

        The loop is most of what a step costs in Python, about 0.4 us a param.
        """
        params, grads, states = lists = _Lists([], [], [])
        all_states, versions = self.state, self._versions
        without_master = _state.LOW_PRECISION if self.master_weights is not None else ()
        masters = 0
        for p in group["params"]:
            grad = p.grad
            if grad is None:
                continue
            state = all_states[p]
            if "master" in state:
                masters += 1
                if versions.get(p) != p._version:
                    self._prepare(p, grad, state)
            elif not state or p.dtype in without_master:
                self._prepare(p, grad, state)
                masters += "master" in state
            params.append(p)
            grads.append(grad)
            states.append(state)
        if not params:
            return
        if masters in (0, len(params)) and len(set(map(torch.Tensor.get_device, params))) == 1:
            yield lists
            return
        kinds: dict[tuple[torch.device, bool], _Lists] = {}
        for p, grad, state in zip(*lists, strict=True):
            kind = kinds.setdefault((p.device, "master" in state), _Lists([], [], []))
            for values, value in zip(kind, (p, grad, state), strict=True):
                values.append(value)  # type: ignore[attr-defined]
        yield from kinds.values()

    def _prepare(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> None:
        if grad.layout != torch.strided:
            raise ValueError(
                f"AdamW: gradients must be dense, got layout {grad.layout} for a param of shape "
                f"{tuple(p.shape)}; for an Embedding use sparse=False"
            )
        _state.prepare(p, state, self.master_weights is not None)

    def _update(self, group: dict[str, Any], lists: _Lists, scalars: _gradients.Scalars) -> None:
        params, grads, states = lists
        if isinstance(group["lr"], torch.Tensor):
            raise ValueError("AdamW: lr must be a number, got a tensor")
        beta1, beta2 = group["betas"]
        masters = [s["master"] for s in states if "master" in s]
        adamw_(
            params,
            grads,
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            masters,
            [s["step"] for s in states],
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
            **scalars._asdict(),
        )
        if masters:
            self._versions.update(zip(params, [p._version for p in params], strict=True))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of torch.optim.AdamW, in copies of its tensors.

        FP32 state stays FP32 whatever the params' dtype (torch.optim casts it to that). The weights
        may be loaded before or after. Raises ValueError, changing nothing, for a state that does
        not fit: another number of params, another shape or dtype, amsgrad, masters without a place.
        """
        hook = self.register_load_state_dict_pre_hook(_state.hide_tensors)  # runs after all others
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()

    def __getstate__(self) -> dict[str, Any]:
        own = {n: getattr(self, n) for n in ("master_weights", "max_grad_norm", "skipped")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by unpickling and copying, and by load_state_dict with its dict's two keys."""
        loading = "master_weights" not in state
        who = "AdamW.load_state_dict" if loading else "AdamW"
        for group in state["param_groups"]:
            group.setdefault("maximize", False)
            _check_settings(group, who)
        if loading:
            restored: defaultdict[Any, Any] = defaultdict(dict)
            for param, saved in state["state"].items():
                restored[param] = saved = _state.show_tensors(saved)
                if isinstance(param, torch.Tensor):
                    masters = self.master_weights is not None
                    restored[param] = _state.restore(who, param, saved, masters)
            state = {**state, "state": restored}
        super().__setstate__(state)
        self._forget()


def _check_settings(group: dict[str, Any], who: str = "AdamW") -> None:
    """ValueError unless the group's settings are numbers in their ranges."""
    numbers = {n: group[n] for n in ("lr", "eps", "weight_decay")}
    beta1, beta2 = group["betas"]
    for name, value in (*numbers.items(), ("betas[0]", beta1), ("betas[1]", beta2)):
        limit = 1.0 if name.startswith("betas") else math.inf
        if isinstance(value, torch.Tensor) or not 0.0 <= value < limit:
            meaning = "a number in [0, 1)" if limit == 1.0 else "a finite number, 0 or more"
            got = "a tensor" if isinstance(value, torch.Tensor) else value
            raise ValueError(f"{who}: {name} must be {meaning}, got {got}")
    if group.get("amsgrad"):
        raise ValueError(f"{who}: amsgrad must be False, got {group['amsgrad']}")
