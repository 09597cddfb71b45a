"""attention with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from .._context import context
from ..memory.running import keep_as_is, running, saved_as
from ..ops._dispatch import autocast, checks
from ..ops._dispatch.library import saved_copy
from ..ops.attention import attention as run
from ..ops.attention import attention_backward
from ._derivatives import on_backend_of_forward, result

_NO_SECOND = (
    "attention: its gradients have no derivative (create_graph=True); for a second derivative use "
    "torch.nn.functional.scaled_dot_product_attention inside "
    "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
)


class _Attention(torch.autograd.Function):
    """low: the dtype of the operands and of what is saved; the result has that of q."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        scale: float,
        low: torch.dtype,
        mask: torch.Tensor | None,
        in_order: bool | None,
    ) -> torch.Tensor:
        ctx.causal, ctx.scale, ctx.dtypes = causal, scale, (q.dtype, k.dtype, v.dtype)
        ctx.backend = context.backend
        q, k, v = q.to(low), k.to(low), v.to(low)
        out, logsumexp, remainder = run(q, k, v, causal, scale, mask, in_order)
        saved_as("scores", q, k, v)
        saved_as("attended", out)
        saved_as("attended_remainder", remainder)
        keep_as_is(mask)
        ctx.save_for_backward(q, k, v, out, logsumexp, remainder, mask)
        return result(out, ctx.dtypes[0])

    @staticmethod
    @on_backend_of_forward
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, logsumexp, remainder, mask = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(_NO_SECOND)
        grads = attention_backward(
            _dense(g), q, k, v, out, logsumexp, remainder, ctx.causal, ctx.scale, mask
        )
        needs = ctx.needs_input_grad[:3]
        needed = (
            x.to(dtype) if need else None
            for x, dtype, need in zip(grads, ctx.dtypes, needs, strict=True)
        )
        return *needed, *[None] * 5


def _dense(x: torch.Tensor) -> torch.Tensor:
    """x with adjacent elements in its last dimension, the only layout that the kernels ask for."""
    return x if x.stride(-1) == 1 else x.contiguous()


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether these are what `attention` describes; what is wrong with others, torch says."""
    return (
        all(x.dim() == 4 and x.device == q.device for x in (q, k, v))
        and all(x.dtype in checks.FLOATS for x in (q, k, v))
        and (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
        and q.shape[3] > 0
        and k.shape == v.shape
        and k.shape[1] > 0
        and q.shape[1] % k.shape[1] == 0
    )


def mask_fits(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether it is a mask of these that `attention` describes, and no gradient of it is asked
    for."""
    scores = (*q.shape[:3], k.shape[2])
    return (
        2 <= mask.dim() <= 4
        and all(n in (1, size) for n, size in zip(mask.shape[::-1], scores[::-1], strict=False))
        and mask.dtype in (torch.bool, torch.float32, q.dtype)
        and mask.device == q.device
        and not (mask.requires_grad and torch.is_grad_enabled())
    )


def _is_ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether the op takes these, or torch's kernels do."""
    if q.device.type == "cuda" and context.backend is None:
        return False
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return False
    return fits(q, k, v) and (mask is None or mask_fits(mask, q, k))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Return softmax(s) v for each head, [B, H, T, D], with gradients.

        s = q k^T * scale [+ mask]      -inf where query i does not see key j

    q: [B, H, T, D]; k, v: [B, H_kv, S, D], fp32, bf16 or fp16, all of one dtype; any strides.
    H must be a multiple of H_kv: head h of q attends to head h // (H / H_kv) of k and v. causal:
    query i sees keys 0 to i only. scale: None takes 1 / sqrt(D). The result has the dtype of q and
    lies in memory as [B, T, H, D], so that transpose(1, 2).flatten(2) is a view.

    mask: [B, H, T, S], with 1 in place of any size or without leading dimensions; with `causal`, a
    query sees what both let it see. Either bool, True where query i sees key j; or what is added to
    the scores, fp32 or of q's dtype. Of such a mask -inf hides a key, and so does a number down
    from -1e38, such as torch.finfo(torch.bfloat16).min, in a row that sees other keys; a row of
    these alone has the mean of their v. A row that sees no key is 0 and has gradients of 0. Tiles
    of 96 queries by 96 keys that are hidden are not computed; in others hidden k and v must be
    finite. For the gradient of a mask, it is torch's function.

    Nothing of size T x S is stored: the softmax is computed tile by tile as keys are read, and
    again in backward, from q, k, v, the mask, the result, what rounding it to 16 bits has cut off
    (bf16), and the logsumexp of each row, which are saved. Sums, maxima and exponentials are FP32.
    Products are FP32; of bf16 operands on an AMD processor with AVX512-BF16, the weights and the
    gradients of scores are rounded to bf16 first. Rounding errors of the gradients have a mean of
    zero (docs/numerics.md); where torch's kernels compute them, they are torch's. Inf and NaN reach
    the results of the rows that see them (and may reach others of the same block). Results do not
    depend on the number of threads, nor on whether a mask or `causal` says what is seen.

    On a GPU, and for what the kernels do not take (fp64, other shapes, torch.func), it is
    torch.nn.functional.scaled_dot_product_attention, which raises the errors. In torch.autocast q,
    k and v are cast to its dtype. A second derivative raises RuntimeError.

    Source: FlashAttention-2 (Dao, 2023).
    """
    for name, x in (("q", q), ("k", k), ("v", v), *([] if mask is None else [("mask", mask)])):
        checks.is_tensor("attention", name, x)
    if autocast.is_on(q.device.type):
        q, k, v = (autocast.cast_operand(x, q.device.type) for x in (q, k, v))
    if q.dtype == k.dtype == v.dtype:
        return run_attention(q, k, v, causal, scale, q.dtype, mask)
    return _torchs(q, k, v, causal, scale, mask)


def _torchs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    if mask is not None and causal:  # of which torch takes one
        sees = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        is_bool = mask.dtype == torch.bool
        mask = mask & sees if is_bool else mask.masked_fill(~sees, -torch.inf)
        causal = False
    groups = q.dim() == k.dim() == 4 and q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=groups
    )


def run_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    low: torch.dtype,
    mask: torch.Tensor | None = None,
    in_order: bool | None = None,
) -> torch.Tensor:
    """`attention` of q, k and v rounded to `low`; the result has the dtype of q. in_order: as in
    the op."""
    if not _is_ours(q, k, v, mask):
        dtype = q.dtype
        q, k, v = (x.to(low) for x in (q, k, v))
        return _torchs(q, k, v, causal, scale, mask).to(dtype)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    if mask is not None:
        if torch.compiler.is_compiling() and torch.is_grad_enabled():
            mask = saved_copy(mask)
        mask = mask[(None,) * (4 - mask.dim())].expand(-1, -1, q.shape[2], k.shape[2])
        mask = mask if mask.dtype in (torch.bool, low) else mask.float()
    args = _dense(q), _dense(k), _dense(v), bool(causal), scale, low, mask, in_order
    if torch.compiler.is_compiling():
        compiled: torch.Tensor = _Attention.apply(*args)
        return compiled
    with running("attention", *args):
        result: torch.Tensor = _Attention.apply(*args)
    return result
