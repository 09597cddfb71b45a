"""Adam and AdamW: unscale, clip, update and write-back in one pass, without a host sync."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from ..ops.step import adamw_op
from . import _settings
from ._base import Optimizer


class AdamW(Optimizer):
    """AdamW (decoupled weight decay) for fp32, bf16, fp16 and fp64 params, in FP32 arithmetic.

    The formula is that of `mixprec.ops.adamw_`, one call per group and kind of param; results
    agree with torch.optim.AdamW within a few units in the last place. lr (a number or a tensor on
    any device), betas, eps, weight_decay and maximize may differ between param groups.

    master_weights: how 16-bit params are kept in FP32, where updates are applied.
      "auto", "fp32"  an FP32 copy in state[param]["master"], 4 bytes; the param is this rounded
      "remainder16"   for bf16 the 16 bits that the param lacks, in state[param]["remainder"],
                      2 bytes: the same FP32 values; fp16 params get an FP32 copy
      "remainder8"    the upper 8 of these, 1 byte: weights of 24 bits, rounded stochastically
      None            none: small updates are rounded away, unless rounding is stochastic
    state_dtype: of the moments, torch.float32 or "fp32", torch.bfloat16 or "bf16", or "int8": uint8
    codes, of params of 4,096 elements and more, with one scale per 256 elements in
    state[param]["exp_avg_scale"]. The last two are always rounded stochastically (to nearest,
    exp_avg_sq would stop decaying).
    stochastic_rounding: bf16 params have no master ("auto") and are rounded up or down at random,
    in proportion to the distance, from `seed`. The same seed gives the same bits.
    grad_dtype: torch.float32 lets autograd accumulate the gradients of 16-bit params in FP32 (not
    under DDP, which has `distributed.reduce_gradients_in_fp32`). A param's `main_grad`, if there
    is one, is used instead of its `grad`, and cleared by step().
    max_grad_norm: clips the norm of all gradients of all groups together, after unscaling, by
    min(1, max_grad_norm / (norm + 1e-6)); a group with its own "max_grad_norm" is clipped by the
    norm of that group. max_grad_value bounds each element. The norm is in `grad_norm`.
    release_gradients: True updates each param inside backward, when its gradient is complete, and
    frees the gradient; step() ends the step. `grad` then raises RuntimeError when it is used, a
    param whose gradient is Inf or NaN is skipped and no other, there is one backward pass per
    step(), and no max_grad_norm. RuntimeError, as a rule before the first update, for what cannot
    work so: see docs/optimizers.md.
    process_group: ranks that hold different params, or parts of them, and must skip and clip
    together; for DTensors (FSDP2) the ranks are detected without it.
    foreach, fused, capturable: accepted for compatibility with torch.optim and ignored: the step is
    always fused and capturable. amsgrad and differentiable must be False.

    Masters belong to the params: they begin with what `cast_parameters` has rounded, and another
    optimizer goes on from them. If other code has written a param since the last step, its master
    takes the new value wherever it no longer rounds to the param (writes in place through `.data`
    are not detected). A param group may have its own master_weights, state_dtype and
    stochastic_rounding. state[param]: `exp_avg`, `exp_avg_sq`, `master` or `remainder`, and `step`,
    FP32 on the param's device, which counts applied steps. State dicts keep all dtypes. Without
    masters they can be exchanged with torch.optim.AdamW in both directions.

    A step is skipped as a whole, leaving params, masters, moments and `step` unchanged, when a
    gradient is Inf or NaN and a GradScaler drives the step, max_grad_norm is set or a param has 16
    bits. `skipped` counts such steps on the device, and `overflow_report()` names the params.
    Otherwise (fp32 params, no scaler, no clipping) gradients are not checked and a NaN reaches the
    params, as in torch.optim. There is no host sync.

    With `mixprec.GradScaler` or `torch.amp.GradScaler`, gradients stay scaled and are unscaled
    inside the update. Raises ValueError for settings out of range, for complex and sparse params
    and, in step(), for sparse gradients.
    Source: Decoupled Weight Decay Regularization (Loshchilov, Hutter, 2019).
    """

    _op = adamw_op
    _moment_names = ("exp_avg", "exp_avg_sq")
    _optional: ClassVar[dict[str, Any]] = {"maximize": False, "decoupled_weight_decay": True}

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        amsgrad: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"maximize": maximize, "decoupled_weight_decay": self._decoupled}
        _settings.check_off(type(self).__name__, "amsgrad", amsgrad)
        _settings.check_off(type(self).__name__, "differentiable", differentiable)
        super().__init__(params, defaults, options)

    def _check_settings(self, group: dict[str, Any], who: str) -> None:
        super()._check_settings(group, who)
        _settings.check_off(who, "amsgrad", group.get("amsgrad"))
        if "foreach" in group and "amsgrad" not in group:  # torch's RAdam, NAdam, Adamax
            raise ValueError(f"{who}: amsgrad is not there: is this of another optimizer?")
        if group["decoupled_weight_decay"] != self._decoupled:
            raise ValueError(
                f"{who}: decoupled_weight_decay must be {self._decoupled}, got "
                f"{group['decoupled_weight_decay']}: AdamW decouples it, Adam does not"
            )


class Adam(AdamW):
    """Adam: weight decay, if any, is added to the gradient (L2 regularization).

    Arguments and behavior as for `AdamW`; it is a subclass only to share code.
    Source: Adam: A Method for Stochastic Optimization (Kingma, Ba, 2015).
    """

    _decoupled = False
    _optional: ClassVar[dict[str, Any]] = {"maximize": False, "decoupled_weight_decay": False}

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, **options)
