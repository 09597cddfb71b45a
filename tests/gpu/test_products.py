"""gemm and gemm_accumulate_ on a GPU, each variant alone: exact where sums are exact.

What a variant refuses is left out with its reason printed; a test in which it refuses everything is
skipped. FP8 tensor cores keep 13 bits of a sum until it is promoted: with integers up to 4, each
128 products add up to less than 2^12.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import FP8, LAYOUTS, WIDE, contiguous, name, normal, small_integers, transposed
from on_gpu import FAKE_DEVICE, affordable_gemms, bits_differ, moved

import mixprec
from mixprec.testing import assert_close, tolerance

DEVICE = torch.device(os.environ.get("MIXPREC_TEST_DEVICE", "cuda"))
VARIANTS = ("cuda", "triton", "vendor") if DEVICE.type == "cuda" else ("cpp", "reference")
PAIRS = (
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    *itertools.product(FP8, FP8),
)
formats = pytest.mark.parametrize("pair", PAIRS, ids=name)
ORDERS = tuple(itertools.product((contiguous, transposed), repeat=2))
# M, N, K: one element, less than a tile, odd, aligned over several tiles, K in many parts.
SHAPES = (
    (1, 1, 1),
    (1, 33, 40),
    (65, 1, 129),
    (37, 29, 7),
    (128, 128, 128),
    (255, 129, 257),
    (256, 512, 384),
    (16, 64, 2048),
    (16, 272, 4096),
    (64, 96, 8208),
    (515, 770, 1031),
)
LARGE = ((1024, 1536, 2048), (2048, 3072, 1024)) if DEVICE.type == "cuda" else ()


class Variant:
    """Runs a call on one variant; None where the variant refuses it."""

    def __init__(self, backend: str) -> None:
        self.backend, self.ran, self.refusals = backend, 0, set()

    def __call__(self, op: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            with mixprec.use_backend(self.backend):
                result = op(*args, **options)
        except RuntimeError as error:
            if "no backend can run" not in str(error):
                raise
            self.refusals.add(str(error))
            return None
        self.ran += 1
        return args[0] if result is None else result

    def gemm(self, *args: Any, **options: Any) -> torch.Tensor | None:
        return self(mixprec.gemm, *args, **options)

    def accumulate(self, *args: Any, **options: Any) -> torch.Tensor | None:
        return self(mixprec.gemm_accumulate_, *args, **options)

    def finish(self) -> None:
        for reason in sorted(self.refusals):
            print(f"left out: {reason}")
        if not self.ran:
            pytest.skip("; ".join(sorted(self.refusals)))


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Iterator[Variant]:
    return Variant(request.param)


def integers(shape: tuple[int, int], dtype: torch.dtype, device: Any, seed: int) -> torch.Tensor:
    return small_integers(shape, dtype, 4, seed).to(device)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """In FP64, exact for integers."""
    return a.double() @ b.double()


def check(got: torch.Tensor | None, want: torch.Tensor, what: str) -> None:
    """got is `want` (FP64, exact in FP32) after one rounding; zeros of either sign are zero."""
    if got is not None:
        wrong = bits_differ(got + 0.0, want.float().to(got.dtype).cpu() + 0.0)
        assert wrong is None, f"{what}: {wrong}"


@formats
def test_small_integers(
    variant: Variant, device: torch.device, poisoned: None, pair: tuple[torch.dtype, ...]
) -> None:
    for i, (m, n, k) in enumerate(affordable_gemms((*SHAPES, *LARGE))):
        a, b = integers((m, k), pair[0], device, i), integers((k, n), pair[1], device, -i)
        want, acc = product(a, b), normal((m, n), torch.float32).round().to(device)
        for order_a, order_b in ORDERS:
            left, right = order_a(a), order_b(b)
            what = f"{m} {n} {k} {name(order_a)} {name(order_b)}"
            for out in WIDE:
                got = variant.gemm(left, right, out_dtype=out)
                assert got is None or got.is_contiguous()
                check(got, want, what)
            check(variant.accumulate(acc.clone(), left, right), want + acc, what)
    variant.finish()


@pytest.mark.parametrize("layout_b", LAYOUTS, ids=name)
@pytest.mark.parametrize("layout_a", LAYOUTS, ids=name)
def test_all_layouts(variant: Variant, device: torch.device, layout_a: Any, layout_b: Any) -> None:
    """Whatever lies between the elements is NaN, and what lies around acc stays as it is."""
    for pair, (m, n, k) in itertools.product(
        (PAIRS[1], PAIRS[2], PAIRS[3]), ((17, 33, 40), (1, 19, 7), (37, 1, 70), (80, 48, 160))
    ):
        a = layout_a(small_integers((m, k), pair[0], 4, m))
        b = layout_b(small_integers((k, n), pair[1], 4, n))
        want = product(a, b)
        left, right = moved(a, device), moved(b, device)
        check(variant.gemm(left, right, out_dtype=torch.float32), want, f"{pair} {m} {n} {k}")
        frame = torch.full((m + 9, n + 7), float("nan"), device=device)
        inside = frame[4 : 4 + m, 3 : 3 + n]
        inside.zero_()
        if variant.accumulate(inside, left, right) is not None:
            check(inside.contiguous(), want, "gemm_accumulate_")
            assert frame.isnan().sum().item() == frame.numel() - m * n, "written outside of acc"
        for here, there in ((a, left), (b, right)):
            assert bits_differ(there, here) is None, "an operand has changed"
    variant.finish()


SCALED = ((160, 208, 384), (150, 131, 300), (16, 256, 1024), (40, 131, 300), (8, 200, 1024))


def scale_shapes(size: int, K: int) -> dict[str, tuple[int, int]]:
    chunks = -(-K // 128)
    return {
        "tensor": (1, 1), "row": (size, 1), "block1x128": (size, chunks),
        "block128x128": (-(-size // 128), chunks),
    }  # fmt: skip


KINDS = tuple(scale_shapes(1, 1))


def expanded(s: torch.Tensor, size: int, K: int) -> torch.Tensor:
    """The scale of every element of an operand [size, K]."""
    rows, chunks = s.shape
    i, k = torch.arange(size), torch.arange(K)
    of_row = i if rows == size else i // 128 if rows > 1 else 0 * i
    return s.double().cpu()[of_row][:, k // 128 if chunks > 1 else 0 * k]


def powers(shape: tuple[int, int], device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).float().exp2().to(device)


@pytest.mark.parametrize("out", WIDE, ids=name)
@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, repeat=2)), ids=name)
def test_scales_and_bias(
    variant: Variant, device: torch.device, kinds: tuple[str, str], out: torch.dtype
) -> None:
    """Every granularity with every other, and one rounding after all of it."""
    for i, ((m, n, k), pair) in enumerate(itertools.product(affordable_gemms(SCALED), PAIRS[1:4])):
        a, b = integers((m, k), pair[0], device, i), integers((k, n), pair[1], device, -i)
        sa = powers(scale_shapes(m, k)[kinds[0]], device, i)
        sb = powers(scale_shapes(n, k)[kinds[1]], device, i + 1)
        left = a.double() * expanded(sa, m, k).to(device)
        want = left @ (b.double() * expanded(sb, n, k).to(device).t())
        for bias_dtype in (None, *WIDE):
            bias = None
            if bias_dtype is not None:
                bias = small_integers((n,), bias_dtype, 200, seed=5).to(device)
            scales = {"a_scale_inv": sa, "b_scale_inv": transposed(sb).t()}
            got = variant.gemm(a, transposed(b), **scales, bias=bias, out_dtype=out)
            total = want if bias is None else want + bias.double()
            check(got, total, f"{m} {n} {k} {pair} bias {bias_dtype}")
        acc = integers((m, n), torch.float32, device, 3)
        check(variant.accumulate(acc.clone(), a, b, **scales), want + acc, "gemm_accumulate_")
    variant.finish()


@formats
def test_one_hot_rows_select_exactly(
    variant: Variant, device: torch.device, pair: tuple[torch.dtype, ...]
) -> None:
    """Layout and scale errors that random data hides."""
    for m, n, k in affordable_gemms(((40, 129, 300), (192, 256, 128), (3, 257, 33))):
        b = normal((k, n), torch.float32, seed=m).to(pair[1]).to(device)
        rows = torch.randint(0, k, (m,), generator=torch.Generator().manual_seed(n))
        a = torch.zeros(m, k)
        a[torch.arange(m), rows] = 1.0
        a, want = a.to(pair[0]).to(device), b.double()[rows.to(device)]
        for order_a, order_b in ORDERS:
            left, right = order_a(a), order_b(b)
            got = variant.gemm(left, right, a_scale_inv=2.0, out_dtype=torch.float32)
            check(got, want * 2.0, f"{m} {n} {k}")
            got = variant.gemm(right.t(), left.t(), b_scale_inv=0.5, out_dtype=torch.float32)
            check(got, want.t() * 0.5, f"{m} {n} {k} transposed")
    variant.finish()


@pytest.mark.parametrize("out", WIDE, ids=name)
@formats
def test_random_and_one_signed_data(
    variant: Variant, device: torch.device, pair: tuple[torch.dtype, ...], out: torch.dtype
) -> None:
    """One-signed sums grow along K: an accumulator that is too short shows there. Two runs agree
    in every bit."""
    generator = torch.Generator().manual_seed(0)
    for (m, n, k), positive in itertools.product(
        affordable_gemms(((130, 140, 300), (64, 128, 4096), (256, 256, 4096), (9, 33, 4111))),
        (False, True),
    ):
        a = (torch.rand((m, k), generator=generator) - (0 if positive else 0.5)).to(pair[0])
        b = (torch.rand((k, n), generator=generator) - (0 if positive else 0.5)).to(pair[1])
        left, right = a.to(device), transposed(b).to(device)
        got = variant.gemm(left, right, out_dtype=out)
        if got is None:
            continue
        a64, b64 = a.double(), b.double()
        short = pair[0] in FP8 and device.type == "cuda"
        bound = tolerance(a64 @ b64, a64, b64, out, fp8_tensor_core=short)
        assert_close(got.cpu(), a64 @ b64, bound)
        again = variant.gemm(left, right, out_dtype=out)
        assert bits_differ(again, got.cpu()) is None, "two runs differ"
    variant.finish()


@pytest.mark.parametrize("pair", [p for p in PAIRS if p[0] in FP8], ids=name)
def test_fast_accum_is_exact_where_the_short_accumulator_is(
    variant: Variant, device: torch.device, pair: tuple[torch.dtype, ...]
) -> None:
    for m, n, k in affordable_gemms(((64, 128, 128), (256, 256, 128), (37, 29, 70))):
        a, b = integers((m, k), pair[0], device, m), integers((k, n), pair[1], device, n)
        got = variant.gemm(a, transposed(b), out_dtype=torch.float32, fast_accum=True)
        check(got, product(a, b), f"{m} {n} {k}")
    variant.finish()


@formats
def test_empty_operands(
    variant: Variant, device: torch.device, pair: tuple[torch.dtype, ...]
) -> None:
    for m, n, k in ((0, 3, 5), (3, 0, 5), (0, 0, 0)):
        a = torch.zeros(m, k).to(pair[0]).to(device)
        b = torch.zeros(k, n).to(pair[1]).to(device)
        got = variant.gemm(a, b)
        assert got is None or got.shape == (m, n)
    a = torch.zeros(4, 0).to(pair[0]).to(device)
    b = torch.zeros(0, 2).to(pair[1]).to(device)
    bias = torch.tensor([1.0, 2.0 + 2.0**-12], device=device)
    zeros = torch.zeros(4, 2, device=device).double()
    for out in WIDE:
        check(variant.gemm(a, b, out_dtype=out), zeros, "K = 0")
        check(variant.gemm(a, b, bias=bias, out_dtype=out), zeros + bias.double(), "K = 0, bias")
    check(variant.accumulate(torch.ones(4, 2, device=device), a, b), zeros + 1, "K = 0")
    variant.finish()


@formats
def test_replays_in_a_graph(
    variant: Variant, device: torch.device, only_cuda: None, pair: tuple[torch.dtype, ...]
) -> None:
    """Captured after the same calls, because modules cannot be loaded during a capture; replayed on
    new values. Shapes of small M and large K take several parts of K."""
    for m, n, k in affordable_gemms(
        ((192, 256, 384), (16, 256, 8192), (16, 16, 8192), (65, 33, 127))
    ):
        a, b = integers((m, k), pair[0], device, 1), integers((k, n), pair[1], device, 2)
        b, acc = transposed(b), torch.zeros(m, n, device=device)
        got = variant.gemm(a, b, out_dtype=torch.float32)
        if got is None or variant.accumulate(acc, a, b) is None:
            continue
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = variant.gemm(a, b, out_dtype=torch.float32)
            variant.accumulate(acc, a, b)
        for seed in (3, 4):
            a.copy_(integers((m, k), pair[0], device, seed))
            acc.fill_(1.0)
            graph.replay()
            check(captured, product(a, b), f"replay of {m} {n} {k}")
            check(acc, product(a, b) + 1, f"replay of {m} {n} {k}, accumulated")
    variant.finish()


@formats
def test_side_stream(
    variant: Variant, device: torch.device, only_cuda: None, pair: tuple[torch.dtype, ...]
) -> None:
    m, n, k = (64, 96, 128) if FAKE_DEVICE else (512, 768, 1024)
    a = integers((m, k), pair[0], device, 1)
    b = transposed(integers((k, n), pair[1], device, 2))
    if variant.gemm(a, b) is not None:  # the comparison with the reference, on the default stream
        size = 256 if FAKE_DEVICE else 4096
        source, stream = torch.ones(size, size, device=device), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(20):
                source = source @ source / size  # work that the op has to come after
            # Ones, but only when that work is done.
            late = (a.float() * source[:m, :k]).to(pair[0])
            got = variant.gemm(late, b, out_dtype=torch.float32)
        stream.synchronize()
        check(got, product(a, b), "side stream")
    variant.finish()


@pytest.mark.large
def test_more_than_2_to_the_31_elements(
    variant: Variant, device: torch.device, only_cuda: None
) -> None:
    """Rows beyond an int32 offset of a, and of the result."""
    if torch.cuda.get_device_properties(device).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GiB of GPU memory")
    m, k = 70_016, 32_768
    a = torch.zeros(m, k, dtype=torch.bfloat16, device=device)
    a[-1] = 1.0
    thin = torch.ones(k, 16, dtype=torch.bfloat16, device=device)
    got = variant.gemm(a, thin, out_dtype=torch.float32)
    if got is not None:
        assert got[-1].eq(k).all()
        assert got[:-1].eq(0).all()
    left = torch.zeros(m, 64, dtype=torch.bfloat16, device=device)
    left[-1] = 1.0
    right = torch.ones(64, k, dtype=torch.bfloat16, device=device)
    got = variant.gemm(left, right)
    if got is not None:
        assert got[-1].eq(64).all()
        assert got[-2].eq(0).all()
    variant.finish()
