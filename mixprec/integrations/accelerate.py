"""Accelerate: `attach` prepares an Accelerator for the optimizers and the scaler of mixprec."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.amp.grad_scaler import OptState

from .._local_gradients import LOW_PRECISION, any_sharded, gradient_of, has_run, sharded_groups
from ..amp import GradScaler
from ..amp.reader import gradients, params_of, unscales_itself
from ..nn.cast import cast_parameters
from ..ops import grad_stats_, inv_scale
from ..optim._settings import check_limit
from ..scaling import has_state

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    raise ImportError(
        "mixprec.integrations.accelerate needs Accelerate: pip install accelerate"
    ) from error

__all__ = ["attach"]

AnyAccelerator = TypeVar("AnyAccelerator", bound=Accelerator)

_UNSUPPORTED = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")  # FSDP: of version 1


def attach(accelerator: AnyAccelerator, scaler: GradScaler | None = None) -> AnyAccelerator:
    """Make `accelerator` work with mixprec's optimizers, in place; return it.

    Call it before `prepare`, once. Convert the model, cast its parameters and make the optimizer
    before `prepare`, too. With FSDP2 (FullyShardedDataParallelPlugin(fsdp_version=2)) `prepare`
    shards, and then casts the norms that are gathered with 16-bit weights, as `cast_parameters`
    does after `fully_shard`; parameters in FP32 with mixed_precision "bf16" need no cast at all.

    accelerator: with mixed_precision "no", or "bf16" for torch.autocast around the model.
    scaler: for FP16; `backward` scales the loss by it, and `save_state` and `load_state` include
    it. It may also drive optimizers of torch.

    For each prepared optimizer of mixprec:

    - `clip_grad_norm_` and `clip_grad_value_` set the limit of its next step, which clips in the
      pass that updates; the gradients stay as they are until then. The norm that is returned, fp32
      [], is that of the unscaled gradients before clipping. It takes one more pass over them: with
      max_grad_norm given to the optimizer no call is needed, and `optimizer.grad_norm` has it after
      the step.
    - `step_was_skipped` and `optimizer_step_was_skipped` say whether the last step found Inf or NaN
      and changed nothing, with or without a scaler. Prepared schedulers then stay where they are.
      Reading them waits for the device.

    With delayed scales on several ranks, call `mixprec.update_scales(model, process_group)` before
    each step, and pass DistributedDataParallelKwargs(broadcast_buffers=False): `prepare` raises
    ValueError otherwise.

    TypeError for an accelerator or a scaler of another class. ValueError for an accelerator that
    has prepared an optimizer already, runs DeepSpeed, FSDP1, Megatron-LM or XLA, or has its own
    scaler ("fp16") or layers ("fp8"). The calls above raise ValueError for parameters of several
    optimizers, a limit other than the optimizer's own, and a norm_type other than 2.
    """
    if not isinstance(accelerator, Accelerator):
        got = type(accelerator).__name__
        raise TypeError(f"attach: accelerator must be an accelerate.Accelerator, got {got}")
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"attach: scaler must be a mixprec.GradScaler, got {type(scaler).__name__}")
    if accelerator._optimizers:
        raise ValueError(
            f"attach: accelerator must not have prepared an optimizer yet, got one with "
            f"{len(accelerator._optimizers)}: call attach first"
        )
    kind = accelerator.distributed_type.value
    if kind in _UNSUPPORTED and not accelerator.is_fsdp2:
        raise ValueError(
            f"attach: accelerator must run one process, DDP or FSDP2 (fsdp_version=2), got {kind}"
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ValueError(
            "attach: accelerator must have mixed_precision 'no' or 'bf16', got "
            f"{accelerator.mixed_precision!r}: mixprec.convert and a mixprec.GradScaler replace it"
        )
    accelerator.scaler = scaler
    cls: Any = type(accelerator)
    if not issubclass(cls, _Attached):  # not attached before
        is_base = cls is Accelerator
        accelerator.__class__ = _Attached if is_base else type(cls.__name__, (_Attached, cls), {})
    return accelerator


class _Optimizer(AcceleratedOptimizer):
    """Accelerate's wrapper of an optimizer that unscales, clips and skips by itself."""

    _limits: dict[str, float | None]  # the optimizer's own, while a limit for one step is set

    @property
    def step_was_skipped(self) -> bool:
        # Not whether step() was called, as the base class has it: it is called in any case.
        return bool(self.optimizer.last_step_skipped)

    def limit_next_step(self, who: str, name: str, value: float) -> None:
        """Set `max_grad_norm` or `max_grad_value` of the optimizer, until its next step."""
        check_limit(who, name, value)
        limit = self._limits.setdefault(name, getattr(self.optimizer, name))
        if limit is None:
            setattr(self.optimizer, name, value)
        elif value not in (limit, math.inf):
            raise ValueError(
                f"{who}: {name} must be {limit}, as the optimizer has it, got {value}; set only one"
            )

    def step(self, closure: Callable[[], float] | None = None) -> None:
        super().step(closure)
        if self.gradient_state.sync_gradients:  # else it was no step
            for name, limit in self._limits.items():
                setattr(self.optimizer, name, limit)
            self._limits.clear()


class _Attached(Accelerator):
    """The methods of Accelerator that treat optimizers of mixprec like any other, and must not."""

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        prepared = super().prepare_optimizer(optimizer, device_placement=device_placement)
        if type(prepared) is AcceleratedOptimizer and unscales_itself(prepared.optimizer):
            prepared.__class__ = _Optimizer
            prepared._limits = {}
        return prepared

    def prepare(self, *args: Any, **options: Any) -> Any:
        prepared = super().prepare(*args, **options)
        for each in prepared if isinstance(prepared, (list, tuple)) else [prepared]:
            if self.is_fsdp2 and isinstance(each, torch.nn.Module):
                for group in sharded_groups(each):
                    dtypes = {p.dtype for p in group.values()}
                    if len(dtypes) > 1 and not has_run(each):
                        cast_parameters(each, *dtypes.intersection(LOW_PRECISION))
        return prepared

    def prepare_model(self, model: torch.nn.Module, *args: Any, **options: Any) -> torch.nn.Module:
        broadcasts = self.ddp_handler is None or self.ddp_handler.broadcast_buffers
        if broadcasts and self.num_processes > 1 and any(map(has_state, model.modules())):
            raise ValueError(
                "prepare: the delayed scales of a model on several ranks need DDP with "
                "broadcast_buffers=False, got True: Accelerator(kwargs_handlers="
                "[DistributedDataParallelKwargs(broadcast_buffers=False)])"
            )
        return super().prepare_model(model, *args, **options)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        # The base class unscales under its own fp16 only.
        if self.scaler is None:
            return
        chosen = self._optimizers if optimizer is None else optimizer
        for each in chosen if isinstance(chosen, (list, tuple)) else [chosen]:
            inner = getattr(each, "optimizer", each)
            if not _is_unscaled(self.scaler, inner):
                self.scaler.unscale_(inner)

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2,
    ) -> torch.Tensor:
        parameters = _as_list(parameters)
        prepared = self._holder("clip_grad_norm_", parameters)
        if prepared is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        if norm_type != 2:
            raise ValueError(f"clip_grad_norm_: norm_type must be 2, got {norm_type}")
        prepared.limit_next_step("clip_grad_norm_", "max_grad_norm", max_norm)
        return _grad_norm(prepared.optimizer, self.scaler)

    def clip_grad_value_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float
    ) -> None:
        parameters = _as_list(parameters)
        prepared = self._holder("clip_grad_value_", parameters)
        if prepared is None:
            super().clip_grad_value_(parameters, clip_value)
        else:
            prepared.limit_next_step("clip_grad_value_", "max_grad_value", clip_value)

    def _holder(self, who: str, parameters: list[torch.Tensor]) -> _Optimizer | None:
        """The optimizer of mixprec that holds them; None where no such optimizer holds any."""
        wanted = _with_gradients(parameters)
        for prepared in self._optimizers:
            if isinstance(prepared, _Optimizer):
                ids = _with_gradients(params_of(prepared.optimizer))
                if ids == wanted:
                    return prepared
                if ids & wanted:
                    raise ValueError(
                        f"{who}: parameters must be all those of one optimizer, which clips in its "
                        f"step; with gradients it has {len(ids)}, got {len(wanted)}, of them "
                        f"{len(ids & wanted)} of its own: give each optimizer max_grad_norm instead"
                    )
        return None


def _as_list(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _with_gradients(parameters: Iterable[torch.Tensor]) -> set[int]:
    return {id(p) for p in parameters if gradient_of(p) is not None}


def _is_unscaled(scaler: GradScaler, optimizer: Any) -> bool:
    return scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED


def _grad_norm(optimizer: torch.optim.Optimizer, scaler: GradScaler | None) -> torch.Tensor:
    """What optimizer.grad_norm will be after the step, in FP32: the order of the sum differs."""
    factor = None
    if scaler is not None and scaler._scale is not None and not _is_unscaled(scaler, optimizer):
        factor = inv_scale(scaler._scale)
    sums, params = [], params_of(optimizer)
    for device, (mine, grads) in gradients(optimizer, allow_fp16=True).items():
        sums.append(torch.zeros(len(grads), dtype=torch.float64, device=device))
        found_inf = torch.zeros((), dtype=torch.float32, device=device)
        here = None if factor is None else factor.to(device, non_blocking=True)
        grad_stats_(grads, here, found_inf, sums[-1])
        if any_sharded(params):
            scopes = [0] * len(mine)
            ranks: Any = optimizer.ranks  # type: ignore[attr-defined]
            sums[-1] = ranks.agree_(found_inf, sums[-1], mine, scopes, 1, params)
    if not sums:
        return torch.zeros((), dtype=torch.float32)
    return torch.cat([each.to(sums[0].device) for each in sums]).sum().sqrt().float()
