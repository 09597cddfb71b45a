"""Lightning: one precision plugin for the Trainer and for Fabric."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

from .. import scaling
from .._local_gradients import LOW_PRECISION
from ..amp.grad_scaler import GradScaler
from ..amp.reader import unscales_itself
from ..nn.cast import cast_parameters
from ..nn.convert import ModuleFilter, convert
from ..ops._dispatch import checks
from ..recipes import Recipe

try:
    from lightning.fabric.utilities.apply_func import apply_to_collection
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.utilities import GradClipAlgorithmType
except ImportError as error:
    raise ImportError(
        "mixprec.integrations.lightning needs the package lightning, which cannot be imported "
        f"({error}): pip install lightning"
    ) from error

__all__ = ["MixprecPrecision"]


class MixprecPrecision(Precision):
    """Trains a model with a recipe: `Trainer(plugins=MixprecPrecision("fp8"))` or `Fabric(...)`.

    recipe: what `mixprec.convert` runs the layers with, a name or a Recipe; None leaves them as
    they are. module_filter_fn and overrides are passed to `convert`. params: the dtype that
    `mixprec.cast_parameters` casts the parameters to, or a word for it ("bf16"); None leaves them.
    scaler: a GradScaler; None for a new one where params or a recipe is fp16, and for no loss
    scaling otherwise.

    With 16-bit params, cast_inputs casts floating-point inputs to that dtype (in Fabric those of
    the model, in the Trainer the whole batch, targets included) and, in Fabric, outputs to FP32.

    The optimizer clips inside its step: the Trainer's gradient_clip_val becomes its max_grad_norm
    or max_grad_value. A skipped step leaves the schedulers that the Trainer steps after each batch
    where they are; in your own loop ask `optimizer.last_step_skipped`. Hooks that run before the
    step see gradients that are still scaled.

    The Trainer's checkpoints hold the scaler and delayed scales, the latter apart from the model's
    state dict, which stays that of the unconverted module. In Fabric save the plugin beside the
    model and the optimizer: `fabric.save(path, {"model": ..., "precision": plugin})`.

    ValueError for an unknown recipe or dtype and, at the first step, for an optimizer that is not
    mixprec's where params have 16 bits or the loss is scaled, or for clipping by both the optimizer
    and the Trainer or Fabric. TypeError for another scaler.
    """

    def __init__(
        self,
        recipe: Recipe | str | None = "fp8",
        *,
        params: torch.dtype | str | None = None,
        scaler: GradScaler | None = None,
        module_filter_fn: ModuleFilter | None = None,
        overrides: Mapping[str, Recipe | str | None] | None = None,
        cast_inputs: bool = True,
    ) -> None:
        who = type(self).__name__
        self.recipe = None if recipe is None else Recipe.parse(recipe)
        if self.recipe is None and (module_filter_fn is not None or overrides):
            raise ValueError(
                f"{who}: module_filter_fn and overrides must come with a recipe, got recipe=None"
            )
        if params is not None:
            params = checks.param_dtype(who, "params", params)
        if scaler is not None and not isinstance(scaler, GradScaler):
            kind = type(scaler)
            raise TypeError(
                f"{who}: scaler must be a mixprec.GradScaler or None, got "
                f"{kind.__module__}.{kind.__qualname__}"
            )
        recipes = [self.recipe, *(overrides or {}).values()]
        parsed = [Recipe.parse(each) for each in recipes if each is not None]
        fp16 = params == torch.float16 or any(each.needs_loss_scaling for each in parsed)
        self.scaler = GradScaler() if scaler is None and fp16 else scaler
        self.params, self._options = params, (module_filter_fn, overrides)
        self._cast_to = params if cast_inputs and params in LOW_PRECISION else None
        self.precision = {torch.bfloat16: "bf16-true", torch.float16: "16-true"}.get(
            params,  # type: ignore[arg-type]
            "32-true",
        )
        self._module: nn.Module | None = None
        self._in_trainer = False
        self._limits: list[tuple[Any, str]] = []  # clipping of this step, by optimizer

    def __repr__(self) -> str:
        recipe = None if self.recipe is None else self.recipe.name
        scaler = "" if self.scaler is None else ", scaler=GradScaler"
        return f"{type(self).__name__}({recipe!r}, params={self.params}{scaler})"

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the layers and cast the parameters, in place."""
        if self.recipe is not None:
            module = convert(module, self.recipe, *self._options)
        if self.params is not None:
            module = cast_parameters(module, self.params)
        self._module = module
        return module

    def connect(
        self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Any], list[Any]]:
        """Called by the Trainer only, after the conversion."""
        self._in_trainer = True
        for layer in self._delayed().values():
            if _without_scales not in layer._state_dict_hooks.values():
                layer.register_state_dict_post_hook(_without_scales)
        if lr_schedulers and self._module is not None:
            # The one place where the Trainer can be told not to step a scheduler.
            self._module.lr_scheduler_step = MethodType(  # type: ignore[assignment]
                lr_scheduler_step, self._module
            )
        return model, optimizers, lr_schedulers

    def _delayed(self) -> dict[str, nn.Module]:
        """The layers with delayed scales, by name."""
        modules = () if self._module is None else self._module.named_modules()
        return {name: module for name, module in modules if scaling.has_state(module)}

    def _check(self, optimizer: Any) -> None:
        needed = self.params in LOW_PRECISION or self.scaler is not None
        if needed and not unscales_itself(optimizer):
            kind = type(optimizer)
            raise ValueError(
                f"{self!r}: the optimizer must be one of mixprec.optim, which keeps FP32 masters "
                "of 16-bit parameters and unscales their gradients in FP32, got "
                f"{kind.__module__}.{kind.__qualname__}"
            )

    def convert_input(self, data: Any) -> Any:
        return data if self._cast_to is None else _cast(data, self._cast_to)

    def convert_output(self, data: Any) -> Any:
        return data if self._cast_to is None else _cast(data, torch.get_default_dtype())

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> Any:
        return super().pre_backward(tensor, module) if self._in_trainer else None

    def backward(self, tensor: torch.Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Scale the loss, and run the backward pass."""
        if self.scaler is not None:
            tensor = self.scaler.scale(tensor)
        if self._in_trainer:
            super().backward(tensor, model, *args, **kwargs)
        else:
            tensor.backward(*args, **kwargs)

    def post_backward(self, tensor: torch.Tensor, module: Any) -> Any:
        return super().post_backward(tensor, module) if self._in_trainer else None

    def optimizer_step(
        self,
        optimizer: Any,
        model: Any = None,
        closure: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the closure, if given, and step: unscale, clip and update, or skip."""
        self._check(optimizer)
        if not self._in_trainer:
            return self._step(optimizer, **kwargs, **({"closure": closure} if closure else {}))
        try:
            if self.scaler is None or closure is None:
                return super().optimizer_step(optimizer, model, closure, **kwargs)
            result = closure()
            self._after_closure(model, optimizer)
            if result is None and model.automatic_optimization:
                return None  # training_step returned None: there are no gradients
            return self._step(optimizer, **kwargs)
        finally:
            for limited, name in self._limits:
                setattr(limited, name, None)
            self._limits.clear()

    def _step(self, optimizer: Any, **kwargs: Any) -> Any:
        if self.scaler is None:
            return optimizer.step(**kwargs)
        result = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return result

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: float = 0.0,
        gradient_clip_algorithm: Any = GradClipAlgorithmType.NORM,
    ) -> None:
        """Let the optimizer clip in its next step. Called by the Trainer."""
        if isinstance(optimizer, LightningOptimizer):  # in manual optimization
            optimizer = optimizer.optimizer
        if not unscales_itself(optimizer):
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)
        elif clip_val > 0:
            by_value = gradient_clip_algorithm == GradClipAlgorithmType.VALUE
            name = "max_grad_value" if by_value else "max_grad_norm"
            if (optimizer, name) not in self._limits:
                _clips_once(optimizer, f"gradient_clip_val={clip_val}")
                self._limits.append((optimizer, name))
            setattr(optimizer, name, float(clip_val))

    def unscale_gradients(self, optimizer: Any) -> None:
        """Called by Fabric before it clips."""
        if unscales_itself(optimizer):
            _clips_once(optimizer, "fabric.clip_gradients")
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state and, in the Trainer, the delayed scales of each layer."""
        state: dict[str, Any] = {}
        if self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        if self._in_trainer and (delayed := self._delayed()):
            state["scales"] = {
                name: {key: layer._buffers[key].clone() for key in scaling.BUFFERS}  # type: ignore[union-attr]
                for name, layer in delayed.items()
            }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what a run with the same settings has saved; what it lacks starts anew."""
        if self.scaler is not None and "scaler" in state_dict:
            self.scaler.load_state_dict(state_dict["scaler"])
        saved = state_dict.get("scales", {})
        for name, layer in self._delayed().items():
            if name in saved:
                layer.load_state_dict(saved[name], strict=False)


def _cast(data: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return apply_to_collection(data, torch.Tensor, cast)


def _clips_once(optimizer: Any, other: str) -> None:
    for name in ("max_grad_norm", "max_grad_value"):
        if (limit := getattr(optimizer, name, None)) is not None:
            raise ValueError(
                f"MixprecPrecision: gradients must be clipped once, got {other} and an optimizer "
                f"with {name}={limit}: remove one of them"
            )


def _without_scales(
    layer: nn.Module, state_dict: dict[str, Any], prefix: str, *unused: Any
) -> None:
    """A hook of state_dict(). The Trainer loads it before the module is converted, when there is
    no place for scales."""
    for name in scaling.BUFFERS:
        state_dict.pop(prefix + name, None)


def lr_scheduler_step(module: Any, scheduler: Any, metric: Any) -> None:
    """LightningModule.lr_scheduler_step, except where a scheduler follows an optimizer that has
    just skipped its step. (Named like the method for pickle.)"""
    configs = module.trainer.lr_scheduler_configs
    each_step = any(c.scheduler is scheduler and c.interval == "step" for c in configs)
    if not (each_step and getattr(scheduler.optimizer, "last_step_skipped", False)):
        type(module).lr_scheduler_step(module, scheduler, metric)
