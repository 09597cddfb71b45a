"""gemm, gemm_grouped: FP16, BF16 and FP8 operands against what torch offers for the same job."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import mixprec
from mixprec import ops

from .. import device, verify
from .registry import Workload, case, times_faster

SIZES = (512, 1024)
# tokens, in_features, out_features of the linear layers of some models
LAYERS = {
    "gpt-512-qkv": (1024, 512, 1536),
    "gpt-512-proj": (1024, 512, 512),
    "gpt-512-up": (1024, 512, 2048),
    "gpt-512-down": (1024, 2048, 512),
    "gpt-256-up": (512, 256, 1024),
    "vit-b-up": (394, 768, 3072),
    "bert-b-proj": (512, 768, 768),
    "llama-1b-key": (128, 2048, 512),
    "llama-1b-down": (256, 8192, 2048),
    "gpt2-head": (512, 768, 50257),
}
E4M3 = torch.float8_e4m3fn


def product(size: int, operands: torch.dtype, out: torch.dtype, baseline: str) -> Workload:
    """a @ b in `operands`, written as `out`, against one baseline; b = weight.t(), as in a layer.

    The column-major b is also the kind one to torch: its fp16 product takes 20 times as long with
    a row-major b on processors without fp16 arithmetic (1024 cubed: 13 against 0.7 GFLOP/s).
    """
    a, weight = (device.randn(size, size, dtype=operands, seed=i, on="cpu") for i in range(2))
    b = weight.t()
    one = torch.ones(())
    baselines = {
        "torch a @ b": lambda: a @ b,
        "torch._scaled_mm": lambda: torch._scaled_mm(a, b, one, one, out_dtype=out),
        "torch a.float() @ b.float()": lambda: a.float() @ b.float(),
    }
    ours = partial(mixprec.gemm, a, b, out_dtype=out)
    return Workload(
        ours=ours,
        baselines={baseline: baselines[baseline]},
        check=lambda: verify.gemm(ours(), a, b),
        flops=2.0 * size**3,
        bytes=size * size * (2 * operands.itemsize + out.itemsize),
    )


_KINDS = (
    # name, operands, output, baseline, target
    ("fp16", torch.float16, torch.float16, "torch a @ b", 3.5),
    ("fp8-bf16", E4M3, torch.bfloat16, "torch._scaled_mm", 2.5),
    ("fp8-fp32", E4M3, torch.float32, "torch._scaled_mm", 1.3),
    # torch's CPU mm has no fp32 output for bf16 operands; this gives the same single rounding
    ("bf16-fp32", torch.bfloat16, torch.float32, "torch a.float() @ b.float()", 1.3),
)

for _name, _operand, _out, _baseline, _target in _KINDS:
    for _size in SIZES:
        case(
            f"gemm/{_name}/{_size}",
            f"{_size} cubed, {str(_operand)[6:]} operands, {str(_out)[6:]} output",
            times_faster(_target),
            partial(product, _size, _operand, _out, _baseline),
            quick=_size == SIZES[0],
        )


def layer(tokens: int, k: int, n: int, fp8: bool) -> Workload:
    """The three products of a linear layer, x w^T, g w and g^T x, with bf16 results.

    The baselines take bf16 operands, those that FP8 ones decode to: torch's FP32 product of
    converted operands, and torch.mm where the processor has instructions for bf16. (Without, it
    takes ten times as long.)
    """
    shapes = (tokens, k), (n, k), (tokens, n)
    dtypes = (E4M3, E4M3, torch.float8_e5m2) if fp8 else (torch.bfloat16,) * 3
    x, w, g = (
        device.randn(*shape, dtype=dtype, seed=i, on="cpu")
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    )
    wide = [t.bfloat16() for t in (x, w, g)]

    def three(product: Callable[..., torch.Tensor], x: Any, w: Any, g: Any) -> list[torch.Tensor]:
        return [product(x, w.t()), product(g, w), product(g.t(), x)]

    def in_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.mm(a.float(), b.float()).bfloat16()

    bf16 = partial(mixprec.gemm, out_dtype=torch.bfloat16)
    ours = partial(three, bf16, x, w, g)

    def check() -> str | None:
        pairs = zip(ours(), ((x, w.t()), (g, w), (g.t(), x)), strict=True)
        return verify.first(*(verify.gemm(c, a, b) for c, (a, b) in pairs))

    products = {"torch.mm in fp32": in_fp32}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        products["torch.mm"] = torch.mm
    return Workload(
        ours=ours,
        baselines={name: partial(three, product, *wide) for name, product in products.items()},
        check=check,
        flops=6.0 * tokens * k * n,
        bytes=2.0 * sum(t.numel() * x.element_size() for t in (x, w, g)),
    )


for _name, _shape in LAYERS.items():
    for _fp8 in (False, True):
        case(
            f"gemm/layer/{_name}/{'fp8' if _fp8 else 'bf16'}",
            f"three products of a linear layer, {_shape[0]} tokens, {_shape[1]} -> {_shape[2]}, "
            f"{'fp8' if _fp8 else 'bf16'} operands, bf16 results",
            times_faster(0.95 if _fp8 else 1.0),
            partial(layer, *_shape, _fp8),
        )


def experts(count: int, tokens: int, k: int, n: int) -> Workload:
    """The products of a mixture's experts, forward and for the gradient of their weights, in bf16:
    one call each, and a call of gemm for each expert, whose share of the tokens is random."""
    draw_bf16 = partial(device.randn, dtype=torch.bfloat16, on="cpu")
    x, g = (draw_bf16(tokens, size, seed=size) for size in (k, n))
    weight = draw_bf16(count * n, k, seed=1).view(count, n, k)
    draw = torch.rand(count, generator=torch.Generator().manual_seed(0))
    offs = (draw.cumsum(0) / draw.sum() * tokens).round().int()
    b = weight.transpose(1, 2)

    def ours() -> list[torch.Tensor]:
        return [ops.gemm_grouped(x, b, offs), ops.gemm_grouped(g.t(), x, offs)]

    def loop() -> list[torch.Tensor]:
        ends = offs.tolist()
        parts = [slice(*ends) for ends in zip([0, *ends], ends, strict=False)]
        rows = [mixprec.gemm(x[part], b[e]) for e, part in enumerate(parts)]
        return [torch.cat(rows), torch.stack([mixprec.gemm(g[p].t(), x[p]) for p in parts])]

    def check() -> str | None:
        same = all(map(torch.equal, ours(), loop()))
        return None if same else "the results are not those of a gemm for each expert"

    return Workload(
        ours=ours, baselines={"a gemm for each": loop}, check=check, flops=4.0 * tokens * k * n
    )


for _experts, _tokens in ((8, 4096), (64, 4096), (128, 512)):
    case(
        f"gemm_grouped/{_experts}-experts/{_tokens}",
        f"{_experts} experts, 512 -> 1024, {_tokens} tokens, bf16: forward and the gradients "
        "of the weights",
        times_faster(1.0),
        partial(experts, _experts, _tokens, 512, 1024),
    )
