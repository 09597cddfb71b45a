"""LinearCrossEntropy: a head and its loss, without the logits in memory."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from ..functional._linear_cross_entropy import Loss, cross_entropy, run_linear_cross_entropy
from ..functional._tensor_parallel import is_sharded
from ..recipes import Recipe
from ._fused import why_not_fused
from .autocast import recipe_here, without_modes
from .linear import Linear


class LinearCrossEntropy(nn.Module):
    """The cross entropy of linear(x) and target, whose logits are never all stored.

    in_features: K; num_classes: V. The child `linear` is a `mixprec.nn.Linear`, whose weight may be
    that of an embedding: `head.linear.weight = embedding.weight`. forward(x [..., K], target [...])
    returns the loss; `head.linear(x)` the logits, for sampling. Formula, other arguments, dtypes
    and errors: `mixprec.functional.linear_cross_entropy`. The loss is torch's, of all logits, where
    layers compute as torch's (`mixprec.autocast(enabled=False)`, `mixprec.unconvert`) and where
    `linear` has hooks, delayed scales or clip_activations, or is of another class.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        recipe: Recipe | str = "bf16",
    ) -> None:
        super().__init__()
        self.linear = Linear(in_features, num_classes, bias, device, dtype, recipe=recipe)
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.z_loss, self.softcap = label_smoothing, z_loss, softcap

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        cap = 0.0 if self.softcap is None else self.softcap
        how = Loss(self.ignore_index, self.reduction, self.label_smoothing, self.z_loss, cap)
        return head_loss(self.linear, input, target, how)

    def extra_repr(self) -> str:
        return f"reduction={self.reduction}, softcap={self.softcap}, z_loss={self.z_loss}"


def head_loss(layer: Linear, x: torch.Tensor, target: torch.Tensor, how: Loss) -> torch.Tensor:
    """The loss of layer(x), whose logits are stored only where they have to be."""
    recipe = None
    if why_not_fused([layer]) is None and not _has_any_global_hook():
        recipe = recipe_here(layer.recipe)
    if recipe is None or recipe.is_delayed:
        logits, classes = layer(x), layer.weight.shape[0]
        logits = logits.full_tensor() if is_sharded(logits) else logits
        if is_sharded(layer.weight) and logits.shape[-1] != classes:
            raise ValueError(
                f"LinearCrossEntropy: logits must be of all {classes} classes, got the "
                f"{logits.shape[-1]} of one rank: use "
                "ColwiseParallel(output_layouts=Replicate()) for its linear layer"
            )
        return cross_entropy(logits, target, how)
    with without_modes():
        return run_linear_cross_entropy(
            x, layer.weight, target, layer.bias, recipe, how, layer._path
        )
