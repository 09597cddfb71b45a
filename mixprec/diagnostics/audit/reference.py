"""What ops compute without rounding: their results in FP32, from values of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_map

from ...formats import FORMATS, Format
from ...ops._reference import scale_layout
from ...ops._reference.block_formats import BLOCK_FORMATS, BlockFormat, name_of
from ...ops.act_quantize import act_backward_op, act_quantize_op
from ...ops.attention import attention_backward_op, attention_op, rotary_op
from ...ops.cross_entropy import cross_entropy_backward_op, cross_entropy_op
from ...ops.dequantize import dequantize_mx_op, dequantize_op
from ...ops.gemm import gemm_accumulate_op, gemm_op, gemm_simulated_op
from ...ops.gemm_grouped import gemm_grouped_accumulate_op, gemm_grouped_op
from ...ops.norm_quantize import norm_backward_op, norm_quantize_op
from ...ops.pack import pack_op, unpack_op
from ...ops.quantize import quantize_op
from ...ops.quantize_mx import quantize_mx_op
from .ops import Arguments, arguments

Cast = Format | BlockFormat
Value = Callable[..., torch.Tensor]  # of an argument, FP32; a second one returns those of codes
Packed = Callable[[torch.Tensor], torch.Tensor | None]
Results = list[torch.Tensor | None]  # None: those of the op are taken as they are
Rule = Callable[[Arguments, Value, Packed, Any], Results]
aten = torch.ops.aten
_REAL = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FLOATS = (*_REAL, torch.float8_e4m3fn, torch.float8_e5m2)


def is_float(t: torch.Tensor) -> bool:
    """Whether t has values: floating-point numbers, in one memory that is there."""
    is_plain = t.layout is torch.strided and not (t.is_neg() or t.is_nested or t.is_meta)
    return is_plain and t.dtype in FLOATS


def widened(t: torch.Tensor) -> torch.Tensor:
    """In FP32; FP64 as it is."""
    return t.float() if t.dtype.itemsize < 4 else t


def decoded(args: Arguments, name: str) -> torch.Tensor:
    """The values of the codes of an operand [M, K] or [K, N]."""
    t, scale = args[name], args.get(f"{name}_scale_inv")
    wide: torch.Tensor = t.float()
    if scale is None or t.dim() != 2:
        return wide if scale is None else wide * scale.reshape(-1, 1, 1)
    if name == "b":
        return (
            wide * scale_layout.expand(scale.t() if scale.dim() == 2 else scale, *t.t().shape).t()
        )
    return wide * scale_layout.expand(scale, *t.shape)


def _operand(args: Arguments, name: str, value: Value) -> torch.Tensor:
    return value(args[name], lambda: decoded(args, name))


def _scaled_mm(args: Arguments, value: Value, packed: Packed, _: Any) -> Results:
    y = value(args["self"]) @ value(args["mat2"]) * args["scale_a"] * args["scale_b"]
    return [y if args["bias"] is None else y + value(args["bias"])]


def _quantize(args: Arguments, value: Value, packed: Packed, _: Any) -> Results:
    return _cast(value(args["x"]).clone(), args["transpose"])


def _cast(y: torch.Tensor, transpose: bool, others: int = 3) -> Results:
    rows = y.reshape(scale_layout.as_matrix(y.shape))
    data_t = rows.t().contiguous() if transpose else None
    return [y, data_t, *[None] * others]


def _act_quantize(args: Arguments, value: Value, packed: Packed, _: Any) -> Results:
    up = None if args["up"] is None else value(args["up"])
    y = act_quantize_op(value(args["x"]), up, args["kind"], *_IN_FP32)[0]
    return _cast(y, args["transpose"])


def _act_backward(args: Arguments, value: Value, packed: Packed, _: Any) -> Results:
    g, x, up = (None if args[n] is None else value(args[n]) for n in ("g", "x", "up"))
    parts = act_backward_op(g, x, up, args["kind"], *_IN_FP32)
    dx = _cast(parts[0], args["transpose"])
    return [*dx, *(_cast(parts[5], args["transpose"]) if up is not None else [None] * 5)]


def _norm_quantize(args: Arguments, value: Value, packed: Packed, _: Any) -> Results:
    given = [
        None if args[n] is None else value(args[n]) for n in ("x", "residual", "weight", "bias")
    ]
    y, *_, total, mean, rstd = norm_quantize_op(
        *given, args["eps"], args["subtract_mean"], *_IN_FP32
    )
    there = total if total.numel() else None
    return [*_cast(y, args["transpose"]), there, mean, rstd]


_IN_FP32 = (torch.float32, None, False, "tensor", True)


def _gemm(args: Arguments, value: Value, packed: Packed, _: Any) -> Results:
    y = _operand(args, "a", value) @ _operand(args, "b", value)
    return [y if args["bias"] is None else y + value(args["bias"])]


def _gemm_accumulate(args: Arguments, value: Value, packed: Packed, _: Any) -> Results:
    return [value(args["acc"]) + _operand(args, "a", value) @ _operand(args, "b", value)]


def _groups(args: Arguments, value: Value) -> torch.Tensor:
    a, b = (_operand(args, name, value) for name in ("a", "b"))
    ends = args["offs"].tolist()
    starts = [0, *ends[:-1]]
    if b.dim() == 3:
        y = a.new_zeros((a.shape[0], b.shape[2]))
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            y[start:end] = a[start:end] @ b[i]
        return y
    parts = [a[:, s:e] @ b[s:e] for s, e in zip(starts, ends, strict=True)]
    return torch.stack(parts)


def _gemm_grouped(args: Arguments, value: Value, packed: Packed, _: Any) -> Results:
    return [_groups(args, value)]


def _gemm_grouped_accumulate(args: Arguments, value: Value, packed: Packed, _: Any) -> Results:
    return [value(args["acc"]) + _groups(args, value)]


def _dequantize(args: Arguments, value: Value, packed: Packed, _: Any) -> Results:
    scale = args["scale_inv"]

    def known() -> torch.Tensor:
        data = args["data"]
        rows = scale_layout.as_matrix(data.shape)
        return (data.float().view(rows) * scale_layout.expand(scale, *rows)).view(data.shape)

    return [value(args["data"], known).clone()]


def _dequantize_mx(args: Arguments, value: Value, packed: Packed, result: Any) -> Results:
    flat = packed(args["data"])
    if flat is None:
        return [None]  # products decode it, with its scales
    columns = args["columns"]
    rows = flat.view(result.numel() // max(columns, 1), -1)[:, :columns]
    return [functional.pad(rows, (0, columns - rows.shape[1])).reshape(result.shape)]


def _unpack(args: Arguments, value: Value, packed: Packed, result: Any) -> Results:
    flat = packed(args["codes"])
    return [None if flat is None else flat.view(result.shape).clone()]


def _pack(args: Arguments, value: Value, packed: Packed, _: Any) -> Results:
    return [value(args["x"]).clone(), None]


def _native_dropout(args: Arguments, value: Value, packed: Packed, result: Any) -> Results:
    kept = 1.0 - args["p"] if args["train"] else 1.0
    return [value(args["input"]) * result[1] * (1.0 / kept if kept else 0.0), None]


def _chosen(args: Arguments, value: Value, packed: Packed, result: Any) -> Results:
    """Of ops that return values and where they were: values of the same places."""
    x, (chosen, where), at = value(args["self"]), result, args["dim"]
    if x.dim() == 0:
        return [x.clone(), None]
    squeezed = chosen.dim() < x.dim()
    taken = x.gather(at, where.unsqueeze(at) if squeezed else where)
    return [taken.squeeze(at) if squeezed else taken, None]


def _max_pool(args: Arguments, value: Value, packed: Packed, result: Any) -> Results:
    x, (_, where) = value(args["self"]), result
    return [x.flatten(-2).gather(-1, where.flatten(-2)).view(where.shape), None]


CASTS: dict[Any, Rule] = {
    quantize_op: _quantize,
    quantize_mx_op: lambda a, v, p, r: _cast(v(a["x"]).clone(), a["transpose"], 4),
    act_quantize_op: _act_quantize,
    act_backward_op: _act_backward,
    norm_quantize_op: _norm_quantize,
    dequantize_op: _dequantize,
    dequantize_mx_op: _dequantize_mx,
    pack_op: _pack,
    unpack_op: _unpack,
}


def _attention(args: Arguments, value: Value, packed: Packed, _: Any) -> Results:
    q, k, v = (value(args[name]) for name in ("q", "k", "v"))
    out, logsumexp, _ = attention_op(q, k, v, args["causal"], args["scale"])
    return [out, logsumexp, None]


def _attention_backward(args: Arguments, value: Value, packed: Packed, _: Any) -> Results:
    """In FP32 rounding cuts nothing off the result."""
    floats = (value(args[name]) for name in ("g", "q", "k", "v", "out", "logsumexp"))
    none = args["remainder"].new_empty(0)
    return list(attention_backward_op(*floats, none, args["causal"], args["scale"]))


PRODUCTS: dict[Any, Rule] = {
    gemm_op: _gemm,
    gemm_simulated_op: _gemm,
    gemm_accumulate_op: _gemm_accumulate,
    gemm_grouped_op: _gemm_grouped,
    gemm_grouped_accumulate_op: _gemm_grouped_accumulate,
    attention_op: _attention,
    attention_backward_op: _attention_backward,
}
TORCHS: dict[Any, Rule] = {
    aten.native_dropout: _native_dropout,
    aten._scaled_mm: _scaled_mm,
    aten.topk: _chosen,
    aten.sort: _chosen,
    aten.kthvalue: _chosen,
    aten.mode: _chosen,
    aten.max_pool2d_with_indices: _max_pool,
}
# Of one of their overloads.
OVERLOADS: dict[Any, Rule] = dict.fromkeys((aten.max.dim, aten.min.dim, aten.median.dim), _chosen)


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
PARTS = (aten.index_select.default, aten.index_fill.int_Scalar)
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
    results = result if isinstance(result, (tuple, list)) else [result]
    return [t if isinstance(t, torch.Tensor) and t.dtype in FLOATS else None for t in results]
