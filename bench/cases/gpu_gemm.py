"""gemm on the GPU: 16-bit products in four layouts and FP8, against torch.matmul, _scaled_mm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

import mixprec
from mixprec.ops._reference.gemm_scales import Operands

from .. import device, verify
from .registry import Workload, case, times_faster, times_faster_than

Shape = tuple[int, int, int]  # M, N, K
Product = Callable[..., torch.Tensor]
E4M3 = torch.float8_e4m3fn
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FAST, PRECISE, BF16 = "torch._scaled_mm, fast", "torch._scaled_mm, precise", "torch.matmul, bf16"

LLAMA = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]  # N, K
DEEPSEEK = [
    *((2112, 7168), (576, 7168), (24576, 1536), (32768, 512)),
    *((7168, 16384), (4096, 7168), (7168, 2048)),
]
LAYER = [(4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096)]  # K, N of a layer, M below
TOKENS = 15872
SQUARES = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
ODD = [
    *((8193, 2501, 5008), (1023, 1029, 2512), (4095, 511, 10000)),
    *((2047, 3073, 8192), (127, 4097, 12288)),
]


def suite() -> list[Shape]:
    """Every shape once, in a fixed order."""
    shapes: list[Shape] = [(s, s, s) for s in SQUARES]
    shapes += [(m, n, k) for n, k in LLAMA for m in (1, 16, 64, 512, 2048, 8192, 16384)]
    shapes += [(m, n, k) for n, k in DEEPSEEK for m in (64, 128, 4096)]
    for k, n in LAYER:
        shapes += [(TOKENS, n, k), (TOKENS, k, n), (n, k, TOKENS)]  # forward, dgrad, wgrad
    return list(dict.fromkeys(shapes + ODD))


# What a run that has to end in minutes measures; make gpu-bench FULL=1 measures all.
CORE: list[Shape] = [
    *((s, s, s) for s in (1024, 2048, 4096, 8192, 16384)),
    *((m, n, k) for n, k in LLAMA[:4] for m in (16, 8192)),
    *((128, 7168, 16384), (4096, 7168, 2048), (4096, 2112, 7168)),
    *((TOKENS, 4096, 16384), (4096, 16384, TOKENS)),
    *ODD,
]
FEW: list[Shape] = [(2048, 2048, 2048), (8192, 8192, 8192), (2047, 3073, 8192)]


def _workload(
    full: Shape,
    dtype: torch.dtype,
    layout: str,
    ours: Product,
    baselines: dict[str, Product],
    out: torch.dtype,
    scales: tuple[torch.Tensor | None, ...] = (None, None),
    factor: float = 1.0,
    fast: bool = False,
) -> Workload:
    """ours and the baselines take the operands. factor: of both scales together."""
    # The baseline may not add 16-bit partial sums either.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    m, n, k = device.sized(*full)

    def inputs(i: int) -> Operands:
        a = device.operand(m, k, dtype, layout[0], 2 * i)
        return Operands(a, device.operand(k, n, dtype, layout[1], 2 * i + 1), *scales)

    def check() -> str | None:
        x = inputs(0)
        return verify.gemm(ours(x), x.a, x.b, factor, most=(192, 1536))

    return Workload(
        ours,
        baselines,
        check,
        inputs,
        ops=("gemm",),
        bytes=float(dtype.itemsize * (m * k + k * n) + out.itemsize * m * n),
        flops=2.0 * m * n * k,
        arguments=lambda x: (*x, None, out, fast),
    )


def _product16(shape: Shape, dtype: torch.dtype, layout: str) -> Workload:
    baselines = {"torch.matmul": lambda x: torch.matmul(x.a, x.b)}
    return _workload(shape, dtype, layout, lambda x: mixprec.gemm(x.a, x.b), baselines, dtype)


def _has_bf16_baseline(shape: Shape, kind: str) -> bool:
    """_scaled_mm refuses unaligned shapes, and in many versions of torch scales per block."""
    return shape in ODD or kind == "block"


def _product8(shape: Shape, kind: str, fast: bool) -> Workload:
    """a [M, K] row-major, b = weight.t(): what every FP8 GEMM of Hopper takes."""
    bf16 = torch.bfloat16
    m, n, k = device.sized(*shape)
    scales = theirs = device.scales((m, n, k), kind)
    if kind == "block":  # which _scaled_mm takes column-major alone
        theirs = tuple(s.t().contiguous().t() for s in scales)

    def ours(x: Operands) -> torch.Tensor:
        scales = {"a_scale_inv": x[2], "b_scale_inv": x[3]}
        return mixprec.gemm(*x[:2], **scales, out_dtype=bf16, fast_accum=fast)

    def vendor(x: Operands, fast: bool) -> torch.Tensor:
        return torch._scaled_mm(x.a, x.b, *theirs, out_dtype=bf16, use_fast_accum=fast)

    baselines: dict[str, Product]
    baselines = {FAST: partial(vendor, fast=True), PRECISE: partial(vendor, fast=False)}
    if _has_bf16_baseline(shape, kind):
        a16, b16 = device.randn(m, k, dtype=bf16), device.randn(k, n, dtype=bf16)
        baselines[BF16] = lambda _: torch.matmul(a16, b16)
    return _workload(shape, E4M3, "nt", ours, baselines, bf16, scales, 0.125, fast)


def _families() -> Iterator[tuple[str, list[Shape], list[Shape]]]:
    """name, all shapes, the shapes of a short run."""
    for dtype in ("bf16", "fp16"):
        for layout in ("nt", "nn", "tn", "tt"):
            first = (dtype, layout) == ("bf16", "nt")
            yield f"{dtype}/{layout}", suite(), CORE if first else FEW
    yield "fp8/tensor", suite(), CORE
    yield "fp8-fast/tensor", CORE[:15], FEW[:2]
    yield "fp8/row", CORE[:15], FEW[:2]
    yield "fp8/block", CORE[:15], FEW[:2]


def _register(family: str, shape: Shape, quick: bool) -> None:
    kind, how = family.split("/")
    odd = shape in ODD
    if kind.startswith("fp8"):
        # Each against the same accumulation: FP32 sums of 128 products, or those of tensor cores.
        fast = kind == "fp8-fast"
        target = times_faster_than(FAST if fast else PRECISE, 1.0)
        if _has_bf16_baseline(shape, how):
            target = times_faster_than(BF16, 1.0 if odd else 1.5)
        make = partial(_product8, shape, how, fast)
        what = f"e4m3 -> bf16, scales per {how}{', fast accumulation' * fast}"
    else:
        target = times_faster(3.0 if odd else 0.97)
        make = partial(_product16, shape, DTYPES[kind], how)
        what = f"{kind}, a {_ORDER[how[0]]}, b {_ORDER[how[1]]}"
    case(f"cuda/gemm/{family}/{shape[0]}x{shape[1]}x{shape[2]}", what, target, make, quick=quick)


_ORDER = {"n": "row-major", "t": "transposed"}
for _family, _all, _core in _families():
    for _shape in _all:
        _register(_family, _shape, _shape in _core)
