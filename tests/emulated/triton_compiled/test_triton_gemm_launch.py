"""The launcher of the Triton GEMM, up to the launch itself: grid, constants, host cost."""

from __future__ import annotations

import itertools

import pytest
import torch
from cases import FP8, contiguous, name, offset, padded_rows, transposed
from emulated.triton_compiled.helpers import Launch, record_launches

from mixprec.triton_kernels import gemm


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """On a GPU with 132 multiprocessors."""
    monkeypatch.setattr(gemm, "_gpu", lambda _: (90, 132))
    return record_launches(monkeypatch)


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(m, k).to(dtype), torch.zeros(n, k).to(dtype).t()


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8[0]], ids=name)
def test_what_is_launched(launched: list[Launch], dtype: torch.dtype) -> None:
    a, b = operands(2048, 4096, 256, dtype)
    out = gemm.gemm(a, b, torch.ones(()), torch.ones(1, 4096), None, torch.bfloat16, False)
    assert (out.shape, out.dtype) == ((2048, 4096), torch.bfloat16)
    (one,) = launched
    keywords = one.keywords
    assert (one.name, one.grid) == ("gemm_kernel", (132,))
    assert keywords["TMA"] is True
    assert keywords["PROMOTE"] is (dtype in FP8)
    assert (keywords["A_SCALE"], keywords["B_SCALE"]) == ("scalar", "rows")
    assert "wgmma" in one.compiled.asm["ptx"]


def test_split_products_take_two_launches(launched: list[Launch]) -> None:
    a, b = operands(16, 512, 8192, torch.bfloat16)
    gemm.gemm_accumulate_(torch.zeros(16, 512), a, b, None, None)
    first, second = launched
    assert (first.name, second.name) == ("gemm_kernel", "reduce_kernel")
    assert first.grid == (64,)  # 8 tiles, 8 parts
    assert (first.keywords["SPLIT"], second.keywords["ACCUMULATE"]) == (True, True)


def test_awkward_sizes_and_addresses(launched: list[Launch]) -> None:
    """A size of 1 becomes a constant in Triton, and addresses of odd elements lose alignment."""
    for i, ((m, n, k), order) in enumerate(
        itertools.product(
            ((1, 1, 1), (1, 7, 1), (7, 1, 33)), (contiguous, transposed, offset, padded_rows)
        )
    ):
        a, b = operands(m, n, k, (torch.float16, FP8[1])[i % 2])
        if i % 3:
            bias = torch.zeros(n)
            gemm.gemm(order(a), order(b), None, None, bias, torch.float16, False)
        else:
            scales = torch.ones(m, -(-k // 128)), torch.ones(-(-k // 128), 1)
            gemm.gemm_accumulate_(torch.zeros(n, m).t(), order(a), order(b), *scales)
    assert not any("\t.local" in one.compiled.asm["ptx"] for one in launched)


def test_nothing_is_launched_for_empty_products(launched: list[Launch]) -> None:
    for m, n, k in ((0, 3, 5), (3, 0, 5), (3, 4, 0)):
        a, b = operands(m, n, k, torch.float16)
        assert gemm.gemm(a, b, None, None, None, torch.float16, False).shape == (m, n)
        gemm.gemm_accumulate_(torch.zeros(m, n), a, b, None, None)
    assert launched == []
