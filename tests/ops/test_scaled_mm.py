"""Products of block formats by torch.nn.functional.scaled_mm: its arguments pass torch's own checks
of fake CUDA tensors, and have the right values for a function that reads them as cuBLAS does."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from cases import for_each, normal
from independent import assert_same_bits
from independent_mx import dequantize
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import mixprec
from mixprec import functional
from mixprec.functional import operands
from mixprec.ops._dispatch import library, scaled_mm
from mixprec.ops._dispatch.scaled_mm import MXFP8, NVFP4, Blocks
from mixprec.ops._reference import scale_layout
from mixprec.ops.block_operands import decode
from mixprec.ops.quantize_mx import quantize_mx_op
from mixprec.recipes import RECIPES

FP32, BF16, HALF = torch.float32, torch.bfloat16, torch.float16
MIXES = ((MXFP8[0], MXFP8[0]), (MXFP8[0], MXFP8[1]), (MXFP8[1], MXFP8[0]), (NVFP4, NVFP4))
gemm_module = sys.modules["mixprec.ops.gemm"]  # mixprec.ops.gemm is the function


def blocks(
    fmt: str, rows: int, k: int, *, swizzled: bool = True, seed: int = 0, device: str = "cpu"
) -> Blocks:
    if device == "cpu":
        x = normal((rows, k), FP32, seed=seed) * torch.logspace(-9, 9, k, base=2)
    else:
        x = torch.empty((rows, k), device=device)
    raw = quantize_mx_op.handle()  # also of fake tensors, which no backend runs
    data, _, scale_inv, _, tensor, _ = raw(x, fmt, "rceil", False, None, swizzled, False)
    return Blocks(data, scale_inv, tensor if fmt == NVFP4 else None, fmt, k)


def read_scales(scales: torch.Tensor, rows: int, count: int) -> torch.Tensor:
    """From 512-byte tiles, byte by byte."""
    flat, across = scales.reshape(-1).view(torch.uint8), -(-count // 4)
    r, c = torch.arange(rows)[:, None], torch.arange(count)
    tile = r // 128 * across + c // 4
    return flat[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4]


def as_cublas(
    a: Any, b: Any, scale_a: Any, recipe_a: Any, scale_b: Any, recipe_b: Any, swizzle_a: Any,
    swizzle_b: Any, *, bias: Any, output_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """a @ b of codes and swizzled scales in FP64."""
    assert recipe_a == recipe_b
    assert swizzle_a == swizzle_b
    assert swizzle_a[0] == F.SwizzleType.SWIZZLE_32_4_4
    nvfp4 = a.dtype == torch.float4_e2m1fn_x2
    first = F.ScalingType.BlockWise1x16 if nvfp4 else F.ScalingType.BlockWise1x32
    assert recipe_a == [first, F.ScalingType.TensorWise][: 1 + nvfp4]
    wide = []
    for codes, scales in ((a, scale_a), (b.t(), scale_b)):
        fmt = NVFP4 if nvfp4 else MXFP8[codes.dtype == torch.float8_e5m2]
        assert scales[0].dtype == (torch.float8_e4m3fn if nvfp4 else torch.float8_e8m0fnu)
        k = codes.shape[1] * (1 + nvfp4)
        read = read_scales(scales[0], codes.shape[0], k // (16 if nvfp4 else 32))
        tensor = scales[1].item() if nvfp4 else None
        stored = codes.contiguous().view(torch.uint8).numpy()
        wide.append(torch.from_numpy(dequantize(stored, read.numpy(), tensor, fmt, k)).double())
    y = wide[0] @ wide[1].t()
    return (y if bias is None else y + bias.double()).to(output_dtype)


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CPU tensors take the way of those on a GPU of compute capability 10.0; the formats that were
    multiplied."""
    ran: list[str] = []

    def product(a: Blocks, b: Blocks, *rest: Any) -> torch.Tensor | None:
        if scaled_mm.why_not(a, b, (10, 0)) is not None:
            return None
        assert a.scale_inv.dim() == b.scale_inv.dim() == 4
        ran.append(a.fmt)
        return scaled_mm.multiply(a, b, *rest[:2])

    monkeypatch.setattr(gemm_module, "product_of_blocks", product)
    monkeypatch.setattr(operands, "reads_swizzled", lambda fmt, _: fmt in (*MXFP8, NVFP4))
    monkeypatch.setattr(F, "scaled_mm", as_cublas)
    return ran


@for_each("a_fmt, b_fmt", MIXES)
def test_torch_accepts_the_arguments(a_fmt: str, b_fmt: str) -> None:
    """Shapes, strides, dtypes and enums: fake tensors run the checks of `_scaled_mm_v2`."""
    for m, n, k in ((1, 16, 32), (100, 48, 96), (256, 128, 2080)):
        for out, bias in ((FP32, None), (BF16, BF16), (HALF, FP32)):
            with FakeTensorMode():
                a, b = (
                    blocks(fmt, rows, k, swizzled=swizzled, device="cuda")
                    for fmt, rows, swizzled in ((a_fmt, m, True), (b_fmt, n, m != 1))
                )
                assert scaled_mm.why_not(a, b, (10, 3)) is None
                shift = None if bias is None else torch.empty(n, dtype=bias, device="cuda")
                y = scaled_mm.multiply(a, b, shift, out)
                assert (y.shape, y.dtype, y.device.type) == ((m, n), out, "cuda")
                other = blocks(a_fmt, m, k + 128, device="cuda").scale_inv
                with pytest.raises(RuntimeError, match="must have"):
                    scaled_mm.multiply(a._replace(scale_inv=other), b, None, out)


@for_each("a_fmt, b_fmt", MIXES)
def test_values_from_swizzled_scales(
    monkeypatch: pytest.MonkeyPatch, a_fmt: str, b_fmt: str
) -> None:
    """Ragged rows, more than one tile; with all three kinds of bias."""
    monkeypatch.setattr(F, "scaled_mm", as_cublas)
    for m, n, k in ((5, 16, 32), (131, 144, 416)):
        a, b = blocks(a_fmt, m, k), blocks(b_fmt, n, k, seed=1)
        (wide_a, of_a), (wide_b, of_b) = decode(a), decode(b)
        exact = wide_a.double() @ wide_b.double().t()
        if of_a is not None and of_b is not None:
            exact = exact * of_a.double() * of_b.double()
        for out, bias in ((FP32, None), (BF16, BF16), (BF16, FP32)):
            shift = None if bias is None else normal((n,), bias, seed=2)
            y = scaled_mm.multiply(a, b, shift, out)
            want = exact if shift is None else exact + shift.double()
            torch.testing.assert_close(y.double(), want, rtol=2.0**-8, atol=1e-6)
            plain = [
                x._replace(
                    scale_inv=scale_layout.unswizzle(
                        x.scale_inv, len(x.data), k // (16 if x.fmt == NVFP4 else 32)
                    )
                )
                for x in (a, b)
            ]
            assert_same_bits(scaled_mm.multiply(*plain, shift, out), y)


def test_what_torch_cannot_do_is_refused_with_the_reason() -> None:
    e4m3, e5m2 = MXFP8
    a, b = blocks(e4m3, 5, 64), blocks(e4m3, 16, 64)
    four = blocks(NVFP4, 5, 64)
    for x, y, capability, reason in (
        (a, b, (9, 0), "on compute capability 10 and 12 only"),
        (a, b, None, "on compute capability 10 and 12 only"),
        (a, blocks("mxfp4", 16, 64, swizzled=False), (10, 0), "got mxfp8_e4m3 by mxfp4"),
        (four, b, (10, 0), "got nvfp4 by mxfp8_e4m3"),
        (blocks(e5m2, 5, 64), blocks(e5m2, 16, 64), (12, 0), "float8_e5m2 by float8_e5m2"),
        (a, blocks(e4m3, 15, 64), (10, 0), "N of 16, got K = 64 of a and 64 of b, N = 15"),
        (blocks(e4m3, 5, 48), blocks(e4m3, 16, 48), (10, 0), "multiple of 32 .* K = 48"),
        (a, blocks(e4m3, 16, 96), (10, 0), "K = 64 of a and 96 of b"),
        (blocks(e4m3, 0, 64), b, (10, 0), "K that is"),
        (a._replace(scale_inv=a.scale_inv[:, :, :16]), b, (10, 0), "each block of a"),
        (a._replace(data=b.data[::2][:5]), b, (10, 0), "contiguous codes"),
        (four._replace(tensor_scale_inv=None), blocks(NVFP4, 16, 64), (10, 0), "FP32 scale"),
    ):
        with pytest.raises(ValueError, match=f"torch.nn.functional.scaled_mm .*{reason}"):
            raise ValueError(scaled_mm.why_not(x, y, capability))
    for capability in ((10, 0), (10, 3), (12, 0)):
        assert scaled_mm.why_not(a, b, capability) is None


@for_each("name", ["mxfp8", "nvfp4-1x16", "mxfp4"])
def test_layers_give_the_gpu_swizzled_scales(
    blackwell: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """y and both gradients, and the same from the same swizzled scales, decoded."""
    product = gemm_module.product_of_blocks
    recipe = RECIPES[name]
    blackwell.clear()
    x, w, g = (normal(s, FP32, seed=i) for i, s in enumerate(((160, 96), (64, 96), (160, 64))))
    outputs = []
    for _ in range(2):
        torch.manual_seed(3)
        x.requires_grad_(), w.requires_grad_()
        with mixprec.use_backend("cpp"):  # op by op
            y = functional.linear(x, w, recipe=recipe)
        outputs.append([y.detach(), *torch.autograd.grad(y, (x, w), g)])
        ran = list(blackwell)
        monkeypatch.setattr(gemm_module, "product_of_blocks", lambda *_: None)  # decoded
    assert ran == ([] if name == "mxfp4" else [recipe.block_format(role) for role in "xgg"])
    assert len(blackwell) == len(ran)
    monkeypatch.setattr(gemm_module, "product_of_blocks", product)
    for got, want in zip(*outputs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def test_products_of_quantized(blackwell: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales in rows are swizzled for the call; blocks that are not along K are decoded."""
    monkeypatch.setattr(
        gemm_module,
        "product_of_blocks",
        lambda a, b, *rest: blackwell.append(a.fmt) or scaled_mm.multiply(a, b, *rest[:2]),
    )
    a, b = (
        mixprec.quantize(normal((n, 64), FP32, seed=n), "e4m3", granularity="mx") for n in (40, 32)
    )
    exact = mixprec.dequantize(a).double() @ mixprec.dequantize(b).double().t()
    torch.testing.assert_close(mixprec.gemm(a, b.t(), out_dtype=FP32).double(), exact)
    acc = torch.ones(40, 32)
    mixprec.gemm_accumulate_(acc, a, b.t())
    torch.testing.assert_close(acc.double(), exact + 1)
    assert len(blackwell) == 2
    square = mixprec.quantize(normal((64, 64), FP32), "e4m3", granularity="mx")
    mixprec.gemm(a, square)
    mixprec.gemm(square.t(), square.t())
    assert len(blackwell) == 2


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With exact products: a factor, and an error of torch's."""
    monkeypatch.setattr(F, "scaled_mm", as_cublas)
    monkeypatch.setattr(library, "capability", lambda _: (10, 0))
    assert scaled_mm.difference("cpu") is None

    def doubled(*args: Any, **options: Any) -> torch.Tensor:
        return as_cublas(*args, **options) * 2

    def failing(*args: Any, **options: Any) -> torch.Tensor:
        raise NotImplementedError("CUBLAS_STATUS_NOT_SUPPORTED")

    for wrong, reason in ((doubled, "is not exact"), (failing, r"fails \(CUBLAS_STATUS")):
        monkeypatch.setattr(F, "scaled_mm", wrong)
        with pytest.raises(ValueError, match=reason):
            raise ValueError(scaled_mm.difference("cpu"))

    def full(*args: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(F, "scaled_mm", full)
    with pytest.raises(RuntimeError, match="out of memory"):  # which leaves nothing out
        scaled_mm.difference("cpu")


def test_where_scales_are_swizzled(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, reads = torch.device("cuda"), scaled_mm.reads_swizzled
    for capability in ((10, 0), (12, 0), (9, 0), None):
        monkeypatch.setattr(library, "capability", lambda _, found=capability: found)
        expected = capability is not None and capability[0] >= 10
        assert [reads(fmt, gpu) for fmt in (*MXFP8, NVFP4)] == [expected] * 3
    monkeypatch.setattr(library, "capability", lambda _: (10, 0))
    assert not reads("mxfp4", gpu)
    assert not reads(NVFP4, torch.device("cpu"))
    for backend in ("cuda", "triton", "reference"):
        with mixprec.use_backend(backend):
            assert not reads(NVFP4, gpu)
    with mixprec.use_backend("vendor"):
        assert reads(NVFP4, gpu)
    monkeypatch.setenv("MIXPREC_DISABLE", "vendor:gemm")
    assert not reads(NVFP4, gpu)
