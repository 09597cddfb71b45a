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
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_randn = partial(device.randn, on="cpu")
_MOST = 192, 192  # rows and columns of a group whose values are looked at


def _in_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.float() @ b.float()


def _scaled_mm(out: torch.dtype, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    one = torch.ones(())
    return torch._scaled_mm(a, b, one, one, out_dtype=out)


# name, operands, output, baseline, target
_KINDS: tuple[tuple[str, torch.dtype, torch.dtype, str, Callable[..., Any], float], ...] = (
    ("fp16", FP16, FP16, "torch a @ b", torch.matmul, 3.5),
    ("fp8-bf16", E4M3, BF16, "torch._scaled_mm", partial(_scaled_mm, BF16), 2.5),
    ("fp8-fp32", E4M3, FP32, "torch._scaled_mm", partial(_scaled_mm, FP32), 1.3),
    # torch's CPU mm has no fp32 output for bf16 operands; this gives the same single rounding
    ("bf16-fp32", BF16, FP32, "torch a.float() @ b.float()", _in_fp32, 1.3),
)


def product(
    size: int, operands: torch.dtype, out: torch.dtype, baseline: str, run: Callable[..., Any]
) -> Workload:
    """a @ b in `operands`, written as `out`, against one baseline; b = weight.t(), as in a layer.

    The column-major b is also the kind one to torch: its fp16 product takes 20 times as long with
    a row-major b on processors without fp16 arithmetic (1024 cubed: 13 against 0.7 GFLOP/s).
    """
    a, b = (_randn(size, size, dtype=operands, seed=i) for i in range(2))
    ours = partial(mixprec.gemm, a, b.t(), out_dtype=out)
    return Workload(
        ours,
        {baseline: partial(run, a, b.t())},
        lambda: verify.gemm(ours(), a, b.t()),
        flops=2.0 * size**3,
        bytes=size * size * (2 * operands.itemsize + out.itemsize),
    )


for _name, _operands, _out, _baseline, _run, _target in _KINDS:
    for _size in SIZES:
        case(
            f"gemm/{_name}/{_size}",
            f"{_size} cubed, {str(_operands)[6:]} operands, {str(_out)[6:]} output",
            times_faster(_target),
            partial(product, _size, _operands, _out, _baseline, _run),
            quick=_size == SIZES[0],
        )


def layer(tokens: int, k: int, n: int, fp8: bool) -> Workload:
    """The three products of a linear layer, x w^T, g w and g^T x, with bf16 results.

    The baselines take bf16 operands, those that FP8 ones decode to: torch's FP32 product of
    converted operands, and torch.mm where the processor has instructions for bf16. (Without, it
    takes ten times as long.)
    """
    shapes = (tokens, k), (n, k), (tokens, n)
    dtypes = (E4M3, E4M3, E5M2) if fp8 else (BF16,) * 3
    x, w, g = (_randn(*shapes[i], dtype=dtypes[i], seed=i) for i in range(3))

    def three(product: Callable[..., torch.Tensor], x: Any, w: Any, g: Any) -> list[torch.Tensor]:
        return [product(x, w.t()), product(g, w), product(g.t(), x)]

    ours = partial(three, partial(mixprec.gemm, out_dtype=BF16), x, w, g)
    products = {"torch.mm in fp32": lambda a, b: _in_fp32(a, b).bfloat16()}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        products["torch.mm"] = torch.mm

    def check() -> str | None:
        pairs = zip(ours(), ((x, w.t()), (g, w), (g.t(), x)), strict=True)
        return verify.first(*(verify.gemm(c, a, b) for c, (a, b) in pairs))

    wide = [t.bfloat16() for t in (x, w, g)]
    return Workload(
        ours,
        {name: partial(three, product, *wide) for name, product in products.items()},
        check,
        flops=6.0 * tokens * k * n,
        bytes=2.0 * sum(t.numel() * x.element_size() for t in (x, w, g)),
    )


for _name, _shape in LAYERS.items():
    for _fp8 in (False, True):
        _how = "fp8" if _fp8 else "bf16"
        case(
            f"gemm/layer/{_name}/{_how}",
            f"three products of a linear layer, {_shape[0]} tokens, {_shape[1]} -> {_shape[2]}, "
            f"{_how} operands, bf16 results",
            times_faster(0.95 if _fp8 else 1.0),
            partial(layer, *_shape, _fp8),
        )


def experts(
    count: int, tokens: int, k: int, n: int, on_gpu: bool = False, dtype: torch.dtype = BF16
) -> Workload:
    """The products of a mixture's experts, forward and for the gradient of their weights: one call
    each, and a call of gemm for each expert, whose share of the tokens is random."""
    where = device.where(on_gpu)
    if on_gpu:
        tokens, k, n = device.sized(tokens, k, n, tiny=64)
    randn = partial(device.randn, dtype=dtype, on=where)
    x, g = (randn(tokens, size, seed=size) for size in (k, n))
    weight = randn(count * n, k, seed=1).view(count, n, k)
    draw = torch.rand(count, generator=torch.Generator().manual_seed(0))
    offs = (draw.cumsum(0) / draw.sum() * tokens).round().int().to(where)
    b, over_k = weight.transpose(1, 2), (g.t(), x)
    if dtype.itemsize == 1:  # whose products sum along adjacent elements
        over_k = g.t().contiguous(), x.t().contiguous().t()
    grouped = partial(ops.gemm_grouped, out_dtype=BF16)
    product = partial(mixprec.gemm, out_dtype=BF16)

    def ours() -> list[torch.Tensor]:
        return [grouped(x, b, offs), grouped(*over_k, offs)]

    def loop() -> list[torch.Tensor]:
        ends = offs.tolist()
        parts = [slice(*ends) for ends in zip([0, *ends], ends, strict=False)]
        rows = [product(x[part], b[e]) for e, part in enumerate(parts)]
        grads = [product(over_k[0][:, p], over_k[1][p]) for p in parts]
        return [torch.cat(rows), torch.stack(grads)]

    def check() -> str | None:
        if on_gpu:  # where sums are in another order
            ends, (y, grads) = [0, *offs.tolist()], ours()
            parts = [slice(*ends[e : e + 2]) for e in range(count)]
            found = [verify.gemm(y[p], x[p], b[e], most=_MOST) for e, p in enumerate(parts)]
            found += [
                verify.gemm(grads[e], over_k[0][:, p], over_k[1][p], most=_MOST)
                for e, p in enumerate(parts)
            ]
            return verify.first(*found)
        same = all(map(torch.equal, ours(), loop()))
        return None if same else "the results are not those of a gemm for each expert"

    return Workload(ours, {"a gemm for each": loop}, check, flops=4.0 * tokens * k * n)


for _experts, _tokens in ((8, 4096), (64, 4096), (128, 512)):
    case(
        f"gemm_grouped/{_experts}-experts/{_tokens}",
        f"{_experts} experts, 512 -> 1024, {_tokens} tokens, bf16: forward and the gradients "
        "of the weights",
        times_faster(1.0),
        partial(experts, _experts, _tokens, 512, 1024),
    )
for _dtype in (BF16, E4M3):
    _name = "fp8" if _dtype == E4M3 else "bf16"
    case(
        f"cuda/gemm_grouped/{_name}/64x16384",
        f"64 experts, 2048 -> 1536, 16384 tokens, {_name}: forward and the "
        "gradients of the weights",
        times_faster(1.0),
        partial(experts, 64, 16384, 2048, 1536, True, _dtype),
        quick=True,
    )
