"""What a saved tensor is, by the op that saves it, and how few bits it bears."""

from __future__ import annotations

import torch

from .running import Op, in_compiled_code

__all__ = ["KINDS", "bits_for", "is_statistic", "is_weight", "kind_of"]

KINDS: dict[str, tuple[str, ...]] = {
    "linear": (
        *("linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d"),
        *("conv_transpose2d", "conv_transpose3d", "grouped_mm"),
    ),
    # Products of two activations are those of attention, where softmax amplifies errors.
    "attention": (
        *("attention", "scaled_dot_product_attention", "multi_head_attention_forward", "softmax"),
        *("matmul", "rmatmul", "mm", "bmm", "addmm", "baddbmm", "einsum"),
    ),
    "activation": (
        *("gelu", "relu", "silu", "mish", "elu", "celu", "selu", "leaky_relu", "prelu", "relu6"),
        *("hardswish", "hardsigmoid", "hardtanh", "softplus", "sigmoid", "tanh", "logsigmoid"),
        *("glu", "dropout", "mul", "rmul", "mlp"),
    ),
    "norm": (
        *("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "norm_linear"),
    ),
    "loss": (
        *("cross_entropy", "nll_loss", "log_softmax", "mse_loss", "l1_loss", "smooth_l1_loss"),
        *("huber_loss", "kl_div", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
        *("ctc_loss", "cosine_embedding_loss", "triplet_margin_loss", "poisson_nll_loss"),
        *("gaussian_nll_loss", "soft_margin_loss", "margin_ranking_loss"),
    ),
    # Their backward is linear in what they save, or reads only its shape.
    "other": (
        *("square", "pow", "addcmul", "lerp", "outer", "dot", "mv", "addmv", "addbmm"),
        *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"),
    ),
}
# Backward compares what these save with a number: 4 bits would take small values for it.
_COMPARED = frozenset(
    ("relu", "leaky_relu", "prelu", "relu6", "hardswish", "hardsigmoid", "hardtanh")
)
_KIND = {name: kind for kind, names in KINDS.items() for name in names}
# Of the modes "int8" and "int4". Measured with examples/train_gpt.py: with every tensor in 4 bits
# the GPT does not train; with those of attention in 8 bits and losses as they are it does. What ops
# without a kind save is kept: their backward may divide by it, take its exponential or inverse, or
# compare it with a result, and groups with one step bound no relative error and keep no ties.
_BITS = {
    8: {"linear": 8, "attention": 8, "activation": 8, "norm": 8, "other": 8},
    4: {"linear": 4, "attention": 8, "activation": 4, "norm": 4, "other": 8},
}


def kind_of(op: Op | None) -> str:
    return "other" if op is None else _KIND.get(op.name, "other")


def bits_for(t: torch.Tensor, op: Op | None, mode: int) -> int | None:
    """The bits for t, a floating tensor saved by `op`; None to keep it as it is."""
    if op is None:  # statistics, which are FP32, cannot be told from activations
        kept = t.dtype == torch.float32 or in_compiled_code()
        return None if kept else _BITS[mode]["other"]
    kind = _KIND.get(op.name)
    if kind is None or is_statistic(t, op) or _is_mask(t, op) or _is_power_below_1(op):
        return None
    bits = _BITS[mode].get(kind)
    return 8 if bits and op.name in _COMPARED else bits


def _is_power_below_1(op: Op) -> bool:
    """x.pow(2) saves x; a power below 1 divides by it."""
    exponent = op.argument(1, "exponent")
    return op.name == "pow" and not (isinstance(exponent, (int, float)) and exponent >= 1)


def is_statistic(t: torch.Tensor, op: Op) -> bool:
    """Whether t is far smaller than the op's inputs: logsumexp, mean, rstd, scales of rows."""
    largest = max((a.numel() for a in op.tensors() if a.is_floating_point()), default=0)
    return t.numel() * 8 <= largest


def _is_mask(t: torch.Tensor, op: Op) -> bool:
    """Whether t [..., T, S] may be attention's additive mask, where -inf is a value."""
    if op.name == "scaled_dot_product_attention":
        masks, keys = [op.argument(3, "attn_mask")], op.argument(1, "key").shape[-2]
    elif op.name == "multi_head_attention_forward":
        masks = [op.kwargs.get("attn_mask"), op.kwargs.get("key_padding_mask")]
        keys = op.argument(1, "key").shape[0]
    else:
        return False
    return any(mask is not None for mask in masks) and t.shape[-1] == keys


_VIEWS_AND_CASTS = frozenset(
    f"{name}Backward0"
    for name in (
        *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "ToCopy", "Expand"),
        *("Select", "Slice", "Split", "Unsqueeze", "Squeeze", "Alias", "Clone", "Unbind"),
    )
)


def is_weight(t: torch.Tensor, op: Op | None) -> bool:
    """Whether t is a leaf that requires a gradient, a parameter, or a view or cast of one."""
    base = t if t._base is None else t._base
    if isinstance(base, torch.nn.Parameter) or (op and any(t is kept for kept in op.as_is)):
        return True
    if base.is_leaf and base.requires_grad:
        return True
    node = t.grad_fn
    while node is not None and type(node).__name__ in _VIEWS_AND_CASTS:
        node = node.next_functions[0][0]
    if type(node).__name__ == "AccumulateGrad":
        return True
    # A frozen weight under torch.autocast: a copy without a history.
    if kind_of(op) != "linear" or op is None or t is op.args[0]:
        return False
    weight = op.argument(1, "weight")
    frozen = isinstance(weight, torch.Tensor) and not weight.requires_grad
    return frozen and tuple(t.shape) in (tuple(weight.shape), tuple(weight.shape[::-1]))
