"""What a saved tensor is, by the op that saves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import _originals
from .running import Op

KINDS: dict[str, tuple[str, ...]] = {
    "linear": (
        *("linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d"),
        *("conv_transpose2d", "conv_transpose3d", "grouped_mm", "grouped_linear"),
    ),
    # Products of two activations are those of attention, where softmax amplifies errors.
    "attention": (
        *("attention", "scaled_dot_product_attention", "softmax"),
        *("scores", "attended", "attended_remainder"),
        *("matmul", "rmatmul", "mm", "bmm", "addmm", "baddbmm", "einsum"),
    ),
    "activation": (
        *("gelu", "relu", "silu", "mish", "elu", "celu", "selu", "leaky_relu", "prelu", "relu6"),
        *("hardswish", "hardsigmoid", "hardtanh", "softplus", "sigmoid", "tanh", "threshold"),
        *("glu", "dropout", "mul", "rmul", "mlp", "hidden", "gate"),
    ),
    "norm": (
        *("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"),
        *("norm", "norm_linear", "normalized"),
    ),
    "loss": (
        *("cross_entropy", "nll_loss", "log_softmax", "mse_loss", "l1_loss", "smooth_l1_loss"),
        *("huber_loss", "kl_div", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
        *("ctc_loss", "cosine_embedding_loss", "triplet_margin_loss", "poisson_nll_loss"),
        *("gaussian_nll_loss", "soft_margin_loss", "margin_ranking_loss", "linear_cross_entropy"),
    ),
    # Their backward is linear in what they save, or reads only its shape.
    "other": (
        *("square", "pow", "addcmul", "lerp", "outer", "dot", "mv", "addmv", "addbmm"),
        *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"),
    ),
}
_KIND = {name: kind for kind, names in KINDS.items() for name in names}
OF_MODULES = {"mlp", "norm_linear", "hidden", "gate", "normalized"}  # several as one function
# Names that only functions of mixprec give to what they save: torch.norm is another function.
_OURS = OF_MODULES | {"attention", "scores", "attended", "attended_remainder", "norm"}
_OURS |= {"grouped_linear", "linear_cross_entropy"}


def _functions() -> Iterator[tuple[Callable[..., Any], str]]:
    """Torch's functions and methods, also those in place, and the op that each is."""
    for name in _KIND.keys() - _OURS:
        for owner in (*_originals.PLACES, _originals.C_NN):
            for alias in (name, f"{name}_", f"_{name}", f"__{name}__", f"__i{name}__"):
                if callable(function := getattr(owner, alias, None)):
                    yield function, name


NAMES = dict(_functions())


def kind_of(op: Op | None) -> str:
    return "other" if op is None else _KIND.get(op.name, "other")


_VIEWS = frozenset(
    f"{name}Backward0"
    for name in (
        *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Expand", "Select"),
        *("Slice", "Split", "Unsqueeze", "Squeeze", "Alias", "Unbind"),
    )
)
_VIEWS_AND_CASTS = _VIEWS | {"ToCopyBackward0", "CloneBackward0"}


def _node(t: torch.Tensor, skipped: frozenset[str]) -> Any:
    """The node of autograd's graph that computed t, or what t is a view of."""
    node = t.grad_fn
    while node is not None and type(node).__name__ in skipped:
        node = node.next_functions[0][0]
    return node


def is_weight(t: torch.Tensor, op: Op | None) -> bool:
    """Whether t is a leaf that requires a gradient, a parameter, or a view or cast of one."""
    base = t if t._base is None else t._base
    if isinstance(base, torch.nn.Parameter) or (op and any(t is kept for kept in op.as_is)):
        return True
    if base.is_leaf and base.requires_grad:
        return True
    if _is_leaf(_node(t, _VIEWS_AND_CASTS)):
        return True
    # A frozen weight under torch.autocast: a copy without a history.
    if kind_of(op) != "linear" or op is None or t is op.argument(0, "input"):
        return False
    weight = op.argument(1, "weight")
    frozen = isinstance(weight, torch.Tensor) and not weight.requires_grad
    return frozen and tuple(t.shape) in (tuple(weight.shape), tuple(weight.shape[::-1]))


def _is_leaf(node: Any) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def is_result(t: torch.Tensor, op: Op) -> bool:
    """Whether the op computed t."""
    node = _node(t, frozenset())
    return node is not None and not _is_leaf(node) and node._sequence_nr() >= op.sequence


def newest_operand(op: Op) -> int:
    """The sequence number of the operand that was computed last; -1 for leaves."""
    operands, newest = list(op.tensors()), -1
    if op.name in ("bilinear", "einsum") and len(operands) > 2:
        return 2**63  # gradients are products of several of them, which may be the same tensor
    for t in operands:
        node = _node(t, _VIEWS_AND_CASTS) if t.requires_grad else None
        if node is not None and not _is_leaf(node):
            newest = max(newest, node._sequence_nr())
    return newest
