"""How the Hopper GEMM finds its operands and their scales (gemm_layout.h), no GPU."""

from __future__ import annotations

import pytest
import torch
from emulated.gemm_plan.plan import Granularity, Major, compiled

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def strided(t: torch.Tensor, row: int, address: int | None = None) -> tuple[object, ...]:
    where = t.data_ptr() if address is None else address
    return where, tuple(t.shape), t.stride(), row


def check_arrangement(t: torch.Tensor, row: int) -> tuple[object, int, bool]:
    """What is said of t is what TMA needs, and true where t is used in place."""
    size = t.element_size()
    major, pitch, copied = compiled().arrangement_of(strided(t, row), size)
    inner = 1 - row if major == Major.k else row
    assert size > 1 or major == Major.k, "FP8 has to lie along K"
    assert pitch * size % 16 == 0
    assert pitch >= t.shape[inner]
    if not copied:
        assert t.data_ptr() % 16 == 0
        # Every element where the lines say it is; a dimension of one element has any stride.
        wanted = {inner: 1, 1 - inner: pitch}
        assert all(t.shape[d] <= 1 or t.stride(d) == wanted[d] for d in (0, 1))
    return major, pitch, copied


def test_in_place_or_copied() -> None:
    x = torch.zeros(64, 96, dtype=BF16)
    q = torch.zeros(64, 96, dtype=FP8)
    k, mn = Major.k, Major.mn
    rows = (
        # a [M, K] in the rows of x; b [K, N]; a's transpose as a [K, M]^T
        (x, 0, k, 96, False),
        (x, 1, mn, 96, False),
        (x.t(), 0, mn, 96, False),
        (x.t(), 1, k, 96, False),
        (q, 0, k, 96, False),
        (q, 1, k, 64, True),  # FP8 along N
        (q.t(), 0, k, 64, True),
        (q.t(), 1, k, 96, False),
        (x[:, :40], 0, k, 96, False),  # a pitch larger than the line
        (x[:, 4:40], 0, k, 40, True),  # 8 bytes after a boundary
        (q[:, 16:20], 0, k, 96, False),
        (q[:, 8:20], 0, k, 16, True),
        (x[::2], 0, k, 192, False),
        (x[:, ::2], 0, k, 48, True),  # no unit stride at all
        (x[:1, :5], 0, k, 8, False),  # one line: its pitch is never used
        (x[:1].expand(64, 96), 0, k, 96, True),  # every row the same memory
        (torch.zeros(7, 13, dtype=BF16), 0, k, 16, True),
        (torch.zeros(7, 13, dtype=FP8), 0, k, 16, True),
        (torch.zeros(7, 1, dtype=FP8), 1, k, 16, False),  # one line of 7 along K
    )
    for t, row, *want in rows:
        found = check_arrangement(t, row)
        assert list(found) == want, (t.shape, t.stride(), t.dtype, row)


def check_scales(scales: torch.Tensor, rows: int, k: int, row: int) -> None:
    """scales: (r, c) for a (row 0), (c, r) for b (row 1)."""
    matrix = scales if row == 0 else scales.t()
    (r, c), chunks, block_rows = matrix.shape, -(-k // 128), -(-rows // 128)
    operand = torch.empty((rows, k) if row == 0 else (k, rows), device="meta")
    found = compiled().scales_of(strided(scales, row), strided(operand, row, 0))
    if (r not in (rows, block_rows) and (r, c) != (1, 1)) or c not in (1, chunks):
        assert found is None, (r, c, rows, k)
        return
    row_stride, chunk_stride, shift, granularity = found
    by_chunk = Granularity.block1x128 if r == rows else Granularity.block128x128
    by_row = Granularity.tensor if r == 1 else Granularity.row
    assert granularity == (by_chunk if c > 1 else by_row), (r, c, rows, k)
    memory = scales.as_strided((scales.untyped_storage().size() // 4,), (1,), 0)
    for i in range(rows):
        of_row = i if r == rows else i // 128 if r == block_rows else 0
        for j in range(chunks):
            at = scales.storage_offset() + (i >> shift) * row_stride + j * chunk_stride
            assert memory[at] == matrix[of_row, j if c > 1 else 0], (r, c, rows, k, i, j)


@pytest.mark.parametrize("row", [0, 1], ids=["a", "b"])
def test_scales_are_found_where_the_contract_says(row: int) -> None:
    for rows in (1, 3, 128, 129, 300):
        for k in (1, 128, 129, 500):
            block_rows, chunks = -(-rows // 128), -(-k // 128)
            for r in {1, 2, block_rows, block_rows + 1, rows}:
                for c in {1, 2, 3, chunks}:
                    values = torch.arange(r * c, dtype=torch.float32).reshape(r, c)
                    for laid in (values, values.t().contiguous().t()):
                        check_scales(laid if row == 0 else laid.t(), rows, k, row)
                    spaced = torch.zeros(2 * r, 3 * c)
                    spaced[::2, ::3] = values
                    view = spaced[::2, ::3]
                    check_scales(view if row == 0 else view.t(), rows, k, row)


@pytest.mark.parametrize("row", [0, 1], ids=["a", "b"])
def test_scales_that_tma_reads_in_place(row: int) -> None:
    """For 40 rows and 3 chunks of K: a chunk's scales are neighbours, and start at 16 bytes."""
    room = torch.zeros(3, 48)
    rows = (
        (room[:, :40], True),
        (room[:, 4:44], True),
        (room[:, 2:42], False),
        (torch.zeros(3, 42)[:, :40], False),  # the second chunk starts 8 bytes after a boundary
        (torch.zeros(40, 3).t(), False),  # as quantize writes them
        (torch.zeros(3, 80)[:, ::2], False),
        (torch.zeros(3, 1).expand(3, 40), False),
        (torch.zeros(40).expand(3, 40), False),  # no pitch
        (torch.zeros(3, 1), False),  # 128 x 128
    )
    operand = torch.empty((40, 300) if row == 0 else (300, 40), device="meta")
    for scales, want in rows:
        given = scales.t() if row == 0 else scales
        found = compiled().is_outer_major(strided(given, row), strided(operand, row, 0))
        assert found == want, (scales.shape, scales.stride())
