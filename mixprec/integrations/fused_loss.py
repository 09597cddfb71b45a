"""The loss of causal language models of transformers without their logits in memory."""

from __future__ import annotations

import functools
import inspect
from dataclasses import fields
from types import FunctionType
from typing import Any

import torch
from transformers.loss import loss_utils
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..functional._linear_cross_entropy import Loss
from ..nn._content import content_of, undecorated
from ..nn._scope import RENAMES
from ..nn.linear import Linear
from ..nn.linear_cross_entropy import head_loss

# The contents of forward passes whose logits are lm_head(model(...).last_hidden_state), all of
# which go to loss_function with the labels, and nowhere else but into the output: of classes of
# transformers 5.24, and of 5.23.
_FORWARDS = ("079347216da69ac5", "5ef728a2081d38b1")
# That of a wrapper, which makes the output a tuple if return_dict is False.
_CAN_RETURN_TUPLE = "a340b410263a2b13"
_FIELDS = {field.name for field in fields(CausalLMOutputWithPast)} - {"loss", "logits"}
_CROSS_ENTROPY = loss_utils.fixed_cross_entropy
_FUSED: set[type] = set()


def fuse_loss(model: Any) -> Any:
    """Let the training loss of a causal language model of transformers be that of
    `mixprec.functional.linear_cross_entropy`; return the model, which is changed in place.

        model = mixprec.integrations.transformers.fuse_loss(mixprec.convert(model, "bf16"))
        loss = model(input_ids=tokens, labels=tokens).loss

    In training mode, with `labels`, the output then has no logits (`logits` is None), so that they
    are never all in memory, and no cache. In evaluation, for generation, without labels, and with
    `logits_to_keep`, `return_dict=False`, `use_cache=True`, a cache, a `loss_function` or a head of
    your own, nothing changes. The recipe is that of `lm_head`, a `mixprec.nn.Linear`; the loss is
    of the logits in FP32, where the model rounds them to 16 bits. Not for trainers that read logits
    in training, such as TRL's SFTTrainer.

    TypeError for a model whose class is not known to compute its loss so (Llama, Mistral, Qwen,
    Phi, OLMo and others are, by the content of their forward pass), and for one whose head
    `mixprec.convert` has not converted.
    """
    kind: Any = type(model)
    if kind in _FUSED:
        return model
    if not _is_known(kind):
        raise TypeError(
            "fuse_loss: model must be a causal language model that is known here, such as "
            f"LlamaForCausalLM of transformers, got {kind.__name__}"
        )
    if not isinstance(model.lm_head, Linear):
        raise TypeError(
            "fuse_loss: model.lm_head must be a mixprec.nn.Linear, got "
            f"{type(model.lm_head).__name__}: call mixprec.convert first"
        )
    model.__class__ = _fused(kind)
    return model


@functools.cache
def _fused(kind: Any) -> type:
    """The class with a fused loss. It has the same name, which transformers saves with a model."""
    original = kind.forward
    parameters = list(inspect.signature(original).parameters)[1:-1]

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**kwargs, **dict(zip(parameters, args, strict=False))}
        labels = given.pop("labels", None)
        if labels is None or kind.forward is not original or not _is_plain(self, given):
            return kind.forward(self, *args, **kwargs)
        if "use_cache" in parameters:  # the config's default would make one that nothing reads
            given["use_cache"] = False
        outputs = self.model(**given)
        loss = _loss(self.lm_head, outputs.last_hidden_state, labels, **given)
        rest = {name: value for name, value in outputs.items() if name in _FIELDS}
        return CausalLMOutputWithPast(loss=loss, logits=None, **rest)

    def reduce_ex(self: Any, protocol: Any) -> Any:
        """Pickled as the class that it was made of, which has its name, and fused again."""
        reduced: Any = object.__reduce_ex__(self, 2)
        return _unpickled, (kind,), *reduced[2:]

    members = {"forward": forward, "__module__": kind.__module__, "__reduce_ex__": reduce_ex}
    fused = type(kind.__name__, (kind,), members)
    _FUSED.add(fused)
    return fused


def _unpickled(kind: Any) -> Any:
    fused: Any = _fused(kind)
    return fused.__new__(fused)


def _is_plain(model: Any, given: dict[str, Any]) -> bool:
    """Whether the loss of these arguments is all that is needed. Takes those from `given` that are
    not for the model's body."""
    keep, returns_dict = given.pop("logits_to_keep", 0), given.pop("return_dict", None)
    return (
        model.training
        and isinstance(keep, int)
        and keep == 0
        and (model.config.return_dict if returns_dict is None else returns_dict)
        and not given.get("use_cache")
        and all(given.get(name) is None for name in ("cache", "past_key_values"))
        and model.loss_function is ForCausalLMLoss
        and loss_utils.fixed_cross_entropy is _CROSS_ENTROPY
        and isinstance(model.lm_head, Linear)
        and model.config.vocab_size == model.lm_head.out_features
    )


def _loss(
    head: Linear,
    x: torch.Tensor,
    labels: torch.Tensor,
    *,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """That of ForCausalLMLoss."""
    if shift_labels is None:
        labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)
        shift_labels = labels[..., 1:].contiguous()
    reduction = "mean" if num_items_in_batch is None else "sum"
    x, target = x.reshape(-1, x.shape[-1]), shift_labels.reshape(-1).to(x.device)
    loss = head_loss(head, x, target, Loss(ignore_index, reduction, 0.0, 0.0, 0.0))
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def _is_known(kind: Any) -> bool:
    """Whether the class itself defines a forward pass of these contents."""
    forward = vars(kind).get("forward")
    function, _ = undecorated(forward, {RENAMES, _CAN_RETURN_TUPLE})
    return isinstance(function, FunctionType) and content_of(function).digest in _FORWARDS
