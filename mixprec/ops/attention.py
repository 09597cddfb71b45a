"""attention and its gradients: softmax(q k^T * scale) v, without a matrix of T x S in memory; and
rotary positions of q and k."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ._dispatch import autocast, checks, self_check
from ._dispatch.op import Op

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _by_query_head(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """k or v in FP32, with one head for each head of q."""
    return x.float().repeat_interleave(q.shape[1] // x.shape[1], 1)


def _masked(
    scores: torch.Tensor, mask: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """scores plus a float mask, and `hidden`, with the keys that the mask hides.

    Numbers of a float mask down from -1e38 hide keys as -inf does, but for a row that sees nothing
    else: beside them scores are nothing, and it sees these keys alike.
    """
    if mask.dtype == torch.bool:
        return scores, hidden | ~mask
    infinite = hidden | (mask == -torch.inf)
    hidden = hidden | (mask <= -1e38)
    lowest = hidden.all(-1, keepdim=True)
    scores = (scores + mask.float()).masked_fill(lowest, 0.0)
    return scores, torch.where(lowest, infinite, hidden)


def _scores(
    q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """q k^T * scale in FP32, masked, -inf where a query does not see a key, [B, H, T, S]; and where
    it does not."""
    scores = q.float() @ _by_query_head(k, q).transpose(-1, -2) * scale
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1) & causal
    if mask is not None:
        scores, hidden = _masked(scores, mask, hidden)
    return scores.masked_fill(hidden, -torch.inf), hidden


def empty_rows_first(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Like x [B, H, T, D], in memory as [B, T, H, D]: what the projections read and write."""
    b, h, t, d = x.shape
    return x.new_empty((b, t, h, d), dtype=dtype).transpose(1, 2)


def rows_first(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return empty_rows_first(x, dtype).copy_(x)


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    mask: torch.Tensor | None = None,
    in_order: bool | None = None,
) -> Three:
    scores, hidden = _scores(q, k, causal, scale, mask)
    logsumexp = scores.logsumexp(-1)
    logsumexp = logsumexp.masked_fill(logsumexp == torch.inf, torch.nan)  # as in softmax
    if mask is not None and mask.numel() > 0:  # weights of 0 where all is hidden
        logsumexp = logsumexp.masked_fill(hidden.all(-1), 0.0)
    weights = (scores - logsumexp[..., None]).exp()
    wide = rows_first(weights @ _by_query_head(v, q), torch.float32)
    if q.dtype == torch.float32:
        return wide, logsumexp, q.new_empty(0, dtype=torch.bfloat16)
    out = wide.to(q.dtype)
    return out, logsumexp, (wide - out).to(torch.bfloat16)


def attention_backward_reference(args: Any) -> Three:
    g, q, k, v, out, logsumexp, remainder, causal, scale, mask = args
    heads = k.shape[1], q.shape[1] // k.shape[1]
    rounded = g.to(q.dtype)  # once: grad_weights and shared are of the same numbers
    wide_g = rounded.float()
    weights = (_scores(q, k, causal, scale, mask)[0] - logsumexp[..., None]).exp()
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
    return rows_first(dq, g.dtype), rows_first(dk, g.dtype), rows_first(dv, g.dtype)


def _check_operands(
    op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> None:
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
    if mask is None:
        return
    sizes: tuple[int, ...] = (b, h, q.shape[2], k.shape[2])
    checks.is_tensor(op, "mask", mask)
    if mask.dim() == 4:  # one of all batches or heads
        sizes = (*(1 if mask.shape[i] == 1 else n for i, n in enumerate(sizes[:2])), *sizes[2:])
    allowed = (torch.bool, torch.float32, q.dtype)
    checks.matches(op, "mask", mask, allowed, q, sizes, "[B or 1, H or 1, T, S]", "q")


def _check_backward(args: Any) -> None:
    op, q = "attention_backward", args.q
    _check_operands(op, q, args.k, args.v, args.mask)
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
        remainder = empty_rows_first(q, torch.bfloat16)
    return empty_rows_first(q, q.dtype), q.new_empty(q.shape[:3], dtype=torch.float32), remainder


def _fake_backward(g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Three:
    dq, dk, dv = (empty_rows_first(x, g.dtype) for x in (q, k, v))
    return dq, dk, dv


attention_op = Op(
    "attention",
    "(Tensor q, Tensor k, Tensor v, bool causal, float scale, Tensor? mask=None, "
    "bool? in_order=None) -> (Tensor out, Tensor logsumexp, Tensor remainder)",
    reference=attention_reference,
    fake=_fake,
    check=partial(_check_operands, "attention"),
    operands=("q", "k", "v"),
)
attention_backward_op = Op(
    "attention_backward",
    "(Tensor g, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, Tensor remainder, "
    "bool causal, float scale, Tensor? mask=None) -> (Tensor dq, Tensor dk, Tensor dv)",
    reference=attention_backward_reference,
    fake=_fake_backward,
    check=_check_backward,
)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    mask: torch.Tensor | None = None,
    in_order: bool | None = None,
) -> Three:
    """Return (out, logsumexp, remainder): softmax(q k^T * scale) v, the logsumexp of each row of
    scores, 0 of a row that a mask hides, and what rounding has cut off out.

    q: [B, H, T, D]; k, v: [B, H_kv, S, D], of one dtype, fp32, bf16 or fp16; any strides, H a
    multiple of H_kv. mask: [B or 1, H or 1, T, S], bool, fp32 or of q's dtype. out: q's shape and
    dtype, in memory as [B, T, H, D]; logsumexp: fp32 [B, H, T]; remainder: bf16, of q's shape, in
    memory as out; of fp32 without elements, [0]. in_order, on a CPU: sums over keys are added one
    key after the other, so that a query has the same bits wherever its keys stand among others that
    it does not see; the backend "reference" does not.
    mixprec.functional.attention says more, and has a derivative. Inside torch.autocast q, k and v
    are first cast to its dtype. TypeError or ValueError names an invalid argument.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.is_tensor("attention", name, x)
    checks.needs_no_grad("attention", "use mixprec.functional.attention", q, k, v, mask)
    device = q.device.type
    if autocast.is_on(device):
        q, k, v = (autocast.cast_operand(x, device) for x in (q, k, v))
    return attention_op(q, k, v, causal, scale, mask, in_order)


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
    mask: torch.Tensor | None = None,
) -> Three:
    """Return (dq, dk, dv), the gradients of q, k and v where g is that of out.

    g: q's shape; fp32, bf16 or fp16, which is the dtype of the results; it is first rounded to that
    of q. The other arguments: as `attention` took and returned them; a remainder [0] stands for one
    of zeros. The results lie in memory as [B, T, H, D]. TypeError or ValueError names an invalid
    argument.
    """
    checks.needs_no_grad("attention_backward", "call it under torch.no_grad()", g, q, k, v)
    return attention_backward_op(g, q, k, v, out, logsumexp, remainder, causal, scale, mask)


def rotary_reference(args: Any) -> torch.Tensor:
    first, k, v, cos, sin, interleaved, inverse = args
    half = first.shape[3] // 2

    def of_pairs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The first and the second features of the pairs."""
        return (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])

    def factors(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.unsqueeze(-3)  # the heads
        return of_pairs(x) if x.shape[-1] == first.shape[3] else (x, x)

    (cos1, cos2), (sin1, sin2) = factors(cos), factors(sin)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        x1, x2 = of_pairs(x.float())
        if inverse:
            turned = x1 * cos1 + x2 * sin2, x2 * cos2 - x1 * sin1
        else:
            turned = x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2
        return torch.stack(turned, -1 if interleaved else -2).flatten(-2).to(first.dtype)

    parts = [rotated(x) for x in (first, k) if x is not None] + [x for x in (v,) if x is not None]
    return rows_first(torch.cat(parts, 1), first.dtype)


def rotary_reference_(args: Any) -> None:
    x, *rest = args
    x.copy_(rotary_reference(rotary_op.Args(*(x, None, None, *rest))))


def _check_rotary(args: Any) -> None:
    _check_parts("rotary", args)


def _check_parts(op: str, args: Any) -> None:
    first, cos = args.x, args.cos
    for name, x in (("x", first), ("k", args.k), ("v", args.v)):
        checks.matches(op, name, x, checks.FLOATS if x is first else (first.dtype,), first)
        if x is None:
            continue
        if x.dim() != 4 or x.shape[3] % 2 != 0:
            shape = tuple(x.shape)
            raise ValueError(f"{op}: {name} must be [B, H, T, D], D even, got shape {shape}")
        b, _, t, d = first.shape
        checks.has_shape(op, name, x, (b, x.shape[1], t, d), "[B, H, T, D]")
    checks.is_tensor(op, "cos", cos)
    n = d if cos.shape[-1:] == (d,) else d // 2
    samples = (b if cos.shape[0] == b else 1,) if cos.dim() == 3 else ()
    meaning, fp32 = "[T, D/2] or [T, D], or such for each of B", (torch.float32,)
    checks.matches(op, "cos", cos, fp32, first, (*samples, t, n), meaning)
    checks.matches(op, "sin", args.sin, fp32, first, cos.shape, "that of cos")


def _check_rotary_(args: Any) -> None:
    x, *rest = args
    _check_parts("rotary_", rotary_op.Args(*(x, None, None, *rest)))
    checks.is_writable("rotary_", "x", x)
    if x.stride(3) != 1:
        raise ValueError(f"rotary_: x must have adjacent features, got strides {x.stride()}")


def _fake_rotary(x: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor:
    heads = sum(t.shape[1] for t in (x, k, v) if t is not None)
    return x.new_empty((x.shape[0], x.shape[2], heads, x.shape[3])).transpose(1, 2)


rotary_op = Op(
    "rotary",
    "(Tensor x, Tensor? k, Tensor? v, Tensor cos, Tensor sin, bool interleaved, bool inverse)"
    " -> Tensor",
    reference=rotary_reference,
    fake=_fake_rotary,
    check=_check_rotary,
    triton="rotary",
)
rotary_in_place_op = Op(
    "rotary_",
    "(Tensor(a!) x, Tensor cos, Tensor sin, bool interleaved, bool inverse) -> ()",
    reference=rotary_reference_,
    check=_check_rotary_,
    triton="rotary",
    examples=self_check.examples("rotary_in_place"),
)


def rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    *,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    inverse: bool = False,
) -> torch.Tensor:
    """Return the pairs of features of x and k rotated, and v, one behind the other: [B, H, T, D].

        y1 = x1 * cos1 - x2 * sin1        inverse (the transpose): y1 = x1 * cos1 + x2 * sin2
        y2 = x2 * cos2 + x1 * sin2                                 y2 = x2 * cos2 - x1 * sin1

    x, k, v: [B, H_x, T, D], [B, H_k, T, D] and [B, H_v, T, D] of one dtype, fp32, bf16 or fp16, any
    strides. cos, sin: fp32 [T, D], [1, T, D] or [B, T, D], a factor for each feature; or of D/2,
    one for both features of a pair. H is H_x + H_k + H_v; the result lies in memory as
    [B, T, H, D]. mixprec.functional.rotary says more, and has a derivative. TypeError or ValueError
    names an invalid argument.
    """
    checks.needs_no_grad("rotary", "use mixprec.functional.rotary", x, k, v, cos, sin)
    return rotary_op(x, k, v, cos, sin, interleaved, inverse)


def rotary_(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    *,
    inverse: bool = False,
) -> None:
    """x <- the pairs of features of x rotated, in place; formula and tables: `rotary`.

    x: [B, H, T, D], fp32, bf16 or fp16, D even and adjacent in memory, other strides any, such as
    q and k of what one layer computes. cos, sin: fp32 [T, D], [1, T, D] or [B, T, D], or of D/2.
    No derivative: RuntimeError for operands that require grad. TypeError or ValueError names an
    invalid argument before anything is written.
    """
    checks.needs_no_grad("rotary_", "use mixprec.functional.rotary_qkv", x, cos, sin)
    rotary_in_place_op(x, cos, sin, interleaved, inverse)
