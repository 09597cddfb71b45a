"""GradScaler: dynamic loss scaling that stays on the device, with a minimum scale."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import OptState

from .. import _local_gradients, ops, scaling
from .._local_gradients import gradient_of
from ..distributed import Ranks
from ..grad_report import Overflow, Underflow
from .reader import (
    GradReader,
    Lagged,
    any_flag,
    check_,
    has_work,
    params_of,
    step_prepared,
    unscales_itself,
    unwrap,
)
from .rules import NEVER, TORCH_STATE, check, check_device, power

if TYPE_CHECKING:
    import torch.distributed as dist

_COUNTERS = ("skipped", "applied_steps", "skipped_in_a_row")


class GradScaler(torch.amp.GradScaler):
    """Scales losses by a factor that shrinks when gradients overflow and grows when they do not.

    A drop-in replacement for torch.amp.GradScaler, and a subclass of it: the same methods, order
    of calls, errors and state dict keys. It drives one or several optimizers, of torch or of
    mixprec, under one scale:

        scaler.scale(loss).backward();  scaler.step(optimizer);  scaler.update()

    update(): when an optimizer's gradients held Inf or NaN, before or after unscaling,
    scale = max(scale * backoff_factor, min_scale) and that optimizer's step was skipped; after
    growth_interval updates in a row without, scale = min(scale * growth_factor, max_scale).
    growth_interval=None: the scale is constant; overflowing steps are still skipped.
    hysteresis: the number of overflows since the scale last grew after which it backs off. Due to
    min_scale the scale never becomes 0, so training recovers from any number of overflows.

    max_consecutive_skips: after this many skipped updates in a row, update() raises a RuntimeError
    that names the worst parameter and says whether its gradient held Inf or NaN; with on_max_skips
    it calls this function with the overflow report instead. Both repeat after the same number of
    further skips. Parameters have their names in `model`, if given, or those of an optimizer
    constructed from named_parameters(). On a GPU this, like `last_step_skipped`, lags a few updates
    behind, which avoids a host sync.
    grow_on_underflow: the scale may grow after a twentieth of growth_interval when more than this
    share of the nonzero gradients is subnormal in their dtype.
    process_group: with torch's optimizers, ranks that hold different parameters and must skip
    together. (mixprec's take one themselves; for DTensors the ranks are known.)

    device: accepted for compatibility; the scale is created on the device of the first loss, and
    the scaler never disables itself. With mixprec's optimizers there is no host sync, gradients may
    be fp16, and unscaling is part of the update. Raises ValueError for settings out of range (not
    checked with enabled=False).

    Compute losses in fp32: the gradient of an fp16 loss is the scale itself in fp16, so scales
    above 65504 overflow at once. Source: Mixed Precision Training (Micikevicius et al., 2018).
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int | None = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 2.0**-24,
        max_scale: float | None = None,
        hysteresis: int = 1,
        max_consecutive_skips: int | None = None,
        on_max_skips: Callable[[list[Overflow]], object] | None = None,
        grow_on_underflow: float | None = None,
        model: torch.nn.Module | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if enabled:
            check(**locals())  # which passes over the arguments that have no rule
            check_device(device)
        self._static = growth_interval is None
        interval = NEVER if growth_interval is None else growth_interval
        # torch's constructor disables the scaler when "cuda", its default, is not available.
        super().__init__("cpu", init_scale, growth_factor, backoff_factor, interval, enabled)
        if device is not None:
            self._device = device
        self._min_scale, self._max_scale, self._hysteresis = min_scale, max_scale, hysteresis
        self._max_skips, self._on_max_skips = max_consecutive_skips, on_max_skips
        self._grow_on_underflow = grow_on_underflow
        # They move with torch's _scale and _growth_tracker to the device of the first loss.
        self._set_trackers(hysteresis if enabled else 1, [0, 0, 0])
        self._warned_fp16 = self._warned_clipped = False
        self._reader = GradReader(Ranks(process_group), model)

    def __repr__(self) -> str:
        """The scale, what became of the updates, and the settings. Waits for a GPU."""
        if not self._enabled:
            return f"{type(self).__name__}(enabled=False)"
        fields: dict[str, object] = {
            "scale": power(self.get_scale(), 6),
            "applied_steps": int(self.applied_steps),
            "skipped": int(self.skipped),
            "growth_interval": self.get_growth_interval() or "None",  # the others are off if None
            "min_scale": power(self._min_scale, 6),
            "max_scale": None if self._max_scale is None else power(self._max_scale, 6),
            "max_consecutive_skips": self._max_skips,
            "grow_on_underflow": self._grow_on_underflow,
        }
        settings = ", ".join(f"{name}={text}" for name, text in fields.items() if text is not None)
        return f"{type(self).__name__}({settings})"

    def _set_trackers(self, hysteresis: int, counters: list[int]) -> None:
        self._hysteresis_tracker = torch.tensor(hysteresis, dtype=torch.int32, device="cpu")
        self._counters = torch.tensor(counters, dtype=torch.int64, device="cpu")
        self._lagged = Lagged(counters)
        self._start_watch(counters)

    def _start_watch(self, counters: list[int]) -> None:
        """Past skips have been reported already."""
        limit = self._max_skips if self._enabled else None
        self._lagged.reported = 0 if limit is None else counters[2] // limit

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._device = dev.type
        self._hysteresis_tracker = self._hysteresis_tracker.to(dev)
        self._counters = self._counters.to(dev)

    @property
    def skipped(self) -> torch.Tensor:
        """How many updates found an overflow: int64 [], a copy on the scale's device."""
        return self._counters[0].clone()

    @property
    def applied_steps(self) -> torch.Tensor:
        """How many updates found none, in any optimizer: the count for an LR schedule."""
        return self._counters[1].clone()

    @property
    def last_step_skipped(self) -> bool:
        """Whether the latest update overflowed; on a GPU, the latest that the host has read."""
        return self._lagged.latest()[2] > 0

    def overflow_report(self, model: torch.nn.Module | None = None) -> list[Overflow]:
        """Which parameters' gradients held Inf or NaN, and how many, the worst first: for each
        optimizer, at its last step that overflowed. Waits for the device."""
        return self._reader.overflows(model)

    def underflow_report(self, model: torch.nn.Module | None = None) -> list[Underflow]:
        """How many zeros and subnormal numbers each parameter's gradient held at the last step,
        still scaled and in its own dtype. Waits for the device."""
        return self._reader.underflows(model)

    def scale(self, outputs: Any) -> Any:
        """Return outputs * scale: of a tensor, or of tensors in (nested) lists, tuples, iterables.

        An fp16 tensor of one element, a loss, is multiplied and returned in FP32, where it does not
        overflow. Raises ValueError for anything that is not a tensor.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            assert self._scale is not None, "created just above"
            if outputs.dtype == torch.float16 and outputs.numel() == 1:
                outputs = outputs.float()
            scaled = outputs * self._scale.to(outputs.device, non_blocking=True)
            _local_gradients.mark(scaled)
            return scaled
        if isinstance(outputs, Iterable) and not isinstance(outputs, str):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")

    @_disable_dynamo  # it reads attributes of params and optimizers that Dynamo cannot trace
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer with unscaled gradients; skip the step if they hold Inf or NaN.

        An optimizer of mixprec unscales, checks and skips itself, without a host sync; for torch's
        see torch.amp.GradScaler.step. RuntimeError for a closure or a second step before update(),
        AssertionError if no parameter has a gradient, ValueError while Accelerate accumulates.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if (inner := unwrap("GradScaler.step", optimizer)) is not optimizer:
            return step_prepared(self, optimizer, inner, *args, **kwargs)
        if "closure" in kwargs or any(callable(arg) for arg in args):
            raise RuntimeError("GradScaler.step: a closure cannot be used with loss scaling")
        self._start_without_loss(optimizer)
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        flags, unscaled = state["found_inf_per_device"], state["stage"] is OptState.UNSCALED
        ours = unscales_itself(optimizer)
        if ours:
            self._reader.counts[optimizer] = optimizer.grad_counts  # type: ignore[attr-defined]
        if flags:  # a reduction over ranks may have left a sum above 1
            flags = state["found_inf_per_device"] = {
                scale.device: any_flag(flags.values(), scale.device)
            }
        if not ours:
            return super().step(optimizer, *args, **kwargs)
        if not unscaled and has_work(optimizer):
            flags = state["found_inf_per_device"] = {scale.device: torch.zeros_like(scale)}
        if not flags:
            raise AssertionError(
                "No inf checks were recorded for this optimizer: none of its parameters has a "
                "gradient; call scaler.scale(loss).backward() before scaler.step(optimizer)."
            )
        result = optimizer._step_scaled(  # type: ignore[attr-defined]
            None if unscaled else scale, flags[scale.device], *args, **kwargs
        )
        state["stage"] = OptState.STEPPED
        return result

    @_disable_dynamo
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """End the iteration: let the scale back off or grow, or set it to `new_scale`.

        new_scale: a positive finite number (ValueError otherwise) or a tensor of one element on
        the scale's device; min_scale and max_scale do not apply to it. Raises RuntimeError, after
        the scale was updated, when max_consecutive_skips is reached.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            if isinstance(new_scale, torch.Tensor):
                new_scale = new_scale.reshape(()) if new_scale.numel() == 1 else new_scale
            else:
                check(new_scale=new_scale)
                new_scale = float(new_scale)
            super().update(new_scale)
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        states = self._per_optimizer_states.values()
        flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
        if not flags:
            raise AssertionError(
                "No inf checks were recorded prior to update: call scaler.step(optimizer), which "
                "unscales the gradients, in place of optimizer.step()."
            )
        kinds = [(flag.device, flag.dtype) for flag in flags]
        is_one = kinds == [(scale.device, scale.dtype)]
        share, threshold = None, self._grow_on_underflow
        if threshold is not None:
            share = self._reader.underflow_share(self._per_optimizer_states, scale.device)
        ops.update_scale_(
            scale,
            growth_tracker,
            self._hysteresis_tracker,
            self._counters,
            flags[0] if is_one else any_flag(flags, scale.device),
            share,
            growth_factor=1.0 if self._static else self._growth_factor,
            backoff_factor=1.0 if self._static else self._backoff_factor,
            growth_interval=self._growth_interval,
            min_scale=self._min_scale,
            max_scale=self._max_scale,
            hysteresis=self._hysteresis,
            grow_on_underflow=1.0 if threshold is None else threshold,
        )
        self._per_optimizer_states.clear()
        scaling.after_step()  # which a skipped step of torch's optimizers has not called
        self._lagged.push(self._counters)
        is_captured = scale.is_cuda and torch.cuda.is_current_stream_capturing()
        if self._max_skips is not None and not is_captured:
            self._watch(self._max_skips)

    def _after_replay(self) -> None:
        """What update() does on the host, after a replay of a graph that has captured it."""
        self._lagged.replay()
        if self._max_skips is not None:
            self._watch(self._max_skips)

    def _watch(self, limit: int) -> None:
        """Raise or call back after every `limit` skipped updates in a row known to the host."""
        in_a_row = self._lagged.latest()[2]
        before, self._lagged.reported = self._lagged.reported, in_a_row // limit
        if self._lagged.reported <= before:
            return
        report = self.overflow_report()
        if self._on_max_skips is not None:
            self._on_max_skips(report)
            return
        worst = f" Worst: {report[0]}." if report else ""
        raise RuntimeError(
            f"GradScaler: the last {in_a_row} updates were all skipped "
            f"(max_consecutive_skips={limit}); the loss scale is {self.get_scale():g}.{worst} If "
            "it goes on while the scale falls, the cause is the model or its data, not the scale. "
            "(Names come from model=, or from an optimizer made with named_parameters().)"
        )

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if self._enabled:
            optimizer = unwrap("GradScaler.unscale_", optimizer)
            self._start_without_loss(optimizer)
        super().unscale_(optimizer)

    def _start_without_loss(self, optimizer: torch.optim.Optimizer) -> None:
        """On a rank whose stage of a pipeline has no loss to scale."""
        params = params_of(optimizer) if self._scale is None else []
        if params and self._reader.ranks.process_group is not None:
            self._lazy_init_scale_growth_tracker(params[0].device)

    # torch's unscale_() and step() call the next two; both return found_inf flags by device.
    @_disable_dynamo
    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        ours = unscales_itself(optimizer)
        grads = map(gradient_of, params_of(optimizer) if ours and not self._warned_fp16 else ())
        if any(grad is not None and grad.dtype == torch.float16 for grad in grads):
            self._warned_fp16 = True
            warnings.warn(
                "GradScaler.unscale_: unscaled gradients are rounded to fp16 again, where values "
                "below 6e-8 become 0. Leave them scaled: step() unscales them in FP32; to clip, "
                "give the optimizer max_grad_norm.",
                stacklevel=6,  # the caller of unscale_, beyond two frames of _disable_dynamo
            )
        return self._reader.read(optimizer, ops.unscale_, inv_scale, found_inf, allow_fp16 or ours)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, torch.Tensor]:
        """For torch's fused optimizers: check the gradients as they will be unscaled.

        Returns one flag for all devices, because those optimizers skip only if the sum is 1.
        """
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        inv_scale, unset = ops.inv_scale(scale), torch.zeros_like(scale)
        found = self._reader.read(optimizer, check_, inv_scale, unset, allow_fp16=True)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        return found

    def get_growth_interval(self) -> int | None:  # type: ignore[override]
        """After how many updates without overflow the scale grows; None for a static scale."""
        return None if self._static else super().get_growth_interval()

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale grows; ValueError unless finite and above 1."""
        check(growth_factor=new_factor)
        super().set_growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale backs off; ValueError unless between 0 and 1."""
        check(backoff_factor=new_factor)
        super().set_backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int | None) -> None:
        """Set after how many good updates the scale grows, None: never; ValueError if below 1."""
        check(growth_interval=new_interval)
        self._static = new_interval is None
        super().set_growth_interval(NEVER if new_interval is None else new_interval)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers: torch's keys, which a torch scaler loads, and our own."""
        if not self._enabled:
            return {}
        return {
            **super().state_dict(),
            "static": self._static,
            "min_scale": self._min_scale,
            "max_scale": self._max_scale,
            "hysteresis": self._hysteresis,
            "_hysteresis_tracker": int(self._hysteresis_tracker.item()),
            **dict(zip(_COUNTERS, self._counters.tolist(), strict=True)),
            "version": 1,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of torch.amp.GradScaler. With the latter our own
        settings stay as they are, and the counts of skipped and applied updates become 0.

        Raises RuntimeError for an empty dict and ValueError, changing nothing, for a damaged one.
        """
        if not self._enabled:
            return
        if state_dict:  # an empty one is torch's error
            if missing := [key for key in TORCH_STATE if key not in state_dict]:
                raise ValueError(f"GradScaler: state_dict must hold {TORCH_STATE}, lacks {missing}")
            settings = ("min_scale", "max_scale", "hysteresis", "static")
            own = {name: getattr(self, f"_{name}") for name in settings}
            state = {**own, **dict.fromkeys(_COUNTERS, 0), **state_dict}
            state.setdefault("_hysteresis_tracker", state["hysteresis"])
            check(**state)
        super().load_state_dict(state_dict)
        for name in settings:
            setattr(self, f"_{name}", state[name])
        counters = [state[name] for name in _COUNTERS]
        self._hysteresis_tracker.fill_(state["_hysteresis_tracker"])
        self._counters.copy_(torch.tensor(counters, device="cpu"))
        self._lagged.reset(counters)
        self._start_watch(counters)

    def __getstate__(self) -> dict[str, Any]:
        trackers = self._hysteresis_tracker.cpu(), self._counters.cpu()
        state = {**super().__getstate__(), "_hysteresis_tracker": trackers[0]}
        del state["_lagged"]  # valid in this process only
        return {**state, "_counters": trackers[1]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reader = GradReader(self._reader.ranks)  # which a shallow copy does not share
        left, counters = self._hysteresis_tracker, self._counters
        if counters is None:  # of a pickle in which they were not yet tensors
            left, counters = state["_init_hysteresis_tracker"], state["_init_counters"]
        self._set_trackers(int(left), torch.as_tensor(counters).tolist())
