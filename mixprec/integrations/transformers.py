"""transformers: a Trainer that trains in low precision, with FP32 masters and loss scaling."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from .. import _masters
from .._local_gradients import LOW_PRECISION
from ..amp import GradScaler
from ..amp.reader import params_of, unscales_itself
from ..nn import Layer
from ..nn.cast import cast_parameters
from ..nn.convert import convert
from ..ops._dispatch import checks
from ..optim import SGD, AdamW
from ..recipes import Recipe
from ..scaling import update_scales

try:
    import transformers
    from accelerate.utils import recursively_apply
except ImportError as error:
    raise ImportError(
        "mixprec.integrations.transformers needs transformers: pip install transformers accelerate"
    ) from error

from .accelerate import _Optimizer, attach
from .fused_loss import fuse_loss

__all__ = ["Trainer", "fuse_loss"]


class Trainer(transformers.Trainer):
    """transformers.Trainer in low precision.

        Trainer(model=model, args=args, train_dataset=..., recipe="fp8", params=torch.bfloat16)

    It is also a mixin for other trainers: `class LowPrecisionSFT(Trainer, SFTTrainer): pass`.
    Beside their arguments, which are handed on as they are given, it takes:

    recipe: of `mixprec.convert`, a name or a Recipe. None leaves the model as it is.
    overrides: other recipes by path pattern, as in `mixprec.convert`.
    params: the dtype of `mixprec.cast_parameters`, torch.bfloat16 ("bf16") or torch.float16
    ("fp16"), with FP32 masters in the optimizer. None leaves the parameters as they are. Load the
    model in FP32, by from_pretrained(..., dtype=torch.float32): of weights that were loaded in 16
    bits, the masters start with the rounded values, which warns.
    scaler: a mixprec.GradScaler. If None, one is made where a recipe or a parameter is fp16.

    With params, floating-point inputs of the model, such as audio or images, are cast to that
    dtype; labels (args.label_names) are not.

    The optimizer is mixprec.optim's AdamW (or SGD for optim="sgd") with the decay groups and the
    settings of the TrainingArguments; for other options pass optimizer_cls_and_kwargs=
    (mixprec.optim.AdamW, {...}). It unscales, checks and clips to args.max_grad_norm inside its
    step; "grad_norm" in the log is the unscaled norm before clipping. If a gradient is Inf or NaN,
    the step changes nothing and the scheduler stays: asking for that waits for the device once a
    step. Checkpoints hold the masters, the scaler and delayed scales: a resumed run continues bit
    for bit.

    Raises ValueError for arguments that cannot be combined: bf16, fp16, bf16_full_eval,
    fp16_full_eval, deepspeed, fsdp, several GPUs in one process, delayed scales on several ranks
    without ddp_broadcast_buffers=False, an args.optim that mixprec.optim does not have, 16-bit
    parameters with an optimizer that keeps no masters, an optimizer with a clipping limit of its
    own that is not args.max_grad_norm.
    """

    def __init__(
        self,
        *given: Any,
        recipe: Recipe | str | None = None,
        params: torch.dtype | str | None = None,
        scaler: GradScaler | None = None,
        overrides: Mapping[str, Recipe | str | None] | None = None,
        **options: Any,
    ) -> None:
        self._recipe = None if recipe is None else Recipe.parse(recipe)
        if params is not None:
            params = checks.param_dtype("Trainer", "params", params)
        self._params, self._scaler, self._overrides = params, scaler, overrides
        if overrides is not None and recipe is None:
            raise ValueError(f"Trainer: overrides need a recipe, got recipe=None and {overrides}")
        named = dict(zip(_positional(type(self)), given, strict=False)) | options
        if (args := named.get("args")) is not None:
            self._check_arguments(args)  # before the model is changed
        if (model := named.get("model")) is not None:
            low = self._in_low_precision(model)
            given = tuple(low if each is model else each for each in given)
            options = {n: low if each is model else each for n, each in options.items()}
        super().__init__(*given, **options)
        if params is not None and self.optimizer is not None:
            raise ValueError(
                "Trainer: params casts before an optimizer is made, got optimizers=; pass "
                "optimizer_cls_and_kwargs=(mixprec.optim.AdamW, {...}), or cast yourself"
            )

    def _check_arguments(self, args: Any) -> None:
        wrong = ["fp16", "fp16_full_eval", "bf16_full_eval"]
        lowered = self._recipe is not None or self._params is not None
        for name in [*wrong, "bf16"] if lowered else wrong:
            if value := getattr(args, name):
                raise ValueError(
                    f"Trainer: args.{name} must be False, got {value}: recipe and params set the "
                    f"precision, in evaluation too; pass {name}=False to TrainingArguments (or to "
                    "SFTConfig and others of TRL, where bf16 is True by default)"
                )
        if lowered and args.mixed_precision != "no":
            raise ValueError(
                "Trainer: the mixed_precision that accelerate launch sets must be 'no' with recipe "
                f"or params, got {args.mixed_precision!r}"
            )
        if value := args.deepspeed:
            raise ValueError(f"Trainer: args.deepspeed is not supported, got {value!r}")
        if args.fsdp and (number := int(args.fsdp_config.get("version", 2))) != 2:
            raise ValueError(f"Trainer: args.fsdp_config must have version 2, got {number}")
        if args.n_gpu > 1:
            raise ValueError(
                f"Trainer: one process must have one GPU, got {args.n_gpu}: start it with torchrun"
            )
        delayed = self._recipe is not None and self._recipe.is_delayed
        if delayed and args.world_size > 1 and args.ddp_broadcast_buffers is not False:
            raise ValueError(
                "Trainer: args.ddp_broadcast_buffers must be False with delayed scales on several "
                f"ranks, got {args.ddp_broadcast_buffers}"
            )

    def _in_low_precision(self, model: torch.nn.Module) -> torch.nn.Module:
        if self._recipe is not None:
            model = convert(model, self._recipe, overrides=self._overrides)
        if self._params in LOW_PRECISION:
            _warn_if_rounded(model)
        return model if self._params is None else cast_parameters(model, self._params)

    def call_model_init(self, trial: Any = None) -> torch.nn.Module:
        return self._in_low_precision(super().call_model_init(trial))

    def _load_from_checkpoint(self, *args: Any, **options: Any) -> None:
        super()._load_from_checkpoint(*args, **options)
        if self._params is not None:  # peft loads adapters in FP32
            cast_parameters(self.model, self._params)

    def create_accelerator_and_postprocess(self) -> None:
        self._check_arguments(self.args)
        super().create_accelerator_and_postprocess()
        scaler = GradScaler() if self._needs_scaler() else self._scaler
        attach(self.accelerator, scaler)
        if self.args.fsdp and not self.accelerator.is_fsdp2:
            raise ValueError(
                "Trainer: args.fsdp must be None where Accelerate does not shard, as on a CPU, got "
                f"{self.args.fsdp!r} and {self.accelerator.distributed_type.value}"
            )

    def _needs_scaler(self) -> bool:
        if self._scaler is not None:
            return False
        overrides = (Recipe.parse(r) for r in (self._overrides or {}).values() if r is not None)
        recipes, dtypes = [self._recipe, *overrides], {self._params}
        if self.model is not None:  # else model_init makes it later
            recipes += [m.recipe for m in self.model.modules() if isinstance(m, Layer)]
            dtypes |= {p.dtype for p in self.model.parameters()}
        return torch.float16 in dtypes or any(r and r.needs_loss_scaling for r in recipes)

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)
        if self._params in LOW_PRECISION and isinstance(inputs, MutableMapping):
            model: Any = getattr(self.model, "get_base_model", lambda: self.model)()  # of peft
            kind: Any = type(model)
            for name in _arguments(kind).intersection(inputs).difference(self.label_names):
                inputs[name] = recursively_apply(
                    lambda x: x.to(self._params), inputs[name], test_type=_is_floating
                )
        return inputs

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> AbstractContextManager[Any]:
        if self._params in LOW_PRECISION and self.args.device.type == "cuda":
            # For layer norms: those of CUDA want x in the dtype of their weights, which are FP32.
            return torch.autocast("cuda", dtype=self._params, cache_enabled=bool(cache_enabled))
        return super().autocast_smart_context_manager(cache_enabled)

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        hint = "pass optimizer_cls_and_kwargs=(mixprec.optim.AdamW, {...})"
        if args.optim_args:
            raise ValueError(
                f"Trainer: args.optim_args must be None, got {args.optim_args!r}; {hint}"
            )
        if args.optim in ("adamw_torch", "adamw_torch_fused"):
            betas = (args.adam_beta1, args.adam_beta2)
            return AdamW, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}
        if args.optim == "sgd":
            return SGD, {"lr": args.learning_rate}
        raise ValueError(
            "Trainer: args.optim must be 'adamw_torch', 'adamw_torch_fused' or 'sgd', got "
            f"{getattr(args.optim, 'value', args.optim)!r}; {hint}"
        )

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(model)
        inner = getattr(optimizer, "optimizer", optimizer)  # prepared by an earlier train()
        low = {p.dtype for p in params_of(inner)}.intersection(LOW_PRECISION)
        if low and not unscales_itself(inner):
            raise ValueError(
                "Trainer: the optimizer must be of mixprec.optim, which keeps masters of "
                f"{low.pop()} parameters, got {type(inner).__module__}.{type(inner).__name__}"
            )
        return optimizer

    # Clipping is left to the step, which reads the gradients anyway; the norm is known after it.

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        if isinstance(self.optimizer, _Optimizer):
            return None
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        if self.args.world_size > 1:
            update_scales(self.model, torch.distributed.group.WORLD)  # delayed ones, of all ranks
        if not isinstance(self.optimizer, _Optimizer):
            return super()._get_grad_norm(model, grad_norm=grad_norm)
        limit = self.args.max_grad_norm
        if limit <= 0:  # no clipping, but the norm is logged
            limit = torch.inf
        self.optimizer.limit_next_step("Trainer", "max_grad_norm", limit)
        return None

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kw: Any) -> None:
        if isinstance(self.optimizer, _Optimizer) and self.control.should_log:
            grad_norm = self.optimizer.optimizer.grad_norm
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kw)


def _positional(kind: type) -> list[str]:
    """The names of the positional arguments of the trainer behind ours, beyond those that hand all
    on by *args."""
    mro = kind.__mro__
    for behind in mro[mro.index(Trainer) + 1 :]:
        parameters = inspect.signature(behind.__init__).parameters.values()  # type: ignore[misc]
        names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
        if names or all(p.kind is not p.VAR_POSITIONAL for p in parameters):
            return names
    return []


@functools.cache
def _arguments(kind: Any) -> frozenset[str]:
    """Of the forward pass."""
    return frozenset(inspect.signature(kind.forward).parameters)


def _is_floating(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _warn_if_rounded(model: torch.nn.Module) -> None:
    """Where params that are trained have 16 bits before the cast, which has nothing to keep."""
    trained = [p for p in model.parameters() if p.requires_grad]
    _masters.attach()
    low = [p for p in trained if p.dtype in LOW_PRECISION and not _masters.known(p)]
    if low:
        warnings.warn(
            f"Trainer: {len(low)} of {len(trained)} trained parameters are in {low[0].dtype} "
            "already, so that their FP32 masters start with rounded values. Load the model with "
            "from_pretrained(..., dtype=torch.float32)",
            stacklevel=2,
        )
