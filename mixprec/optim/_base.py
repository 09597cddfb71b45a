"""Base of the optimizers: one pass over the gradients, one over the state, no host sync."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch._compile import _disable_dynamo  # as torch.optim does: torch.compiler imports Dynamo
from torch.optim.optimizer import ParamsT

from .. import _masters
from .._local_gradients import (
    LOW_PRECISION,
    PLAIN,
    any_sharded,
    gradient_of,
    is_copy,
    is_sharded,
    local,
)
from ..distributed import Ranks, check_grad_dtype, first_step
from ..grad_report import GradCounts, Overflow, Underflow, is_set, namer, worst_first
from ..ops._dispatch.optimizer_update import UpdateOp, UpdateOptions
from ..ops.scale import inv_scale_op
from . import _batches, _settings
from ._batches import Batch, Batches, on_device
from ._release import Releases
from ._state import CODES, Policy, described, dtype_of, scales
from ._state_dict import SavedOptimizer


class Scaling(NamedTuple):
    """What a GradScaler passes to one step."""

    grad_scale: torch.Tensor | None  # None where the gradients are unscaled already
    found_inf: torch.Tensor | None  # None without a scaler


class Optimizer(SavedOptimizer):
    """The step around an update op, which the subclass provides.

    A subclass names its op (`_op_of`) and the moments of its params (`_moments`), and checks the
    settings of a group (`_check_settings`).
    """

    _op: UpdateOp
    _decoupled = True  # weight decay; whatever a group says
    # Tells torch.amp.GradScaler that step() unscales gradients itself. It then sets the attributes
    # grad_scale (None after unscale_) and found_inf on the optimizer while it calls step().
    _step_supports_amp_scaling = True
    # The values that mixprec.GradScaler passed to the current `_step_scaled`.
    _scaling: Scaling | None = None
    _releases: Releases | None = None
    _warned_of_both = False

    def __init__(self, params: ParamsT, defaults: dict[str, Any], options: dict[str, Any]) -> None:
        """options: those of `_settings.Options`, to be checked."""
        given = _settings.Options.parse(type(self).__name__, options)
        self._policy = Policy(
            type(self).__name__,
            _masters.new_number(),
            given.master_weights,
            dtype_of(given.state_dtype),
            given.stochastic_rounding,
        )
        self._seed, self._grad_dtype = given.seed, given.grad_dtype
        self._release_gradients = given.release_gradients
        self.max_grad_norm, self.max_grad_value = given.max_grad_norm, given.max_grad_value
        self.ranks = Ranks(given.process_group)
        self.skipped = torch.zeros((), dtype=torch.int64, device="cpu")
        self._forget()
        super().__init__(params, defaults)

    @property
    def master_weights(self) -> str | None:
        """The option that the optimizer was constructed with."""
        return self._policy.master_weights

    def __repr__(self) -> str:
        """torch's, with masters, clipping and skipped steps. On a GPU this waits for the device."""
        first, rest = super().__repr__().split("\n", 1)
        return f"{first}\n{described(self)}{rest}"

    def _op_of(self, group: dict[str, Any]) -> UpdateOp:
        """The op of a group, the settings of whose formula are in the group."""
        return self._op

    def _moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self._moment_names

    def _policy_of(self, group: dict[str, Any]) -> Policy:
        """The options of a group: its own before those of the optimizer."""
        if group.keys().isdisjoint(self._group_options):
            return self._policy
        options = self._own_options(group)
        if "state_dtype" in options:
            options["state_dtype"] = dtype_of(options["state_dtype"])
        return replace(self._policy, **options)

    def _forget(self) -> None:
        """Treat every param as modified by other code since the last step."""
        self._batches = Batches(type(self).__name__)
        self._has_stepped = False
        self._looks_for_ddp = 8  # which takes 0.1 s: not at each step of code that clips weights
        self._sums: dict[int, torch.Tensor] = {}  # squared norms by group, of the last step
        self._last_skip: torch.Tensor | bool | None = None  # bool []; None without a check
        self.grad_counts = GradCounts()
        if self._releases is not None:
            self._releases.close()
            self._releases.batches.clear()
        elif self._release_gradients:
            self._releases = Releases(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of params; its settings override the defaults."""
        who = type(self).__name__
        if isinstance(param_group, dict):
            if "state_dtype" in param_group:
                dtype = _settings.as_dtype(param_group["state_dtype"])
                param_group = {**param_group, "state_dtype": dtype}
            self._check_group({**self.defaults, **param_group}, who)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _settings.check_params(who, group["params"], self._grad_dtype)
            self._check_params(group["params"], who)
        except ValueError:
            self.param_groups.pop()
            raise
        self._set_up_params()

    def _any_low(self) -> bool:
        return any(p.dtype in LOW_PRECISION for p in self._params())

    def _set_up_params(self) -> None:
        params = self._params()
        self._ids = list(map(id, params))
        self._index = {key: i for i, key in enumerate(self._ids)}
        _masters.attach()
        if any_sharded(params):
            _masters.check_groups(type(self).__name__, params)
        for group in self.param_groups:
            policy = self._policy_of(group)
            for p in group["params"]:  # whose FP32 values take the form that they are to have
                if p.requires_grad and p not in self.state and _masters.known(p):
                    policy.claim(p, {})
        # Whether a param has 16 bits, on any rank, with or without a gradient.
        self._low = self._any_low()
        if self._grad_dtype is not None:
            check_grad_dtype(type(self).__name__, params)
        self._set_grad_dtype(params)
        if self._releases is not None:
            self._releases.watch(params)

    def _set_grad_dtype(self, params: list[torch.Tensor]) -> None:
        """grad_dtype on each param, which loses it where it is copied or cast."""
        dtype = self._grad_dtype
        for p in params if dtype is not None else ():
            free = p.grad is None or p.grad.dtype == dtype
            if free and p.dtype in LOW_PRECISION:  # frozen or not: it may be trained later
                p.grad_dtype = dtype

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, `main_grad` included. With release_gradients=True RuntimeError
        between backward and step(): they have been applied."""
        if self._releases is not None:
            self._releases.check_idle("zero_grad")
        self._clear_main_grads(keep=not set_to_none)
        super().zero_grad(set_to_none)
        params = self._params()
        if self._grad_dtype is not None and not self._has_stepped:
            check_grad_dtype(type(self).__name__, params)  # wrapped since
        self._set_grad_dtype(params)

    def _clear_main_grads(self, keep: bool = False) -> None:
        """Zero in place the main_grad of params without a `grad`, or to keep it: the layer or
        framework adds to it again. A copy of `grad` goes."""
        for p in self._params():
            main = vars(p).get("main_grad")
            if main is not None and (keep or p.grad is None) and not is_copy(main):
                main.detach().zero_()
            elif main is not None:
                p.main_grad = None  # type: ignore[attr-defined]

    def reload_model_params(self) -> None:
        """Take the values of the params into their masters at the next step.

        Call this after a write in place through `param.data` (as `p.data.add_(x)`), which leaves no
        trace, so that the step would overwrite it with the master. It sees all other writes.
        A remainder is kept: it is less than half a unit in the last place of the value.
        """
        _masters.Changes.count += 1

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of all gradients of the last step, unscaled, before clipping: fp64 [] on the
        device; None if the step did not read them first."""
        parts = list(self._sums.values())
        return torch.cat(parts).sum().sqrt() if parts else None

    @property
    def group_grad_norms(self) -> list[torch.Tensor | None]:
        """`grad_norm` of each param group; None for one without gradients."""
        groups = range(len(self.param_groups))
        return [self._sums[g].sum().sqrt() if g in self._sums else None for g in groups]

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last step found Inf or NaN and changed nothing. Waits for the device;
        `skipped` counts without that."""
        return self._last_skip is not None and bool(self._last_skip)

    def overflow_report(self, model: torch.nn.Module | None = None) -> list[Overflow]:
        """Which params' gradients held Inf or NaN at the last skipped step, the worst first.

        Names are `model`'s, or those of named_parameters() if the optimizer was made with them.
        Waits for the device. For a sharded param, only the part on this rank is considered.
        """
        return worst_first(self.grad_counts.overflows(namer([self], model)))

    def underflow_report(self, model: torch.nn.Module | None = None) -> list[Underflow]:
        """How many zeros and subnormal numbers each param's gradient held at the last step that
        read them first, in their own dtype and still scaled. Waits for the device."""
        return self.grad_counts.underflows(namer([self], model))

    def _step_scaled(
        self, grad_scale: torch.Tensor | None, found_inf: torch.Tensor, *args: Any, **kwargs: Any
    ) -> float | None:
        """step(*args, **kwargs) for mixprec.GradScaler: unscale by grad_scale, set `found_inf` in
        place where a gradient is Inf or NaN, and skip where it is not 0.

        It calls `self.step`, so that hooks, the profiler and an LR scheduler's wrapper all run.
        """
        self._scaling = Scaling(grad_scale, found_inf)
        try:
            return self.step(*args, **kwargs)
        finally:
            self._scaling = None

    def _current_scaling(self) -> Scaling:
        """The values passed by the scaler of this step, of mixprec or torch."""
        if self._scaling is not None:
            return self._scaling
        return Scaling(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))

    @_disable_dynamo  # a compiled train step calls it: one kernel for all params is there already
    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Update the params with their current gradients; return what `closure`, if given,
        returned. A `main_grad` is cleared. With release_gradients=True it ends what backward has
        begun: RuntimeError for a closure and under a GradScaler that is enabled."""
        if self._releases is not None:
            self._releases.step(closure, self._current_scaling())
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [p for group in self.param_groups for p in group["params"]]
        if self._ids != list(map(id, params)):  # other code has edited the groups
            _settings.check_params(type(self).__name__, params, self._grad_dtype)
            self._set_up_params()
        batches = [
            batch
            for g, group in enumerate(self.param_groups)
            for batch in self._batches.of_group(
                g, group["params"], self.state, self._moments(group), self._policy_of(group)
            )
        ]
        if self._looks_for_ddp > 0 and (not self._has_stepped or self._batches.all_written):
            first_step(self, self.ranks, params)
            self._has_stepped, self._batches.all_written = True, False
            self._looks_for_ddp -= 1
        plain = self.ranks.process_group is None and PLAIN.issuperset(map(type, params))
        is_local = plain or self.ranks.is_local(params)
        self._sums, self._last_skip = {}, None
        if not batches and is_local:
            return loss
        grad_scale, found_inf = self._current_scaling()
        # Gradients that a scaler's unscale_ has checked are read again only for their norm.
        seen = found_inf is not None and grad_scale is None
        by_torch = found_inf is not None and self._scaling is None and self._batches.met_main_grad
        if by_torch and any(gradient_of(p) is not p.grad for b in batches for p in b.params):
            raise RuntimeError(
                f"{type(self).__name__}.step: torch.amp.GradScaler does not see main_grad: "
                "unscale_ would leave it as it is, and its overflow not reduce the scale. Use "
                "mixprec.GradScaler"
            )
        if self._batches.met_main_grad and not self._warned_of_both:
            self._warn_of_both(batches)
        self._low = self._low or self._batches.met_low_precision
        must_read = self._clips or grad_scale is not None or (self._low and not seen)
        if found_inf is None and must_read:
            found_inf = torch.zeros((), dtype=torch.float32, device=params[0].device)
        unscale = None if grad_scale is None else inv_scale_op(grad_scale)
        if found_inf is not None:
            if not seen:
                self.grad_counts.start()
            if must_read:
                counts = None if seen else self.grad_counts
                self._sums = _batches.read_norms(batches, unscale, found_inf, counts)
            if not is_local:
                sums = _batches.agree_norms(
                    self.ranks, batches, found_inf, self._sums, self.param_groups
                )
                self._sums = sums if must_read else {}
            self._last_skip = is_set(found_inf)
            if not seen:
                self.grad_counts.finish(self._last_skip)
            self.skipped = self.skipped.to(found_inf.device)
            if self._last_skip is not False:
                self.skipped += self._last_skip
        if self._last_skip is not True:
            factors = _batches.clip_factors(self._sums, self.param_groups, self.max_grad_norm)
            self._update_batches(batches, unscale, factors, found_inf)
        if self._batches.met_main_grad:
            self._clear_main_grads()  # also where the step is skipped: model.zero_grad() cannot
        self._batches.remember()
        return loss

    def _warn_of_both(self, batches: list[Batch]) -> None:
        """Once, where a gradient in `grad` is not used because there is a main_grad. RuntimeError
        for a DTensor, to whose main_grad no layer adds."""
        params = [p for batch in batches for p in batch.params if p.grad is not None]
        both = [p for p in params if not (gradient_of(p) is p.grad or is_copy(gradient_of(p)))]
        if any(map(is_sharded, both)):
            raise RuntimeError(
                f"{type(self).__name__}.step: sharded params must have no main_grad, to which "
                "their layers do not add: their gradients are in grad"
            )
        if both:
            self._warned_of_both = True
            warnings.warn(
                f"{type(self).__name__}.step: {len(both)} params, the first of shape "
                f"{tuple(both[0].shape)}, have a grad beside main_grad, and grad is not used. "
                "Layers inside torch.compile leave gradients of biases and tied weights there: run "
                "them eagerly, give these params no main_grad, or add grad to it before the step",
                stacklevel=4,
            )

    @property
    def _clips(self) -> bool:
        """Whether any norm is limited."""
        limits = [self.max_grad_norm, *(g.get("max_grad_norm") for g in self.param_groups)]
        return any(limit is not None for limit in limits)

    def _update_batches(
        self,
        batches: list[Batch],
        unscale: torch.Tensor | None,
        clips: dict[int, torch.Tensor],
        found_inf: torch.Tensor | None,
    ) -> None:
        for batch in batches:
            group, policy, device = self.param_groups[batch.group], batch.policy, batch.device
            op, lr = self._op_of(group), group["lr"]
            its = {**group, "decoupled_weight_decay": self._decoupled}
            its["beta1"], its["beta2"] = group.get("betas", (0.0, 0.0))
            states = [s[name] for name in batch.moments for s in batch.states]
            kept = batch.states if batch.has_master else []
            masters: list[Any] = [s.get("master", s.get("remainder")) for s in kept]
            if batch.data is not batch.params:  # they are sharded
                states, masters = list(map(local, states)), list(map(local, masters))
            lr_on_device = on_device(device, lr) if isinstance(lr, torch.Tensor) else None
            options = UpdateOptions(
                0.0 if lr_on_device is not None else lr,
                [its[name] for name in op.settings],
                group["maximize"],
                math.inf if self.max_grad_value is None else self.max_grad_value,
                policy.stochastic_rounding,
                self._seed,
                [self._index[id(p)] for p in batch.params] if policy.random else (),
                lr_on_device,
                on_device(device, unscale),
                on_device(device, clips.get(batch.group)),
                on_device(device, found_inf),
            )
            of_codes = scales(batch.states, batch.moments) if policy.state_dtype == CODES else []
            tensors = states, of_codes, masters, self._batches.steps(batch)
            self._update(op, group, options, batch.data, batch.grads, *tensors)

    def _update(
        self, op: UpdateOp, group: dict[str, Any], options: UpdateOptions, *tensors: Any
    ) -> None:
        """tensors: params, grads, states, their scales, masters, steps."""
        op(*tensors, *options)
