"""The op that this thread is running: what autograd saves meanwhile belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._C._autograd import _get_sequence_nr
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from .. import _originals
from .._context import context, replaced
from .._modes import Mode, nor_below, not_compiled, without_dispatch

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


_MHA = _originals.functional.multi_head_attention_forward


class Op(NamedTuple):
    """A function of torch or of mixprec.functional, and its arguments."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sequence: int  # autograd's nodes that existed before have lower numbers
    as_is: list[torch.Tensor]  # what it saves and nobody is to compress
    parts: list[tuple[torch.Tensor, Op]]  # what it saves as another op would

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    def tensors(self) -> Iterator[torch.Tensor]:
        leaves = tree_leaves((self.args, self.kwargs))
        return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def current(t: torch.Tensor | None = None) -> Op | None:
    """The op that runs now, or the part of it that saves t; None inside an autograd.Function of
    another library, compiled code, and whatever a backward pass computes again."""
    op: Op | None = context.op if torch._C._current_graph_task_id() == -1 else None
    return op and next((part for saved, part in op.parts if saved is t), op)


@nor_below
def _op(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Op:
    return Op(name, args, kwargs, _get_sequence_nr(), [], [])


@contextmanager
def running(name: str, *args: Any) -> Iterator[None]:
    """For an autograd.Function, which torch's function modes do not see."""
    with replaced("op", _op(name, args, {})):
        yield


def keep_as_is(*tensors: torch.Tensor | None) -> None:
    """Never compress these objects, which the current op will save, such as its cast weight."""
    op = None if torch.compiler.is_compiling() else context.op
    if op is not None:
        op.as_is.extend(t for t in tensors if t is not None)


def saved_as(name: str, *tensors: torch.Tensor | None) -> None:
    """The current op will save these objects for what the op `name` does with them."""
    op = None if torch.compiler.is_compiling() else context.op
    if op is not None:
        part = op._replace(name=name, as_is=[], parts=[])  # not this list, which would hold itself
        op.parts.extend((t, part) for t in tensors if t is not None)


def is_held_by_owner(t: torch.Tensor, watch: Watch) -> bool:
    """Whether t, or what it is a view of, was there before the block: a buffer or an input. It has
    no history, is an argument of the op, and no result of a function that `watch` saw."""
    base = t if t._base is None else t._base
    if base.grad_fn is not None or base in watch.made:
        return False
    op = current()
    given = () if op is None else op.tensors()
    return op is None or any(base is a or base is a._base for a in given)


class Watch(Mode):
    """Makes each function of torch that `names` knows the current op while it runs. The others are
    ops without a name."""

    def __init__(self, names: dict[Callable[..., Any], str]) -> None:
        super().__init__()
        self.names = names
        self.made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    @not_compiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__":  # an attribute of a tensor
            return func(*args, **kwargs)
        if func is _MHA:
            with self:  # its parts save as they do outside of it
                return without_dispatch(func)(*args, **kwargs)
        op = None if func in _originals.BACKWARD else _op(self.names.get(func, ""), args, kwargs)
        with replaced("op", op):
            result = func(*args, **kwargs)
        # A result without a gradient, of frozen layers, looks like a buffer later.
        plain = type(result) is torch.Tensor and not result.requires_grad and result._base is None
        if plain and not any(result is arg for arg in args):
            self.made[result] = None
        return result
