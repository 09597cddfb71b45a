"""gemm and gemm_accumulate_ on a GPU, each variant alone: the tests of test_gemm_values.py, in
graphs, and of more than 2^31 elements."""

from __future__ import annotations

import os
from dataclasses import asdict

import pytest
import torch
from cases import small_integers, transposed
from emulated.agreement import Variant
from emulated.values.test_gemm_values import *  # noqa: F403 (the tests, with the fixture below)
from emulated.values.test_gemm_values import Pair, check, formats, product
from on_gpu import FAKE_DEVICE

import mixprec
from mixprec.ops._dispatch import gemm_table

DEVICE = torch.device(os.environ.get("MIXPREC_TEST_DEVICE", "cuda"))
VARIANTS = ("cuda", "triton", "vendor") if DEVICE.type == "cuda" else ("cpp", "reference")


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, device: torch.device) -> Variant:
    most = 2**21 if FAKE_DEVICE else 2**40 if device.type == "cuda" else 2**30
    return Variant(request.param, device, most)


def integers(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return small_integers(shape, dtype, 4, seed).to(DEVICE)


def check_there(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    check(got.cpu(), want.cpu(), what)


@formats
def test_replays_in_a_graph(
    variant: Variant, device: torch.device, only_cuda: None, pair: Pair
) -> None:
    """Captured after the same calls, because modules cannot be loaded during a capture; replayed on
    new values. Shapes of small M and large K take several parts of K."""
    shapes = ((192, 256, 384), (16, 256, 8192), (16, 16, 8192), (65, 33, 127))
    for m, n, k in variant.affordable(shapes):
        a, b = integers((m, k), pair[0], 1), integers((k, n), pair[1], 2)
        b, acc = transposed(b), torch.zeros(m, n, device=device)
        got = variant(mixprec.gemm, a, b, out_dtype=torch.float32)
        if got is None or variant(mixprec.gemm_accumulate_, acc, a, b) is None:
            continue
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = variant(mixprec.gemm, a, b, out_dtype=torch.float32)
            variant(mixprec.gemm_accumulate_, acc, a, b)
        for seed in (3, 4):
            a.copy_(integers((m, k), pair[0], seed))
            acc.fill_(1.0)
            graph.replay()
            check_there(captured, product(a, b), f"replay of {m} {n} {k}")
            check_there(acc, product(a, b) + 1, f"replay of {m} {n} {k}, accumulated")
    variant.finish()


def test_accumulation_writes_its_rows_alone(variant: Variant, device: torch.device) -> None:
    """TMA adds to whole words of 16 bytes (seen on an H100), and a row may end within one. -0
    becomes 0 where 0 is added to it."""
    for m, n, pitch in ((1, 33, 33), (5, 18, 24), (9, 140, 144)):
        a = integers((m, 64), torch.bfloat16, 1)
        b = transposed(integers((64, n), torch.bfloat16, 2))
        wide = torch.full((m + 1, pitch), -0.0, device=device)
        acc = wide[:m, :n]
        if variant(mixprec.gemm_accumulate_, acc, a, b) is None:
            continue
        check_there(acc, product(a, b), f"{m} {n}")
        acc.fill_(-0.0)
        assert wide.signbit().all(), f"{m} {n}: written beside its rows"
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
    got = variant(mixprec.gemm, a, thin, out_dtype=torch.float32)
    if got is not None:
        assert got[-1].eq(k).all()
        assert got[:-1].eq(0).all()
    left = torch.zeros(m, 64, dtype=torch.bfloat16, device=device)
    left[-1] = 1.0
    right = torch.ones(64, k, dtype=torch.bfloat16, device=device)
    got = variant(mixprec.gemm, left, right)
    if got is not None:
        assert got[-1].eq(64).all()
        assert got[-2].eq(0).all()
    variant.finish()


def test_each_tile_of_the_cuda_kernel_as_a_measured_one(
    device: torch.device, only_cuda: None
) -> None:
    """As an entry of `mixprec.bench tune` chooses it, clusters too."""
    tiles = gemm_table.cuda_tiles()
    if not tiles or torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("the CUDA kernel is for compute capability 9.0")
    m, n, k = 512, 384, 256
    try:
        for of, tile in tiles.values():
            entry = gemm_table.Entry("cuda", asdict(tile))
            gemm_table.use_cuda_tiles({f"{of} {size}": entry for size in gemm_table.SIZES})
            dtype = torch.bfloat16 if of == "16-bit" else torch.float8_e4m3fn
            a, b = integers((m, k), dtype, 1), transposed(integers((k, n), dtype, 2))
            scale = torch.ones(m, k // 128, device=device) if of == "fp8 blocks" else None
            fast = of == "fp8 fast"
            with mixprec.use_backend("cuda"):
                got = mixprec.gemm(
                    a, b, a_scale_inv=scale, out_dtype=torch.float32, fast_accum=fast
                )
            check_there(got, product(a, b), f"{of} in {tile}")
        with pytest.raises(RuntimeError, match="gemm_sm90_measured: tile_configs must be 20"):
            torch.ops.mixprec.gemm_sm90_measured([0])
    finally:
        gemm_table.use_cuda_tiles({})
