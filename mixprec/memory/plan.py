"""The form in which a tensor is kept, by the op that saves it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..ops import saved_values as values
from .forms import GLU, Dropped, Exact, Gate, Limited, Linear, Mask, Negative, Rows, Wide
from .packed import Form
from .running import Op, is_result, kind_of

# Of the modes "int8" and "int4". Measured with examples/train_gpt.py: with every tensor in 4 bits
# the GPT does not train; with those of attention in 8 bits and losses as they are it does. What ops
# without a kind save is kept: their backward may divide by it, take its exponential or inverse, or
# compare it with a result, and groups with one step bound no relative error and keep no ties.
_BITS = {
    8: {"linear": 8, "attention": 8, "activation": 8, "norm": 8, "other": 8},
    4: {"linear": 4, "attention": 8, "activation": 4, "norm": 4, "other": 8},
}


def form_of(t: torch.Tensor, op: Op | None, mode: int) -> Form | None:
    """The form for t, a floating tensor saved by `op`; None to keep it as it is."""
    bits = None if op is None else _BITS[mode].get(kind_of(op))
    if op is None or not op.name or bits is None or _is_statistic(t, op):
        return None
    rule = _RULES.get(op.name)
    return _FORMS.get(op.name) or (Linear(bits) if rule is None else rule(t, op, bits))


def _is_statistic(t: torch.Tensor, op: Op) -> bool:
    """Whether t is far smaller than the op's inputs: logsumexp, mean, rstd, scales of rows."""
    largest = max((a.numel() for a in op.tensors() if a.is_floating_point()), default=0)
    return t.numel() * 8 <= largest


_Rule = Callable[[torch.Tensor, Op, int], "Form | None"]
_RULES: dict[str, _Rule] = {
    # Backward has the square of the result, which lies in [-1, 1], and 16 bits round once more.
    **dict.fromkeys(
        ("sigmoid", "tanh"),
        lambda t, op, bits: Linear(8) if t.dtype == torch.float32 else None,
    ),
    "glu": lambda t, op, bits: GLU(8, op.argument(1, "dim", -1)),
    **dict.fromkeys(("norm", "normalized"), lambda t, op, bits: Rows(bits, "last", 1)),
    "group_norm": lambda t, op, bits: Rows(bits, "groups", op.argument(1, "num_groups")),
    **dict.fromkeys(
        ("batch_norm", "instance_norm"),
        lambda t, op, bits: Rows(bits, "channels") if t.dim() >= 2 else None,
    ),
}


def _rule(*names: str) -> Callable[[_Rule], _Rule]:
    def add(rule: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


# The forms of ops that have one. prelu: the weight's gradient is a sum of values of both signs.
_FORMS: dict[str, Form] = {
    "relu": Mask(0.0, None, True, 1.0, 0.0),
    "leaky_relu": Mask(0.0, None, False, 1.0, -1.0),
    "hardsigmoid": Mask(-3.0, 3.0, False, 0.0, -4.0),
    "relu6": Mask(0.0, 6.0, True, 3.0, -1.0),
    "prelu": Negative(8, None),
    # The gradients of q and k are small differences of large sums with it.
    "attended": Wide(4),
    "attended_remainder": Dropped(),
}


@_rule("pow")
def _pow(t: torch.Tensor, op: Op, bits: int) -> Form | None:
    """Of other powers the derivative is not linear."""
    exponent = op.argument(1, "exponent")
    return Linear(bits) if isinstance(exponent, (int, float)) and exponent in (1, 2) else None


# Where the derivative changes: in 4 bits, whose steps are long, up to 0.0005 (GELU) and 0.003 of
# it; in 8 bits all of it. hardswish: beyond the jumps at -3 and 3 by more than a step.
_LIMITS = {
    4: {"gelu": (-4.0, 4.0), "silu": (-8.0, 8.0)},
    8: {"gelu": (-8.0, 5.0), "silu": (-20.0, 16.0), "mish": (-20.0, 6.0), "hardswish": (-3.2, 3.2)},
}
# What is below the lower limit comes back as so many times this limit, where the derivative is 0.
_FLAT = 8.0


@_rule("gelu", "silu", "mish", "hardswish")
def _smooth(t: torch.Tensor, op: Op, bits: int) -> Form | None:
    bits = bits if op.name in _LIMITS[bits] else 8
    low, high = _LIMITS[bits][op.name]
    return Limited(bits, low, high, _FLAT * low)


@_rule("softplus")
def _softplus(t: torch.Tensor, op: Op, bits: int) -> Form | None:
    beta, threshold = op.argument(1, "beta", 1), op.argument(2, "threshold", 20)
    if not beta > 0 or threshold <= 16.0:
        return None
    return Limited(8, -16.0 / beta, 16.0 / beta)


@_rule("hardtanh")
def _hardtanh(t: torch.Tensor, op: Op, bits: int) -> Form | None:
    low, high = op.argument(1, "min_val", -1.0), op.argument(2, "max_val", 1.0)
    middle = 0.5 * (low + high)
    a, b, c = torch.tensor([low, middle, high], dtype=t.dtype).tolist()
    if (a, c) != (low, high) or not a < b < c or b - a == float("inf"):
        return None
    return Mask(low, high, True, middle, low - abs(low) - 1.0)


@_rule("threshold")
def _threshold(t: torch.Tensor, op: Op, bits: int) -> Form | None:
    threshold = op.argument(1, "threshold")
    if not abs(threshold) < 1e4:
        return None
    distance = abs(threshold) + 1.0
    return Mask(threshold, None, True, threshold + distance, threshold - distance)


@_rule("elu", "celu", "selu")
def _elu(t: torch.Tensor, op: Op, bits: int) -> Form | None:
    """In place, they save the result."""
    alpha = op.argument(1, "alpha", 1.0) if op.name == "celu" else 1.0
    return None if is_result(t, op) or not alpha > 0 else Negative(8, 16.0 * alpha)


@_rule("hidden", "gate")
def _hidden(t: torch.Tensor, op: Op, bits: int) -> Form | None:
    """The operand of the activation of mixprec.functional.mlp."""
    act = op.argument(5, "act")
    if act == "relu2":
        return Limited(bits, 0.0) if op.name == "hidden" else None
    low, high = _LIMITS[bits]["silu" if act == "silu" else "gelu"]
    if op.name == "gate":
        return Gate(bits, low, high, _FLAT * low)
    return Limited(bits, low, high, _FLAT * low)


@_rule("layer_norm", "rms_norm")
def _row_norm(t: torch.Tensor, op: Op, bits: int) -> Form | None:
    shape = tuple(op.argument(1, "normalized_shape"))
    return Rows(bits, "last", len(shape)) if t.shape[-len(shape) :] == shape else None


# The most that scores may be off, in standard deviations: exp(error) has the mean 1 + error^2 / 2.
_SCORE_ERROR = 0.05


@_rule("scores")
def _scores(t: torch.Tensor, op: Op, bits: int) -> Form | None:
    """q and k: backward takes the exponential of their products less a logsumexp that is exact."""
    if t.dtype == torch.float32 and t.device.type == "cpu":  # a GPU would have to be waited for
        q, k = op.argument(0, "query"), op.argument(1, "key")
        scale = op.args[4] if op.name == "scores" else op.kwargs.get("scale")
        if values.score_error(q, k, scale, Wide.STEPS) <= _SCORE_ERROR:
            return Wide()
    return Exact() if t.untyped_storage().nbytes() > t.nbytes else None


_FUSED = frozenset(
    f"ScaledDotProduct{name}AttentionBackward0"
    for name in ("Flash", "Efficient", "Cudnn", "FusedOverrideable")
) | {"ScaledDotProductFlashAttentionForCpuBackward0"}
_MATH = 0  # torch.nn.attention.SDPBackend.MATH


@_rule("scaled_dot_product_attention")
def _attention(t: torch.Tensor, op: Op, bits: int) -> Form | None:
    q, k, v = (op.argument(i, name) for i, name in enumerate(("query", "key", "value")))
    names = ("attn_mask", None), ("dropout_p", 0.0), ("is_causal", False)
    options = [op.argument(3 + i, *name) for i, name in enumerate(names)]
    named = {name: op.kwargs[name] for name in ("scale", "enable_gqa") if name in op.kwargs}
    if torch._fused_sdp_choice(q, k, v, *options, **named) == _MATH:
        return Linear(bits)  # of products and a softmax, as if written by hand
    if any(t.is_set_to(given) for given in (q, k, v)):
        return _scores(t, op, bits)
    is_out = is_result(t, op) and type(t.grad_fn).__name__ in _FUSED
    return _FORMS["attended"] if is_out else None
