"""Masters: FP32 masters, unscaling, clipping and skipping around an optimizer of any class."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT
from torch.utils._pytree import tree_map

from .._local_gradients import LOW_PRECISION, gradient_of, local, placed_like
from ..ops._dispatch.optimizer_update import unscaled
from ._base import Optimizer
from ._batches import Batch, on_device
from ._state import Policy, checked

if TYPE_CHECKING:
    import torch.distributed as dist


# Classes whose states hold tensors of the param's shape, or of one element.
_OF_PARAMS = {
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW),
    *(torch.optim.Adamax, torch.optim.ASGD, torch.optim.Muon, torch.optim.NAdam),
    *(torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD),
}


class Masters(Optimizer):
    """An optimizer of another class, with FP32 masters of 16-bit params.

        optimizer = mixprec.optim.Masters(torch.optim.Adafactor, params, max_grad_norm=1.0)

    Each step unscales and clips the gradients in FP32, has an optimizer of class `kind` update the
    masters with them, and rounds these to the params; a param that is not 16 bits wide is updated
    itself. Where params are 16 bits wide or the loss is scaled, a step whose gradients hold Inf or
    NaN changes nothing, and `kind` does not see it. For this the host waits for the device once a
    step; the other optimizers of this module do not.

    kind: a subclass of torch.optim.Optimizer whose step needs no closure. params: tensors, named
    tensors or groups, as for `kind`. options: the settings of `kind`, such as lr; LR schedulers
    change them in the groups, as usual. grad_dtype, max_grad_norm, max_grad_value, process_group:
    as for `AdamW`. state[param]: what `kind` keeps, and `master` where the param is 16 bits wide;
    state dicts of `kind` without masters can be loaded.

    TypeError for a class that cannot be used. Errors about options and params are those of `kind`.
    """

    _optional: ClassVar[dict[str, Any]] = {}
    _moment_names = ()  # of ours
    _group_options = ()
    _KEPT = (*Optimizer._KEPT, "_kind", "_options")

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        params: ParamsT,
        *,
        grad_dtype: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        process_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        _check_kind(kind)
        if options.pop("release_gradients", False):
            raise TypeError(
                f"Masters: release_gradients must be False, got True: {kind.__name__} updates all "
                "params in one step"
            )
        self._kind, self._options = kind, options
        given: Any = params if isinstance(params, torch.Tensor) else list(params)
        ours = {
            "master_weights": "fp32",
            "grad_dtype": grad_dtype,
            "max_grad_norm": max_grad_norm,
            "max_grad_value": max_grad_value,
            "process_group": process_group,
        }
        super().__init__(given, kind(given, **options).defaults, ours)  # `kind` checks both

    def __repr__(self) -> str:
        name = type(self).__name__
        return super().__repr__().replace(name, f"{name} of {self._kind.__name__}", 1)

    def _check_settings(self, group: dict[str, Any], who: str) -> None:
        """`kind` checks them."""

    def _forget(self) -> None:
        who, number = type(self).__name__, self._policy.number
        self._policy = self._wide = _Wide(who, number, "fp32", torch.float32, False)
        self._inner: torch.optim.Optimizer | None = None
        super()._forget()

    def _update_batches(
        self,
        batches: list[Batch],
        unscale: torch.Tensor | None,
        clips: dict[int, torch.Tensor],
        found_inf: torch.Tensor | None,
    ) -> None:
        if self.last_step_skipped:
            return
        inner = self._inner_optimizer()
        params = [p for batch in batches for p in batch.params]
        wide = [self._wide.tensors[p] for p in params]
        for batch in batches:
            for p in batch.params:
                factors = [on_device(batch.device, f) for f in (unscale, clips.get(batch.group))]
                self._wide.tensors[p].grad = self._gradient(p, factors)
        inner.step()
        self.state.update(_not_of_params(inner.state))
        for group, its in zip(self.param_groups, inner.param_groups, strict=True):
            group.update(_settings_of(its))
        for p, tensor in zip(params, wide, strict=True):
            tensor.grad = None
            state = self.state[p] = inner.state[tensor]
            if p.dtype in LOW_PRECISION:
                state["master"] = tensor
                local(p).copy_(local(tensor))

    def _gradient(self, p: torch.Tensor, factors: list[torch.Tensor | None]) -> torch.Tensor:
        """grad * inv_scale * clip, bounded by +-max_grad_value, in the dtype of what is updated."""
        grad = gradient_of(p)
        assert grad is not None, "a batch holds params that have one"
        wide = self._wide.tensors[p].dtype
        grad = placed_like(grad.detach(), p).to(wide, copy=True)
        limit = math.inf if self.max_grad_value is None else self.max_grad_value
        local(grad).copy_(unscaled(local(grad), wide, factors, limit))
        return grad

    def _inner_optimizer(self) -> torch.optim.Optimizer:
        """The other optimizer, with the current settings; a new one where what it updates changed:
        at the first step, after loading, for new params and replaced storage."""
        tensors = self._wide.tensors
        lists = [[tensors[p] for p in g["params"] if p in tensors] for g in self.param_groups]
        settings = list(map(_settings_of, self.param_groups))
        inner = self._inner
        old = [] if inner is None else [list(map(id, g["params"])) for g in inner.param_groups]
        if inner is None or old != [list(map(id, params)) for params in lists]:
            groups = [{**s, "params": ps} for s, ps in zip(settings, lists, strict=True)]
            inner = self._inner = self._kind(groups, **self._options)
        for p, tensor in tensors.items():  # other code may have replaced or cleared it
            if self.state.get(p, {}).keys() - {"master"}:
                inner.state[tensor] = self.state[p]
            else:  # it is for `kind` to create
                inner.state.pop(tensor, None)
        for key in _not_of_params(inner.state).keys() - self.state.keys():
            del inner.state[key]
        inner.state.update(_not_of_params(self.state))
        for its, current in zip(inner.param_groups, settings, strict=True):
            its.update(current)
        return inner

    def _restore(
        self, who: str, p: torch.Tensor, saved: dict[str, Any], group: dict[str, Any]
    ) -> dict[str, Any]:
        # As in torch: a step that the host reads stays where it is.
        is_on_host = not (group.get("fused") or group.get("capturable"))

        def restored(name: str, value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return copy.deepcopy(value)
            stays = name == "step" and is_on_host
            return value.detach().to(value.device if stays else p.device, copy=True)

        state = {k: tree_map(partial(restored, k), v) for k, v in saved.items()}
        for key, t in state.items() if self._kind in _OF_PARAMS else ():
            if isinstance(t, torch.Tensor) and t.numel() > 1 and t.shape != p.shape:
                got = tuple(t.shape)
                raise ValueError(
                    f"{who}: {key} must be a tensor of shape {tuple(p.shape)}, got {got}"
                )
        if "master" in saved:
            if p.dtype not in (*LOW_PRECISION, torch.float32):
                raise ValueError(f"{who}: the state holds a master, and its param is in {p.dtype}")
            state["master"] = checked(who, "master", p, saved["master"], torch.float32)
        return state


@dataclass(frozen=True)
class _Wide(Policy):
    """What the other optimizer updates, by param: the master of a 16-bit one, else the param
    itself as another tensor over its memory, which has a `grad` of its own."""

    tensors: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)

    def prepare(self, param: torch.Tensor, state: dict[str, Any], moments: tuple[str, ...]) -> None:
        self.claim(param, state)
        known = self.tensors.get(param)
        if self.master(param) is None:
            if known is None or local(known).data_ptr() != local(param).data_ptr():
                self.tensors[param] = param.detach()
            return
        self.tensors[param] = state["master"]

    def create(self, param: torch.Tensor, state: dict[str, Any], moments: tuple[str, ...]) -> None:
        """`kind` does."""

    def __reduce__(self) -> tuple[Any, ...]:
        fields = self.who, self.number, self.master_weights, self.state_dtype
        return _Wide, (*fields, self.stochastic_rounding)


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _not_of_params(state: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}


def _check_kind(kind: Any) -> None:
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise TypeError(f"Masters: kind must be a class of optimizers, got {kind!r}")
    if issubclass(kind, Optimizer):
        raise TypeError(
            f"Masters: mixprec.optim.{kind.__name__} keeps masters itself: use it alone"
        )
    arguments = [*inspect.signature(kind.step).parameters.values()][1:]
    if any(a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD for a in arguments):
        raise TypeError(
            f"Masters: the step of {kind.__name__} needs a closure, which is not scaled"
        )
