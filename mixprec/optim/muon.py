"""Muon for matrices, with AdamW for all other params, in one optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from .._local_gradients import is_sharded
from ..functional import orthogonalize
from ..ops._dispatch.optimizer_update import UpdateOp, UpdateOptions
from ..ops.step import adamw_op, muon_direction_op, sgd_op
from . import _settings
from ._base import Optimizer
from ._batches import Batch
from ._whole import compute_on_owners, plan

_ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


class Muon(Optimizer):
    """Muon for matrices and AdamW for the rest, for fp32, bf16, fp16 and fp64 params.

        m = m + (g - m) * (1 - momentum)                        m: momentum_buffer
        d = m + (g - m) * (1 - momentum) with nesterov, else m
        p = p - lr * (ratio * orthogonalize(d) + weight_decay * p)

    g: the gradient, unscaled and clipped. orthogonalize: `mixprec.functional.orthogonalize`, ns_*
    and eps are its arguments; ns_dtype="fp8" casts the operands of its products to E4M3 instead of
    bf16. ratio: by adjust_lr_fn, None or "original": sqrt(max(1, rows / columns));
    "match_rms_adamw": 0.2 * sqrt(max(rows, columns)), with which lr and weight_decay are AdamW's.
    Arguments and results are those of torch.optim.Muon, apart from the rounding of the products.

    Params that are not 2-D, and all of a group with use_muon=False (to be set for embeddings and
    the output layer), are updated as by `AdamW`, with the settings in `adamw` (lr, betas, eps,
    weight_decay; those not given are AdamW's defaults). A group of both kinds becomes two param
    groups, which have `use_muon` True and False. Settings that a group has itself hold for both.

    state_dtype: torch.float32 or torch.bfloat16; moments saved in 8 bits load into either, exactly.
    The other options are as for `AdamW`, and so are skipping, scaling and errors: one overflow
    skips the step of all params, and one norm clips them. A matrix that is sharded in one dimension
    of a mesh (FSDP2) is orthogonalized by one rank, the work shared by size, and another one (FSDP2
    with tensor parallelism) by every rank; each rank updates its part. state[param]:
    `momentum_buffer`, or `exp_avg` and `exp_avg_sq`; `step`; `master` or `remainder`. Without
    masters, state dicts of matrices can be exchanged with torch.optim.Muon in both directions.
    Source: Muon: An optimizer for hidden layers in neural networks (Jordan et al., 2024).
    """

    _optional: ClassVar[dict[str, Any]] = {
        "maximize": False,
        "use_muon": True,
        "ns_dtype": "bf16",
        "betas": _ADAMW["betas"],
    }
    _KEPT = (*Optimizer._KEPT, "_adamw")

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: str = "bf16",
        adamw: Mapping[str, Any] | None = None,
        maximize: bool = False,
        **options: Any,
    ) -> None:
        if unknown := sorted((adamw or {}).keys() - _ADAMW.keys()):
            raise ValueError(
                f"Muon: adamw may hold {', '.join(_ADAMW)}, got {', '.join(map(str, unknown))}"
            )
        if options.get("state_dtype") == "int8":
            raise ValueError(
                'Muon: state_dtype must be torch.float32 or torch.bfloat16, got "int8", whose '
                "rounding noise hides the small singular values of the momentum; torch.bfloat16 "
                "also loads states that were saved in 8 bits"
            )
        self._adamw = {**_ADAMW, **(adamw or {})}
        defaults: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        defaults |= {"nesterov": nesterov, "ns_coefficients": ns_coefficients, "eps": eps}
        defaults |= {"ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn, "ns_dtype": ns_dtype}
        defaults |= {"betas": self._adamw["betas"], "use_muon": True, "maximize": maximize}
        super().__init__(params, defaults, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of params: as one group of matrices, one of other params, or both."""
        before = len(self.param_groups)
        try:
            for group in self._by_kind(param_group):
                super().add_param_group(group)
        except Exception:
            del self.param_groups[before:]
            raise

    def _by_kind(self, group: Any) -> list[dict[str, Any]]:
        params = group.get("params") if isinstance(group, dict) else None
        if params is None or isinstance(params, set):
            return [group]  # which is refused
        entries = [params] if isinstance(params, torch.Tensor) else list(params)
        matrices, others = [], entries
        if group.get("use_muon", True):
            matrices = [entry for entry in entries if _is_matrix(entry)]
            others = [entry for entry in entries if not _is_matrix(entry)]
        kinds = []
        if matrices or not others:
            kinds.append({**group, "params": matrices})
        if others:
            kinds.append({**self._adamw, **group, "params": others, "use_muon": False})
        return kinds

    def _check_settings(self, group: dict[str, Any], who: str) -> None:
        super()._check_settings(group, who)
        _settings.check_number(who, "momentum", group["momentum"], limit=1)
        numbers, steps = group["ns_coefficients"], group["ns_steps"]
        if not isinstance(numbers, (tuple, list)) or len(numbers) != 3:
            raise ValueError(f"{who}: ns_coefficients must be three numbers, got {numbers!r}")
        if not isinstance(steps, int) or not 0 <= steps < 100:
            raise ValueError(f"{who}: ns_steps must be an int in [0, 100), got {steps!r}")
        for name, allowed in (
            ("adjust_lr_fn", (None, "original", "match_rms_adamw")),
            ("ns_dtype", ("bf16", "fp8")),
            ("use_muon", (True, False)),
        ):
            if group[name] not in allowed:
                choices = ", ".join(map(repr, allowed))
                raise ValueError(f"{who}: {name} must be one of {choices}, got {group[name]!r}")
        if group["use_muon"] and not all(map(_is_matrix, group.get("params", ()))):
            raise ValueError(f"{who}: use_muon must be False for params that are not 2-D, got True")

    def _moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["use_muon"] else ("exp_avg", "exp_avg_sq")

    def _moments_of(self, saved: dict[str, Any]) -> tuple[str, ...]:
        return self._moments({"use_muon": "exp_avg" not in saved})

    def _update_batches(self, batches: list[Batch], *args: Any) -> None:
        parts = ((part, p) for b in batches for part, p in zip(b.data, b.params, strict=True))
        self._sharded = {id(part): p for part, p in parts if is_sharded(p)}
        super()._update_batches(batches, *args)

    def _op_of(self, group: dict[str, Any]) -> UpdateOp:
        return muon_direction_op if group["use_muon"] else adamw_op

    def _update(
        self, op: UpdateOp, group: dict[str, Any], options: UpdateOptions, *tensors: Any
    ) -> None:
        if op is adamw_op:
            super()._update(op, group, options, *tensors)
            return
        params, grads, buffers, _, masters, steps = tensors
        direction = options._replace(lr=0.0, lr_tensor=None, stochastic_rounding=False)
        update = options._replace(
            settings=(0.0, 0.0, group["weight_decay"], False),
            maximize=False,
            max_value=math.inf,
            inv_scale=None,
            clip=None,
        )
        wholes = [self._sharded.get(id(param), param) for param in params]
        for split, matrices in plan(wholes):
            its = [i for i in matrices if i is not None]
            directions = []
            for i in its:
                one = slice(i, i + 1)
                wide = torch.float64 if params[i].dtype == torch.float64 else torch.float32
                d = torch.zeros_like(params[i], dtype=wide)  # of a skipped step: 0, and not used
                rest = direction._replace(indices=options.indices[one])
                # sgd_ counts the step.
                op([d], grads[one], buffers[one], [], [], steps[one].clone(), *rest)
                directions.append(d)
            compute = partial(_orthogonal, group=group)
            if split is None:
                directions = [_gathered(directions[0], wholes[its[0]], compute)]
            else:
                shapes = [None if i is None else wholes[i].shape for i in matrices]
                directions = compute_on_owners(split, shapes, directions, compute)
            for i, g in zip(its, directions, strict=True):
                one = slice(i, i + 1)
                rest = update._replace(indices=options.indices[one])
                sgd_op(params[one], [g], [], [], masters[one], steps[one], *rest)


def _is_matrix(entry: Any) -> bool:
    """A param, or one with its name."""
    p = entry[-1] if isinstance(entry, tuple) and entry else entry
    return not isinstance(p, torch.Tensor) or p.dim() == 2  # anything else is refused


def _orthogonal(direction: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """The update of a matrix, of its direction."""
    update = orthogonalize(
        direction,
        coefficients=group["ns_coefficients"],
        steps=group["ns_steps"],
        eps=group["eps"],
        dtype=group["ns_dtype"],
    )
    update = update.to(direction.dtype)
    if (ratio := _ratio(group["adjust_lr_fn"], *direction.shape)) != 1.0:
        update *= ratio
    return update


def _gathered(
    part: torch.Tensor, p: Any, compute: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """This rank's part of compute(whole), which every rank computes, of its part of it."""
    if not is_sharded(p):
        return compute(part)
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = p.device_mesh, p.placements
    whole = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=p.shape, stride=p.stride()
    )
    everywhere = [Replicate()] * mesh.ndim
    update = DTensor.from_local(compute(whole.full_tensor()), mesh, everywhere, run_check=False)
    return update.redistribute(placements=placements).to_local()


def _ratio(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """What an update is multiplied by for its size."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns)) if columns else 1.0
