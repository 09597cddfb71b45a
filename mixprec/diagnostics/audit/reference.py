"""What ops compute without rounding: their results in FP32, from values of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_map

from ...formats import FORMATS, Format
from ...ops._reference import scale_layout
from ...ops._reference.block_formats import BlockFormat, name_of, parse
from ...ops.act_quantize import act_backward_op, act_quantize_op
from ...ops.attention import attention_backward_op, attention_op, rotary_in_place_op, rotary_op
from ...ops.cross_entropy import cross_entropy_backward_op, cross_entropy_op
from ...ops.dequantize import dequantize_mx_op, dequantize_op
from ...ops.gemm import gemm_accumulate_op, gemm_op, gemm_simulated_op
from ...ops.gemm_grouped import gemm_grouped_accumulate_op, gemm_grouped_op
from ...ops.norm_quantize import norm_backward_op, norm_quantize_op
from ...ops.pack import pack_op, unpack_op
from ...ops.quantize import quantize_op
from ...ops.quantize_mx import quantize_mx_op
from .ops import Arguments, Call, ours

Cast = Format | BlockFormat
Value = Callable[..., torch.Tensor]  # of an argument, FP32; a second one returns those of codes
Packed = Callable[[torch.Tensor], torch.Tensor | None]
Results = list[torch.Tensor | None]  # None: those of the op are taken as they are
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
        scale = scale.t() if scale.dim() == 2 else scale
        return wide * scale_layout.expand(scale, *t.t().shape).t()
    return wide * scale_layout.expand(scale, *t.shape)


class _InFp32:
    """The arguments of a call by name; the values of those that are tensors, in FP32, are those of
    attributes. result: what the op has returned, whose draws and choices a rule follows."""

    def __init__(self, call: Call, value: Value, packed: Packed) -> None:
        self._call, self._value, self._packed, self.result = call, value, packed, call.result

    def __getitem__(self, name: str) -> Any:
        return self._call.given[name]

    def __getattr__(self, name: str) -> Any:
        """None for an argument that is None."""
        t = self[name]
        return None if t is None else self._value(t)

    def product(self) -> torch.Tensor:
        """a @ b of one of our products."""
        return self.operand("a") @ self.operand("b")

    def operand(self, name: str) -> torch.Tensor:
        return self._value(self[name], lambda: decoded(self._call.given, name))

    def known(self, name: str, values: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Of codes whose values are these where they have no others."""
        return self._value(self[name], values)

    def codes(self, name: str) -> torch.Tensor | None:
        return self._packed(self[name])


Rule = Callable[[_InFp32], Results]


def _plus(y: torch.Tensor, bias: torch.Tensor | None) -> Results:
    return [y if bias is None else y + bias]


def _scaled_mm(c: _InFp32) -> Results:
    y = c.self @ c.mat2 * c["scale_a"] * c["scale_b"]
    return _plus(y, c.bias)


def _cast(c: _InFp32, y: torch.Tensor, others: int = 3) -> Results:
    rows = y.reshape(scale_layout.as_matrix(y.shape))
    data_t = rows.t().contiguous() if c["transpose"] else None
    return [y, data_t, *[None] * others]


_IN_FP32 = (torch.float32, None, False, "tensor", True)


def _act_backward(c: _InFp32) -> Results:
    parts = act_backward_op(c.g, c.x, c.up, c["kind"], *_IN_FP32)
    return [*_cast(c, parts[0]), *(_cast(c, parts[5]) if c["up"] is not None else [None] * 5)]


def _norm_quantize(c: _InFp32) -> Results:
    given = (c.x, c.residual, c.weight, c.bias, c["eps"], c["subtract_mean"])
    y, *_, total, mean, rstd = norm_quantize_op(*given, *_IN_FP32)
    return [*_cast(c, y), total if total.numel() else None, mean, rstd]


def _rotary_in_place(c: _InFp32) -> Results:
    return [rotary_op(c.x, None, None, c.cos, c.sin, c["interleaved"], c["inverse"])]


def _groups(c: _InFp32) -> torch.Tensor:
    a, b = c.operand("a"), c.operand("b")
    ends = c["offs"].tolist()
    starts = [0, *ends[:-1]]
    if b.dim() == 3:
        y = a.new_zeros((a.shape[0], b.shape[2]))
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            y[start:end] = a[start:end] @ b[i]
        return y
    parts = [a[:, s:e] @ b[s:e] for s, e in zip(starts, ends, strict=True)]
    return torch.stack(parts)


def _dequantize(c: _InFp32) -> Results:
    def values() -> torch.Tensor:
        data, scale = c["data"], c["scale_inv"]
        rows = scale_layout.as_matrix(data.shape)
        return (data.float().view(rows) * scale_layout.expand(scale, *rows)).view(data.shape)

    return [c.known("data", values).clone()]


def _dequantize_mx(c: _InFp32) -> Results:
    flat, columns = c.codes("data"), c["columns"]
    if flat is None:
        return [None]  # products decode it, with its scales
    rows = flat.view(c.result.numel() // max(columns, 1), -1)[:, :columns]
    return [functional.pad(rows, (0, columns - rows.shape[1])).reshape(c.result.shape)]


def _unpack(c: _InFp32) -> Results:
    flat = c.codes("codes")
    return [None if flat is None else flat.view(c.result.shape).clone()]


def _mask(c: _InFp32) -> torch.Tensor | None:
    mask: torch.Tensor | None = c["mask"]
    return mask if mask is None or mask.dtype == torch.bool else c.mask


def _attention(c: _InFp32) -> Results:
    out, logsumexp, _ = attention_op(c.q, c.k, c.v, c["causal"], c["scale"], _mask(c))
    return [out, logsumexp, None]


def _attention_backward(c: _InFp32) -> Results:
    """In FP32 rounding cuts nothing off the result."""
    none = c["remainder"].new_empty(0)
    floats = (c.g, c.q, c.k, c.v, c.out, c.logsumexp)
    return list(attention_backward_op(*floats, none, c["causal"], c["scale"], _mask(c)))


def _native_dropout(c: _InFp32) -> Results:
    kept = 1.0 - c["p"] if c["train"] else 1.0
    return [c.input * c.result[1] * (1.0 / kept if kept else 0.0), None]


def _chosen(c: _InFp32) -> Results:
    """Of ops that return values and where they were: values of the same places."""
    x, (chosen, where), at = c.self, c.result, c["dim"]
    if x.dim() == 0:
        return [x.clone(), None]
    squeezed = chosen.dim() < x.dim()
    taken = x.gather(at, where.unsqueeze(at) if squeezed else where)
    return [taken.squeeze(at) if squeezed else taken, None]


def _max_pool(c: _InFp32) -> Results:
    x, (_, where) = c.self, c.result
    return [x.flatten(-2).gather(-1, where.flatten(-2)).view(where.shape), None]


_CASTS: dict[Any, Rule] = {
    quantize_op: lambda c: _cast(c, c.x.clone()),
    quantize_mx_op: lambda c: _cast(c, c.x.clone(), 4),
    act_quantize_op: lambda c: _cast(c, act_quantize_op(c.x, c.up, c["kind"], *_IN_FP32)[0]),
    act_backward_op: _act_backward,
    norm_quantize_op: _norm_quantize,
    dequantize_op: _dequantize,
    dequantize_mx_op: _dequantize_mx,
    pack_op: lambda c: [c.x.clone(), None],
    unpack_op: _unpack,
}
_OURS: dict[Any, Rule] = {
    **_CASTS,
    **dict.fromkeys((gemm_op, gemm_simulated_op), lambda c: _plus(c.product(), c.bias)),
    gemm_accumulate_op: lambda c: [c.acc + c.product()],
    gemm_grouped_op: lambda c: [_groups(c)],
    gemm_grouped_accumulate_op: lambda c: [c.acc + _groups(c)],
    attention_op: _attention,
    attention_backward_op: _attention_backward,
    rotary_in_place_op: _rotary_in_place,
}
_TORCHS: dict[Any, Rule] = {
    aten.native_dropout: _native_dropout,
    aten._scaled_mm: _scaled_mm,
    **dict.fromkeys((aten.topk, aten.sort, aten.kthvalue, aten.mode), _chosen),
    # Of one of their overloads.
    **dict.fromkeys((aten.max.dim, aten.min.dim, aten.median.dim), _chosen),
    aten.max_pool2d_with_indices: _max_pool,
}
# Of FP32, by the op itself.
_SAME = (cross_entropy_op, cross_entropy_backward_op, rotary_op, norm_backward_op)
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
    return func in TORCHS_CASTS or has_codes(func)


def has_codes(func: Any) -> bool:
    """Whether its arguments or results may be codes in bytes."""
    return ours(func) in _CASTS


def cast_format(call: Call) -> Cast | None:
    """What a cast casts to; None: as it was."""
    given = call.given
    if "fmt" in given:
        return parse("audit", given["fmt"]) if ours(call.func) is quantize_mx_op else None
    if "bits" in given:
        return None  # integers
    fmt = next((f for f in FORMATS if f.dtype == call.results[0].dtype), None)
    if fmt is not None and given.get("granularity") == "mx":
        return parse("audit", name_of(fmt, "mx") or "")
    return fmt


def eps(fmt: Cast) -> float:
    return (fmt.element if isinstance(fmt, BlockFormat) else fmt).eps


def is_known(func: Any) -> bool:
    """Whether the results in FP32 can be known: not of other libraries' ops, nor of control."""
    return func.namespace == "aten" or ours(func) in _OURS or ours(func) in _SAME


def is_opaque(func: Any) -> bool:
    """Whether it reads what a forward pass has left for it in a form of its own."""
    return func.overloadpacket in _OPAQUE


def moves(func: Any) -> bool:
    """Whether it changes which elements of which memory a tensor has, as transpose_ and set_."""
    return torch.Tag.inplace_view in func.tags or func.overloadpacket in _MOVES


def is_random(call: Call) -> bool:
    """Whether results are drawn anew by each call."""
    func = call.func
    if torch.Tag.nondeterministic_seeded not in func.tags or func.overloadpacket in _TORCHS:
        return False
    return call.given.get("dropout_p") != 0.0


def is_drawn_from(func: Any) -> bool:
    """Of a random op: whether its results are computed of its arguments too."""
    return func.overloadpacket in _DRAWN


def results(call: Call, value: Value, packed: Packed) -> Results:
    """Those of a call in FP32, of `value` of its arguments; where no rule says how, of the same op
    with FP32 arguments, which returns FP32."""
    func = call.func
    rule = _OURS.get(ours(func)) or _TORCHS.get(func) or _TORCHS.get(func.overloadpacket)
    if rule is not None:
        return rule(_InFp32(call, value, packed))

    def wide(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return value(x)
        return torch.float32 if isinstance(x, torch.dtype) and x in FLOATS[1:] else x

    result = func(*tree_map(wide, call.args), **tree_map(wide, call.kwargs))
    parts = result if isinstance(result, (tuple, list)) else [result]
    return [t if isinstance(t, torch.Tensor) and t.dtype in FLOATS else None for t in parts]
