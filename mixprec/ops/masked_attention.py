"""masked_attention: attention with a boolean mask whose values are looked at when it runs.

Code that is being compiled cannot look at values: a model that passes no mask in eager mode, where
it sees that nothing is masked, passes one while it is traced.
"""

from __future__ import annotations

from typing import Any

import torch

from ._dispatch import library
from .attention import Three, attention_backward_op, attention_op, empty_rows_first, rows_first

aten = torch.ops.aten
_OTHER, _CAUSAL = 0, 1  # patterns of a mask; 2: every query sees every key


def _added(mask: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """What torch adds to the scores."""
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask.logical_not(), -torch.inf)


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.transpose(1, 2).is_contiguous() else rows_first(x, x.dtype)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    pattern: torch.Tensor,
    scale: float,
    low: torch.dtype,
) -> Three:
    """`attention` of q, k and v rounded to `low`, bf16 or fp16, where the mask has a pattern; else
    torch's, of q, k and v as they are. The result has the dtype of q."""
    found = pattern.item()
    if found != _OTHER:
        rounded = (x.to(low) for x in (q, k, v))
        out, logsumexp, remainder = attention_op(*rounded, found == _CAUSAL, scale)
        return out.to(q.dtype), logsumexp, remainder
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, False, attn_mask=_added(mask, q), scale=scale
    )
    return _as_rows(out), logsumexp.contiguous(), empty_rows_first(q, torch.bfloat16)


def _attention_backward(
    g: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    pattern: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    remainder: torch.Tensor,
    scale: float,
    low: torch.dtype,
) -> Three:
    found = pattern.item()
    if found != _OTHER:
        kept = (x.to(low) for x in (q, k, v, out))  # of out this is what it was
        grads: Three = attention_backward_op(
            g, *kept, logsumexp, remainder, found == _CAUSAL, scale
        )
        return grads
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        g, q, k, v, out, logsumexp, 0.0, False, attn_mask=_added(mask, q), scale=scale
    )
    return _as_rows(dq), _as_rows(dk), _as_rows(dv)


def _fake(q: torch.Tensor, *_: Any) -> Three:
    logsumexp = q.new_empty(q.shape[:3], dtype=torch.float32)
    return empty_rows_first(q, q.dtype), logsumexp, empty_rows_first(q, torch.bfloat16)


def _fake_backward(g: torch.Tensor, *given: torch.Tensor) -> Three:
    dq, dk, dv = (empty_rows_first(x, g.dtype) for x in given[:3])
    return dq, dk, dv


_GIVEN = "Tensor q, Tensor k, Tensor v, Tensor mask, Tensor pattern"
_THREE = "float scale, ScalarType low) -> (Tensor, Tensor, Tensor)"
_SAVED = "Tensor out, Tensor logsumexp, Tensor remainder"


# mask: bool [..., T, S], of two to four dimensions -> int64 []: from each of its values, 2 if every
# query sees every key, 1 if query i sees the keys 0 to i only, 0 for any other mask.
mask_pattern = library.define(
    "mask_pattern", "(Tensor mask) -> Tensor", None, lambda x: x.new_empty((), dtype=torch.int64)
)
masked_attention = library.define("masked_attention", f"({_GIVEN}, {_THREE}", _attention, _fake)
masked_attention_backward = library.define(
    "masked_attention_backward",
    f"(Tensor g, {_GIVEN}, {_SAVED}, {_THREE}",
    _attention_backward,
    _fake_backward,
)
HAS_KERNEL = library.LOAD_ERROR is None and library.has_cpu_kernel("mask_pattern")


def replaces(mask: torch.Tensor) -> bool | None:
    """Whether `attention` without a mask is causal where it computes the same as with this one;
    None where it does not."""
    pattern = int(mask_pattern(mask))
    return None if pattern == _OTHER else pattern == _CAUSAL
