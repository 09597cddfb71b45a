"""attention, forward and backward, against torch's scaled_dot_product_attention; and on the GPU
rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mixprec.functional import attention, rotary_qkv

from .. import device, verify
from .gpt import rotate
from .registry import DTYPES, Workload, both_passes, case, times_faster

BATCH, HEADS, WIDTH = 4, 8, 64
LENGTHS = (256, 1024)
TARGET = 1.5
# Sums of one rounding each to the dtype; below what a wrong tile or mask would leave.
SQNR = {torch.float32: 110.0, torch.bfloat16: 40.0}

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Tensors = tuple[torch.Tensor, ...]


def _torchs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dtype: torch.dtype,
    backend: SDPBackend,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Computed in `dtype`, with one of torch's implementations; causal without a mask."""
    with sdpa_kernel(backend):
        y = scaled_dot_product_attention(
            q.to(dtype), k.to(dtype), v.to(dtype), mask, is_causal=mask is None
        )
    return y.to(q.dtype)


def _pass(product: Product, tensors: Tensors) -> Tensors:
    *inputs, g = tensors
    return both_passes(partial(product, *inputs), inputs, g)


def _workload(length: int, dtype: torch.dtype, mask: torch.Tensor | None = None) -> Workload:
    shape = (BATCH, length, HEADS, WIDTH)  # as projections leave them in memory
    q, k, v, g = (
        device.randn(*shape, dtype=dtype, seed=i, on="cpu").transpose(1, 2) for i in range(4)
    )
    tensors = *(x.requires_grad_() for x in (q, k, v)), g
    ways = {"": SDPBackend.FLASH_ATTENTION, ", without flash": SDPBackend.MATH}
    baselines = {
        f"torch, {name}{how}": partial(_torchs, dtype=computed, backend=backend, mask=mask)
        for name, computed in DTYPES.items()
        if computed in (torch.float32, dtype)
        for how, backend in ways.items()
    }
    ours = partial(_pass, partial(attention, mask=mask, causal=mask is None), tensors)

    def check() -> str | None:
        *wide, g = (x.detach().double() for x in tensors)
        want = _pass(
            partial(scaled_dot_product_attention, attn_mask=mask, is_causal=mask is None),
            (*(x.requires_grad_() for x in wide), g),
        )
        names = ("y", "grad of q", "grad of k", "grad of v")
        return verify.sqnr_at_least(dict.fromkeys(names, SQNR[dtype]), ours(), want)

    visible = torch.ones(length, length).tril() if mask is None else mask
    seen = visible.expand(BATCH, 1, length, length).sum().item() / BATCH  # pairs of query and key
    return Workload(
        ours,
        {name: partial(_pass, product, tensors) for name, product in baselines.items()},
        check,
        flops=7 * 2.0 * BATCH * HEADS * seen * WIDTH,  # two products forward, five backward
    )


for _name, _dtype in DTYPES.items():
    for _length in LENGTHS:
        case(
            f"attention/{_name}/{_length}",
            f"forward and backward, {_name} [{BATCH}, {HEADS}, {_length}, {WIDTH}], causal",
            times_faster(TARGET),
            partial(_workload, _length, _dtype),
            quick=_length == LENGTHS[0],
        )


def _masks() -> dict[str, tuple[torch.Tensor, float]]:
    """Of 1024 queries and keys, and how many times torch's speed is the target. Sequences have 768
    tokens, or there are four of 256 in one."""
    at = torch.arange(1024)
    causal, unpadded = at[:, None] >= at, (at < 768).expand(BATCH, 1, 1, -1)
    return {
        "causal-padding": (causal & unpadded, 4.5),
        "padding": (unpadded, 3.0),
        "causal-window-256": (causal & (at[:, None] - at < 256), 7.0),
        "causal-packed-4": (causal & (at[:, None] // 256 == at // 256), 8.0),
    }


for _what, (_mask, _target) in _masks().items():
    case(
        f"attention/bf16/1024/{_what}",
        f"forward and backward, bf16 [{BATCH}, {HEADS}, 1024, {WIDTH}], mask {_what}",
        times_faster(_target),
        partial(_workload, 1024, torch.bfloat16, _mask),
    )


def _rotary() -> Workload:
    """Of the queries, keys and values of the GPT of examples/, forward."""
    batch, time, heads = device.sized(16, 1024, 16)
    angle = device.randn(time, WIDTH // 2)

    def inputs(i: int) -> torch.Tensor:
        return device.randn(batch, time, 3 * heads * WIDTH, dtype=torch.bfloat16, seed=i)

    def by(rotate: Callable[..., Tensors]) -> Callable[[torch.Tensor], Tensors]:
        return partial(rotate, cos=angle.cos(), sin=angle.sin(), heads=heads)

    ours = by(rotary_qkv)
    return Workload(
        ours,
        device.eager_and_compiled(by(rotate)),
        partial(verify.same_as_reference, lambda: ours(inputs(0))),
        inputs,
        ops=("rotary",),
        bytes=2.0 * 2 * 3 * batch * time * heads * WIDTH,
    )


case(
    "cuda/rotary/bf16/16x1024x16x64",
    "rotary positions of q and k, from bf16 [16, 1024, 3 x 16 x 64]",
    times_faster(1.0),
    _rotary,
    share=0.9,
    quick=True,
)
