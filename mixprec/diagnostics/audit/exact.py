"""What ops compute without rounding: their results in FP32, from values of their arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ...formats import FORMATS, Format
from ...ops._reference.block_formats import BLOCK_FORMATS, BlockFormat, name_of
from ...ops.cross_entropy import cross_entropy_backward_op, cross_entropy_op
from ...ops.norm_quantize import norm_backward_op
from ...ops.quantize_mx import quantize_mx_op
from ...ops.rotary import rotary_op
from .ops import Arguments, arguments
from .rules import CASTS, OVERLOADS, PRODUCTS, TORCHS, Packed, Results, Rule, Value
from .values import FLOATS

Cast = Format | BlockFormat
aten = torch.ops.aten
# Of FP32, by the op itself.
_SAME = (cross_entropy_op, cross_entropy_backward_op, rotary_op, norm_backward_op)
_VARIANTS = ("cpp", "reference", "triton", "vendor")


def _by_name(table: Iterable[Any]) -> dict[str, Any]:
    return {f"mixprec::{op.variant_name(v)}": op for op in table for v in _VARIANTS}


_CAST_NAMES, _NAMES, _SAME_NAMES = map(_by_name, (CASTS, PRODUCTS, _SAME))
# Batch norm writes its running statistics, which its schema does not say.
WRITES_MORE = {aten.native_batch_norm, aten.cudnn_batch_norm, aten.miopen_batch_norm}
_OPAQUE = {
    getattr(aten, name)
    for name in ("mkldnn_rnn_layer_backward", "_cudnn_rnn_backward", "miopen_rnn_backward")
    if hasattr(aten, name)
}
_DRAWN = {aten.rrelu_with_noise, aten.rrelu_with_noise_, aten._fused_dropout}
_MOVES = {aten.set_, aten.resize_, aten.resize_as_, aten._resize_output_}
COPY = aten.copy_.default
# Whose results have the role of what they are parts of.
PARTS = (torch.ops.aten.index_select.default, torch.ops.aten.index_fill.int_Scalar)
TORCHS_CASTS = {aten._to_copy.default, COPY}


def is_cast(func: Any) -> bool:
    """Whether results are arguments, or what is computed of them, in other formats."""
    return func in TORCHS_CASTS or func.name() in _CAST_NAMES


def has_codes(func: Any) -> bool:
    """Whether its arguments or results may be codes in bytes."""
    return func.name() in _CAST_NAMES


def cast_format(func: Any, given: Arguments, result: torch.Tensor) -> Cast | None:
    """What a cast casts to; None: as it was."""
    if "fmt" in given:
        is_cast = func.name() in _by_name([quantize_mx_op])
        return BLOCK_FORMATS[given["fmt"]] if is_cast else None
    if "bits" in given:
        return None  # integers
    fmt = next((f for f in FORMATS if f.dtype == result.dtype), None)
    if fmt is not None and given.get("granularity") == "mx":
        return BLOCK_FORMATS[name_of(fmt, "mx") or ""]
    return fmt


def eps(fmt: Cast) -> float:
    return (fmt.element if isinstance(fmt, BlockFormat) else fmt).eps


def is_known(func: Any) -> bool:
    """Whether the results in FP32 can be known: not of other libraries' ops, nor of control."""
    if func.namespace == "aten":
        return True
    return func.name() in _CAST_NAMES or func.name() in _NAMES or func.name() in _SAME_NAMES


def is_opaque(func: Any) -> bool:
    """Whether it reads what a forward pass has left for it in a form of its own."""
    return func.overloadpacket in _OPAQUE


def moves(func: Any) -> bool:
    """Whether it changes which elements of which memory a tensor has, as transpose_ and set_."""
    return torch.Tag.inplace_view in func.tags or func.overloadpacket in _MOVES


def is_random(func: Any, given: Arguments) -> bool:
    """Whether results are drawn anew by each call."""
    if torch.Tag.nondeterministic_seeded not in func.tags or func in TORCHS:
        return False
    return func.overloadpacket not in TORCHS and given.get("dropout_p") != 0.0


def is_drawn_from(func: Any) -> bool:
    """Of a random op: whether its results are computed of its arguments too."""
    return func.overloadpacket in _DRAWN


def results(
    func: Any, args: Any, kwargs: Any, result: Any, value: Value, packed: Packed
) -> Results:
    """Those of func in FP32, of `value` of its arguments. result: what it has returned, whose draws
    and choices they follow."""
    rule = _rule(func)
    if rule is None:
        return everything(func, args, kwargs, value)
    return rule(arguments(func, args, kwargs), value, packed, result)


def _rule(func: Any) -> Rule | None:
    name = func.name()
    if name in _CAST_NAMES:
        return CASTS[_CAST_NAMES[name]]
    if name in _NAMES:
        return PRODUCTS[_NAMES[name]]
    return OVERLOADS.get(func) or TORCHS.get(func.overloadpacket)


def everything(func: Any, args: Any, kwargs: Any, value: Value) -> Results:
    """The same op with FP32 arguments, which returns FP32."""

    def wide(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return value(x)
        return torch.float32 if isinstance(x, torch.dtype) and x in FLOATS[1:] else x

    args, kwargs = tree_map(wide, args), tree_map(wide, kwargs)
    result = func(*args, **kwargs)
    found = result if isinstance(result, (tuple, list)) else [result]
    return [t if isinstance(t, torch.Tensor) and t.dtype in FLOATS else None for t in found]
