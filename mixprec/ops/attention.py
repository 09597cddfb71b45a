"""attention and its gradients: softmax(q k^T * scale) v, without a matrix of T x S in memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ._dispatch import autocast, checks
from ._dispatch.op import Op

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _by_query_head(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """k or v in FP32, with one head for each head of q."""
    return x.float().repeat_interleave(q.shape[1] // x.shape[1], 1)


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    """q k^T * scale in FP32, -inf where a query does not see a key. [B, H, T, S]"""
    scores = q.float() @ _by_query_head(k, q).transpose(-1, -2) * scale
    if not causal:
        return scores
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(hidden, -torch.inf)


def _empty_rows_first(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Like x [B, H, T, D], in memory as [B, T, H, D]: what the projections read and write."""
    b, h, t, d = x.shape
    return x.new_empty((b, t, h, d), dtype=dtype).transpose(1, 2)


def _rows_first(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _empty_rows_first(x, dtype).copy_(x)


def attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> Three:
    scores = _scores(q, k, causal, scale)
    logsumexp = scores.logsumexp(-1)
    logsumexp = logsumexp.masked_fill(logsumexp == torch.inf, torch.nan)  # as in softmax
    weights = (scores - logsumexp[..., None]).exp()
    wide = _rows_first(weights @ _by_query_head(v, q), torch.float32)
    if q.dtype == torch.float32:
        return wide, logsumexp, q.new_empty(0, dtype=torch.bfloat16)
    out = wide.to(q.dtype)
    return out, logsumexp, (wide - out).to(torch.bfloat16)


def attention_backward_reference(args: Any) -> Three:
    g, q, k, v, out, logsumexp, remainder, causal, scale = args
    heads = k.shape[1], q.shape[1] // k.shape[1]
    rounded = g.to(q.dtype)  # once: grad_weights and shared are of the same numbers
    wide_g = rounded.float()
    weights = (_scores(q, k, causal, scale) - logsumexp[..., None]).exp()
    # In FP64, where sums of 16-bit numbers do not depend on their order: the two are equal for a
    # query that sees one key.
    grad_weights = rounded.double() @ _by_query_head(v, q).double().transpose(-1, -2)
    # The gradient of softmax: sum_j of_weights_j weights_j is that of g with the output.
    exact = out.double()
    if remainder.numel() > 0:
        exact = exact + remainder
    shared = (rounded.double() * exact).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - shared).float() * scale
    dq = grad_scores @ _by_query_head(k, q)
    dk = (grad_scores.transpose(-1, -2) @ q.float()).unflatten(1, heads).sum(2)
    dv = (weights.transpose(-1, -2) @ wide_g).unflatten(1, heads).sum(2)
    return _rows_first(dq, g.dtype), _rows_first(dk, g.dtype), _rows_first(dv, g.dtype)


def _check_operands(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.is_tensor(op, name, x)
        if x.dim() != 4:
            raise ValueError(f"{op}: {name} must be [B, H, T, D], got shape {tuple(x.shape)}")
        checks.has_dtype(op, name, x, checks.FLOATS)
        if x.dtype != q.dtype:
            raise ValueError(f"{op}: {name} must have q's dtype {q.dtype}, got {x.dtype}")
        checks.on_device(op, name, x, q.device, "q")
    b, h, _, d = q.shape
    if k.shape[1] == 0 or h % k.shape[1] != 0:
        raise ValueError(
            f"{op}: the heads of q must be a multiple of those of k, got {h} and {k.shape[1]}"
        )
    if d == 0:
        raise ValueError(f"{op}: q must be [B, H, T, D] with D > 0, got shape {tuple(q.shape)}")
    checks.has_shape(op, "k", k, (b, *k.shape[1:3], d), "[B, H_kv, S, D]")
    checks.has_shape(op, "v", v, k.shape, "[B, H_kv, S, D]")


def _check_backward(args: Any) -> None:
    op, q = "attention_backward", args.q
    _check_operands(op, q, args.k, args.v)
    checks.is_like(op, "g", args.g, q, checks.FLOATS, "q")
    checks.is_like(op, "out", args.out, q, (q.dtype,), "q")
    fp32, rows = (torch.float32,), q.shape[:3]
    checks.matches(op, "logsumexp", args.logsumexp, fp32, q, rows, "[B, H, T]", "q")
    checks.matches(op, "remainder", args.remainder, (torch.bfloat16,), q, owner="q")
    if args.remainder.shape != (0,):
        checks.has_shape(op, "remainder", args.remainder, q.shape, "q's shape or [0]")


def _fake(q: torch.Tensor) -> Three:
    remainder = q.new_empty(0, dtype=torch.bfloat16)
    if q.dtype != torch.float32:
        remainder = _empty_rows_first(q, torch.bfloat16)
    return _empty_rows_first(q, q.dtype), q.new_empty(q.shape[:3], dtype=torch.float32), remainder


def _fake_backward(g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Three:
    dq, dk, dv = (_empty_rows_first(x, g.dtype) for x in (q, k, v))
    return dq, dk, dv


attention_op = Op(
    "attention",
    "(Tensor q, Tensor k, Tensor v, bool causal, float scale) -> "
    "(Tensor out, Tensor logsumexp, Tensor remainder)",
    reference=attention_reference,
    fake=_fake,
    check=partial(_check_operands, "attention"),
    operands=("q", "k", "v"),
)
attention_backward_op = Op(
    "attention_backward",
    "(Tensor g, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, Tensor remainder, "
    "bool causal, float scale) -> (Tensor dq, Tensor dk, Tensor dv)",
    reference=attention_backward_reference,
    fake=_fake_backward,
    check=_check_backward,
)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> Three:
    """Return (out, logsumexp, remainder): softmax(q k^T * scale) v, the logsumexp of each row of
    scores, and what rounding has cut off out.

    q: [B, H, T, D]; k, v: [B, H_kv, S, D], of one dtype, fp32, bf16 or fp16; any strides, H a
    multiple of H_kv. out: q's shape and dtype, in memory as [B, T, H, D]; logsumexp: fp32
    [B, H, T]; remainder: bf16, of q's shape, in memory as out; of fp32 without elements, [0].
    mixprec.functional.attention says more, and has a derivative. Inside torch.autocast q, k and v
    are first cast to its dtype. TypeError or ValueError names an invalid argument.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.is_tensor("attention", name, x)
    checks.needs_no_grad("attention", "use mixprec.functional.attention", q, k, v)
    device = q.device.type
    if autocast.is_on(device):
        q, k, v = (autocast.cast_operand(x, device) for x in (q, k, v))
    return attention_op(q, k, v, causal, scale)


def attention_backward(
    g: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    remainder: torch.Tensor,
    causal: bool,
    scale: float,
) -> Three:
    """Return (dq, dk, dv), the gradients of q, k and v where g is that of out.

    g: q's shape; fp32, bf16 or fp16, which is the dtype of the results; it is first rounded to that
    of q. The other arguments: as `attention` took and returned them; a remainder [0] stands for one
    of zeros. The results lie in memory as [B, T, H, D]. TypeError or ValueError names an invalid
    argument.
    """
    checks.needs_no_grad("attention_backward", "call it under torch.no_grad()", g, q, k, v)
    return attention_backward_op(g, q, k, v, out, logsumexp, remainder, causal, scale)


def rotary_reference(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    d = x.shape[3]
    pairs = (d // 2, 2) if interleaved else (2, d // 2)
    first, second = x.float().unflatten(-1, pairs).unbind(-1 if interleaved else -2)
    rotated = first * cos - second * sin, second * cos + first * sin
    return _rows_first(torch.stack(rotated, -1 if interleaved else -2).flatten(-2), x.dtype)


def _check_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    op = "rotary"
    checks.has_dtype(op, "x", x, checks.FLOATS)
    if x.dim() != 4 or x.shape[3] % 2 != 0:
        raise ValueError(f"{op}: x must be [B, H, T, D], D even, got shape {tuple(x.shape)}")
    for name, factor in (("cos", cos), ("sin", sin)):
        shape = x.shape[2], x.shape[3] // 2
        checks.matches(op, name, factor, (torch.float32,), x, shape, "[T, D/2]")


rotary_op = Op(
    "rotary",
    "(Tensor x, Tensor cos, Tensor sin, bool interleaved) -> Tensor",
    reference=rotary_reference,
    fake=lambda x: _empty_rows_first(x, x.dtype),
    check=_check_rotary,
)


def rotary(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Return the pairs of features of x [B, H, T, D] rotated; cos, sin: fp32 [T, D/2].

    mixprec.functional.rotary says more, and has a derivative.
    """
    checks.needs_no_grad("rotary", "use mixprec.functional.rotary", x, cos, sin)
    return rotary_op(x, cos, sin, interleaved)
