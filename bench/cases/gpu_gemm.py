"""gemm on the GPU: 16-bit products in four layouts and FP8, against torch.matmul, _scaled_mm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

import mixprec

from .. import device, verify
from .registry import Workload, case, times_faster, times_faster_than

Shape = tuple[int, int, int]  # M, N, K
E4M3 = torch.float8_e4m3fn
BLOCK = 128
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


# What a run that has to end in minutes measures; FULL=1 measures all.
CORE: list[Shape] = [
    *((s, s, s) for s in (1024, 2048, 4096, 8192, 16384)),
    *((m, n, k) for n, k in LLAMA[:4] for m in (16, 8192)),
    *((128, 7168, 16384), (4096, 7168, 2048), (4096, 2112, 7168)),
    *((TOKENS, 4096, 16384), (4096, 16384, TOKENS)),
    *ODD,
]
FEW: list[Shape] = [(2048, 2048, 2048), (8192, 8192, 8192), (2047, 3073, 8192)]


class Operands(NamedTuple):
    a: torch.Tensor  # [M, K]
    b: torch.Tensor  # [K, N]
    a_scale_inv: torch.Tensor | None
    b_scale_inv: torch.Tensor | None


def operand(
    height: int, width: int, dtype: torch.dtype, transposed: bool, seed: int
) -> torch.Tensor:
    """[height, width], row-major, or the transpose of a row-major tensor."""
    if transposed:
        return device.randn(width, height, dtype=dtype, seed=seed).t()
    return device.randn(height, width, dtype=dtype, seed=seed)


def check_product(c: torch.Tensor, x: Operands, factor: float) -> str | None:
    """Rows and columns from both ends and between, against FP64."""
    rows, cols = (_some(n, most) for n, most in zip(c.shape, (192, 1536), strict=True))
    return verify.gemm(c[rows][:, cols], _codes(x.a)[rows].view(x.a.dtype),
                       _codes(x.b)[:, cols].view(x.b.dtype), factor)  # fmt: skip


def _codes(x: torch.Tensor) -> torch.Tensor:
    """Not every torch can pick rows of an FP8 tensor."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _some(count: int, most: int) -> torch.Tensor:
    third = most // 3
    if count <= most:
        return torch.arange(count, device=device.DEVICE)
    middle = torch.randint(count, (third,), generator=device.generator(count), device=device.DEVICE)
    ends = torch.arange(third, device=device.DEVICE)
    return torch.cat([ends, middle, count - 1 - ends])


def moved(shape: Shape, size: int, out: int) -> float:
    m, n, k = shape
    return float(size * (m * k + k * n) + out * m * n)


def flops(shape: Shape) -> float:
    m, n, k = shape
    return 2.0 * m * n * k


def _sums_in_fp32() -> None:
    """The baseline may not add 16-bit partial sums either."""
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def _product16(shape: Shape, dtype: torch.dtype, layout: str) -> Workload:
    _sums_in_fp32()
    m, n, k = device.sized(*shape)

    def inputs(i: int) -> Operands:
        a = operand(m, k, dtype, layout[0] == "t", 2 * i)
        return Operands(a, operand(k, n, dtype, layout[1] == "t", 2 * i + 1), None, None)

    def check() -> str | None:
        x = inputs(0)
        return check_product(mixprec.gemm(x.a, x.b), x, 1.0)

    return Workload(
        lambda x: mixprec.gemm(x.a, x.b),
        {"torch.matmul": lambda x: torch.matmul(x.a, x.b)},
        check,
        inputs,
        ops=("gemm",),
        bytes=moved((m, n, k), 2, 2),
        flops=flops((m, n, k)),
        arguments=lambda x: (*x, None, dtype, False),
    )


def _scales(shape: Shape, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """0.5 and 0.25, as many as the kind of scaling has."""
    m, n, k = shape
    chunks, columns = -(-k // BLOCK), -(-n // BLOCK)
    sizes = {
        "tensor": ((), ()),
        "row": ((m, 1), (1, n)),
        "block": ((m, chunks), (chunks, columns)),
    }[kind]
    a, b = (torch.full(s, v, device=device.DEVICE) for s, v in zip(sizes, (0.5, 0.25), strict=True))
    return a, b


def _has_bf16_baseline(shape: Shape, kind: str) -> bool:
    """_scaled_mm refuses unaligned shapes, and in many versions of torch scales per block."""
    return shape in ODD or kind == "block"


def _product8(shape: Shape, kind: str) -> Workload:
    """a [M, K] row-major, b = weight.t(): what every FP8 GEMM of Hopper takes."""
    _sums_in_fp32()
    m, n, k = device.sized(*shape)
    a_inv, b_inv = _scales((m, n, k), kind)
    a_theirs, b_theirs = a_inv, b_inv
    if kind == "block":  # which _scaled_mm takes column-major alone
        a_theirs, b_theirs = (s.t().contiguous().t() for s in (a_inv, b_inv))

    def inputs(i: int) -> Operands:
        a = operand(m, k, E4M3, False, 2 * i)
        return Operands(a, operand(k, n, E4M3, True, 2 * i + 1), a_inv, b_inv)

    def ours(x: Operands) -> torch.Tensor:
        return mixprec.gemm(
            x.a, x.b, a_scale_inv=x.a_scale_inv, b_scale_inv=x.b_scale_inv,
            out_dtype=torch.bfloat16,
        )  # fmt: skip

    def vendor(x: Operands, fast: bool) -> torch.Tensor:
        return torch._scaled_mm(
            x.a, x.b, a_theirs, b_theirs, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    def check() -> str | None:
        x = inputs(0)
        return check_product(ours(x), x, 0.125)

    baselines: dict[str, Callable[[Operands], torch.Tensor]]
    baselines = {FAST: partial(vendor, fast=True), PRECISE: partial(vendor, fast=False)}
    if _has_bf16_baseline(shape, kind):
        a16, b16 = (
            device.randn(m, k, dtype=torch.bfloat16),
            device.randn(k, n, dtype=torch.bfloat16),
        )
        baselines[BF16] = lambda _: torch.matmul(a16, b16)
    return Workload(
        ours,
        baselines,
        check,
        inputs,
        ops=("gemm",),
        bytes=moved((m, n, k), 1, 2),
        flops=flops((m, n, k)),
        arguments=lambda x: (*x, None, torch.bfloat16, False),
    )


def _accumulate(shape: Shape, dtype: torch.dtype) -> Workload:
    """A weight gradient: acc [M, N] fp32 += a @ b, with a the transpose of a row-major tensor."""
    _sums_in_fp32()
    m, n, k = device.sized(*shape)

    def inputs(i: int) -> tuple[torch.Tensor, Operands]:
        a, b = operand(m, k, dtype, True, 2 * i), operand(k, n, dtype, False, 2 * i + 1)
        return torch.zeros(m, n, device=device.DEVICE), Operands(a, b, None, None)

    def ours(x: tuple[torch.Tensor, Operands]) -> torch.Tensor:
        mixprec.gemm_accumulate_(x[0], x[1].a, x[1].b)
        return x[0]

    def check() -> str | None:
        x = inputs(0)
        return check_product(ours(x), x[1], 1.0)

    return Workload(
        ours,
        {
            "torch.addmm, fp32 out": lambda x: torch.addmm(
                x[0], x[1].a, x[1].b, out_dtype=torch.float32, out=x[0]
            ),
            "torch acc.add_(a @ b)": lambda x: x[0].add_(x[1].a @ x[1].b),
        },
        check,
        inputs,
        ops=("gemm_accumulate_",),
        bytes=moved((m, n, k), 2, 8),
        flops=flops((m, n, k)),
        arguments=lambda x: (x[0], *x[1]),
    )


def _families() -> Iterator[tuple[str, list[Shape], list[Shape]]]:
    """name, all shapes, the shapes of a short run."""
    for dtype in ("bf16", "fp16"):
        for layout in ("nt", "nn", "tn", "tt"):
            first = (dtype, layout) == ("bf16", "nt")
            yield f"{dtype}/{layout}", suite(), CORE if first else FEW
    yield "fp8/tensor", suite(), CORE
    yield "fp8/row", CORE[:15], FEW[:2]
    yield "fp8/block", CORE[:15], FEW[:2]


def _register(family: str, shape: Shape, quick: bool) -> None:
    kind, how = family.split("/")
    odd = shape in ODD
    if kind == "fp8":
        target = times_faster_than(FAST, 1.0)
        if _has_bf16_baseline(shape, how):
            target = times_faster_than(BF16, 1.0 if odd else 1.5)
        make = partial(_product8, shape, how)
        what = f"e4m3 -> bf16, scales per {how}"
    else:
        dtype = torch.bfloat16 if kind == "bf16" else torch.float16
        target = times_faster(3.0 if odd else 0.97)
        make = partial(_product16, shape, dtype, how)
        what = f"{kind}, a {_ORDER[how[0]]}, b {_ORDER[how[1]]}"
    case(f"cuda/gemm/{family}/{shape[0]}x{shape[1]}x{shape[2]}", what, target, make, quick=quick)


_ORDER = {"n": "row-major", "t": "transposed"}
for _family, _all, _core in _families():
    for _shape in _all:
        _register(_family, _shape, _shape in _core)
for _k, _n in LAYER:
    case(
        f"cuda/gemm_accumulate_/bf16/{_n}x{_k}x{TOKENS}",
        "a weight gradient added in FP32, bf16 operands",
        times_faster(1.0),
        partial(_accumulate, (_n, _k, TOKENS), torch.bfloat16),
        quick=_n == LAYER[0][1],
    )
