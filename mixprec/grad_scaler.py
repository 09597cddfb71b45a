"""GradScaler: dynamic loss scaling that stays on the device, with a floor it recovers from."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from . import ops


class GradScaler(torch.amp.GradScaler):
    """Scales losses by a factor that backs off when gradients overflow and grows when they do not.

    A drop-in torch.amp.GradScaler (a subclass: the same methods, order of calls, errors and state
    dict keys), for one or several optimizers, of torch or of mixprec, under one scale:

        scaler.scale(loss).backward();  scaler.step(optimizer);  scaler.update()

    update(): when an optimizer's gradients held Inf or NaN, before or after unscaling,
    scale = max(scale * backoff_factor, min_scale) and that optimizer's step was skipped; after
    growth_interval updates in a row without, scale = min(scale * growth_factor, max_scale).
    hysteresis: how many overflows since the scale last grew it takes to back off. The floor keeps
    the scale, and with it the training, recoverable whatever overflowed.

    device: where the scale lives follows the first loss, whatever is said here; the scaler never
    disables itself. With mixprec's optimizers nothing waits for the device, gradients may be fp16,
    and unscaling is part of the update. `skipped` counts the updates with an overflow, on the
    device. ValueError for settings out of range (not looked at with enabled=False).

    The gradient of an fp16 loss is itself the scale in fp16, so let losses be fp32: with an fp16
    loss, scales above 65504 back off at once. Source: Mixed Precision Training (Micikevicius et
    al., 2018).
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 2.0**-24,
        max_scale: float | None = None,
        hysteresis: int = 1,
    ) -> None:
        if enabled:
            _check(
                init_scale=init_scale,
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
                growth_interval=growth_interval,
                min_scale=min_scale,
                max_scale=max_scale,
                hysteresis=hysteresis,
            )
        # torch's constructor disables the scaler when "cuda", its default, is not available.
        super().__init__("cpu", init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        if device is not None:
            self._device = device
        self._min_scale, self._max_scale, self._hysteresis = min_scale, max_scale, hysteresis
        self._init_hysteresis_tracker, self._init_skipped = hysteresis, 0
        # Like torch's _scale and _growth_tracker, made when the first loss tells the device.
        self._hysteresis_tracker: torch.Tensor | None = None
        self._skipped: torch.Tensor | None = None
        self._warned_fp16 = False

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._device = dev.type
        self._hysteresis_tracker = torch.full(
            (), self._init_hysteresis_tracker, dtype=torch.int32, device=dev
        )
        self._skipped = torch.full((), self._init_skipped, dtype=torch.int64, device=dev)

    @property
    def skipped(self) -> torch.Tensor:
        """How many updates found an overflow: int64 [], on the scale's device, safe to keep."""
        return torch.tensor(self._init_skipped) if self._skipped is None else self._skipped.clone()

    def scale(self, outputs: Any) -> Any:
        """Return outputs * scale: a tensor, or tensors in (nested) lists, tuples or iterables.

        An fp16 tensor of one element is multiplied in FP32 and returned so: the product of a loss
        and the scale does not overflow. ValueError for anything that is not a tensor.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            assert self._scale is not None, "made just above"
            if outputs.dtype == torch.float16 and outputs.numel() == 1:
                outputs = outputs.float()
            return outputs * self._scale.to(outputs.device, non_blocking=True)
        if isinstance(outputs, Iterable) and not isinstance(outputs, str):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer with unscaled gradients, or skip where they hold Inf or NaN.

        An optimizer of mixprec does all three itself, without a host sync; for torch's see
        torch.amp.GradScaler.step. RuntimeError for a closure or a second step before update(),
        AssertionError where no param has a gradient.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or any(callable(arg) for arg in args):
            raise RuntimeError("GradScaler.step: a closure cannot be used with loss scaling")
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        flags, unscaled = state["found_inf_per_device"], state["stage"] is OptState.UNSCALED
        if flags:  # whoever reduced them over ranks may have made a sum of 2 of them
            flags = state["found_inf_per_device"] = {
                scale.device: _any(flags.values(), scale.device)
            }
        if not getattr(optimizer, "_raises_found_inf", False):
            return super().step(optimizer, *args, **kwargs)
        if not unscaled and _has_gradient(optimizer):
            flags = state["found_inf_per_device"] = {scale.device: torch.zeros_like(scale)}
        if not flags:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        optimizer.grad_scale = None if unscaled else scale  # type: ignore[attr-defined]
        optimizer.found_inf = flags[scale.device]  # type: ignore[attr-defined]
        try:
            result = optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        state["stage"] = OptState.STEPPED
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """End the iteration: let the scale back off or grow, or set it to `new_scale`.

        new_scale: a positive finite number (ValueError otherwise) or a tensor of one element on
        the scale's device; min_scale and max_scale do not bound it.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            if isinstance(new_scale, torch.Tensor):
                new_scale = new_scale.reshape(()) if new_scale.numel() == 1 else new_scale
            else:
                _check(new_scale=new_scale)
                new_scale = float(new_scale)
            super().update(new_scale)
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        states = self._per_optimizer_states.values()
        flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
        if not flags:
            raise AssertionError("No inf checks were recorded prior to update.")
        found_inf = _any(flags, scale.device)
        assert self._hysteresis_tracker is not None, "made with the scale"
        assert self._skipped is not None, "made with the scale"
        ops.update_scale_(
            scale,
            growth_tracker,
            self._hysteresis_tracker,
            found_inf,
            growth_factor=self._growth_factor,
            backoff_factor=self._backoff_factor,
            growth_interval=self._growth_interval,
            min_scale=self._min_scale,
            max_scale=self._max_scale,
            hysteresis=self._hysteresis,
        )
        self._skipped += found_inf != 0
        self._per_optimizer_states.clear()

    # torch's unscale_() and step() call the next two; both return found_inf flags by device.
    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        ours = getattr(optimizer, "_raises_found_inf", False)
        per_device = _gradients(optimizer, allow_fp16=allow_fp16 or ours)
        fp16 = any(g.dtype == torch.float16 for grads in per_device.values() for g in grads)
        if ours and fp16 and not self._warned_fp16:
            self._warned_fp16 = True
            warnings.warn(
                "GradScaler.unscale_: unscaled gradients are rounded to fp16 again, where values "
                "below 6e-8 become 0. Leave them scaled: step() unscales them in FP32; to clip, "
                "give the optimizer max_grad_norm.",
                stacklevel=3,
            )
        flags = []
        with torch.no_grad():
            for device, grads in per_device.items():
                flags.append(found_inf.to(device, copy=True))
                ops.unscale_(grads, inv_scale.to(device, non_blocking=True), flags[-1])
        home = found_inf.device
        return {home: _any(flags, home)} if flags else {}

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, torch.Tensor]:
        """For torch's fused optimizers: look at the gradients as they will be unscaled.

        One flag for all devices, because those optimizers skip only where their sum is exactly 1.
        """
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        inv_scale, flags = ops.inv_scale(scale), []
        for device, grads in _gradients(optimizer, allow_fp16=True).items():
            flags.append(torch.zeros((), device=device))
            sum_sq = torch.empty((), dtype=torch.float64, device=device)
            ops.grad_stats_(grads, inv_scale.to(device, non_blocking=True), flags[-1], sum_sq)
        found = {scale.device: _any(flags, scale.device)} if flags else {}
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        return found

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale grows; ValueError unless finite and above 1."""
        _check(growth_factor=new_factor)
        super().set_growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale backs off; ValueError unless between 0 and 1."""
        _check(backoff_factor=new_factor)
        super().set_backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set after how many updates without overflow the scale grows; ValueError if below 1."""
        _check(growth_interval=new_interval)
        super().set_growth_interval(new_interval)

    def state_dict(self) -> dict[str, Any]:
        """All of the state, as numbers: torch's keys, which a torch scaler loads, and our own."""
        if not self._enabled:
            return {}
        tracker, skipped = self._hysteresis_tracker, self._skipped
        return {
            **super().state_dict(),
            "min_scale": self._min_scale,
            "max_scale": self._max_scale,
            "hysteresis": self._hysteresis,
            "_hysteresis_tracker": (
                self._init_hysteresis_tracker if tracker is None else int(tracker.item())
            ),
            "skipped": self._init_skipped if skipped is None else int(skipped.item()),
            "version": 1,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of torch.amp.GradScaler, whose lack of our keys means
        that min_scale, max_scale and hysteresis stay as they are, with nothing skipped yet.

        RuntimeError for an empty dict, ValueError, changing nothing, for one that is damaged.
        """
        if not self._enabled:
            return
        if state_dict:  # an empty one is torch's error
            if missing := [key for key in _TORCH_STATE if key not in state_dict]:
                raise ValueError(
                    f"GradScaler: state_dict must hold {_TORCH_STATE}, lacks {missing}"
                )
            bounds = {"min_scale": self._min_scale, "max_scale": self._max_scale}
            state = {**bounds, "hysteresis": self._hysteresis, "skipped": 0, **state_dict}
            state.setdefault("_hysteresis_tracker", state["hysteresis"])
            _check(**{key: state[key] for key in state if key in _RULES})
        super().load_state_dict(state_dict)
        self._min_scale, self._max_scale = state["min_scale"], state["max_scale"]
        self._hysteresis = state["hysteresis"]
        self._init_hysteresis_tracker = state["_hysteresis_tracker"]
        self._init_skipped = state["skipped"]
        if self._hysteresis_tracker is not None and self._skipped is not None:
            self._hysteresis_tracker.fill_(self._init_hysteresis_tracker)
            self._skipped.fill_(self._init_skipped)

    def __getstate__(self) -> dict[str, Any]:
        own = self.state_dict()
        state = super().__getstate__()
        if own:
            state["_init_hysteresis_tracker"] = own["_hysteresis_tracker"]
            state["_init_skipped"] = own["skipped"]
            state["_hysteresis_tracker"] = state["_skipped"] = None
        return state


def _any(flags: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """One flag on `device`, 0.0 or 1.0: whether any is not 0 (Inf and NaN are not)."""
    here = [flag.reshape(()).to(device, non_blocking=True) for flag in flags]
    return (here[0] != 0 if len(here) == 1 else torch.stack(here).any()).float()


def _has_gradient(optimizer: torch.optim.Optimizer) -> bool:
    groups = optimizer.param_groups
    return any(p.grad is not None for group in groups for p in group["params"])


def _gradients(
    optimizer: torch.optim.Optimizer, *, allow_fp16: bool
) -> dict[torch.device, list[torch.Tensor]]:
    """The optimizer's gradients by device, of a sparse one its values; ValueError for fp16 ones."""
    per_device: dict[torch.device, list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            grad = p.grad
            if grad is None:
                continue
            if grad.dtype == torch.float16 and not allow_fp16:
                raise ValueError(
                    "Attempting to unscale FP16 gradients. torch's optimizers cannot use them; "
                    "those of mixprec.optim unscale them in FP32"
                )
            if grad.is_sparse:
                if grad.dtype == torch.float16:
                    # Two entries of one index are added here, where it can overflow, so add first.
                    grad = p.grad = grad.coalesce()
                grad = grad._values()
            per_device.setdefault(grad.device, []).append(grad)
    return per_device


def _is_positive(value: float) -> bool:
    return 0 < value <= torch.finfo(torch.float32).max  # the scale is kept in fp32


def _is_count(value: float) -> bool:
    return isinstance(value, int) and 0 <= value < 2**31


_POSITIVE = (_is_positive, "positive and finite in fp32")
_COUNT = (_is_count, "an int, 0 or more")
_COUNT_FROM_1 = (lambda value: _is_count(value) and value > 0, "an int, 1 or more")
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("init_scale", "new_scale", "scale", "min_scale", "max_scale"), _POSITIVE),
    "growth_factor": (lambda value: 1 < value < math.inf, "above 1 and finite"),
    "backoff_factor": (lambda value: 0 < value < 1, "between 0 and 1"),
    **dict.fromkeys(("growth_interval", "hysteresis"), _COUNT_FROM_1),
    **dict.fromkeys(("_growth_tracker", "_hysteresis_tracker", "skipped"), _COUNT),
    "version": (lambda value: value == 1, "1"),
}
_TORCH_STATE = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def _check(**settings: Any) -> None:
    """ValueError for the first setting or entry of a state that is not what it must be."""
    if settings.get("max_scale", 0) is None:  # no ceiling
        del settings["max_scale"]
    for name, value in settings.items():
        is_valid, meaning = _RULES[name]
        if not isinstance(value, (int, float)) or not is_valid(value):
            raise ValueError(f"GradScaler: {name} must be {meaning}, got {value!r}")
    if settings.get("max_scale", math.inf) < settings.get("min_scale", 0):
        raise ValueError(
            f"GradScaler: max_scale must be at least min_scale {settings['min_scale']}, "
            f"got {settings['max_scale']}"
        )
