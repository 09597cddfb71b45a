"""Triton's grouped GEMM: which rows belong to which group is found on the device, also where offs
is not valid, and nothing beside the result is written."""

from __future__ import annotations

import pytest
import torch
from cases import FP8, name, small_integers, transposed
from emulated.agreement import Agreement, launcher
from emulated.triton_interpreter.helpers import choose

from mixprec.ops._dispatch.op import OPS
from mixprec.ops.gemm_grouped import gemm_grouped_accumulate_reference_, gemm_grouped_reference

REFERENCES = {
    "gemm_grouped": gemm_grouped_reference,
    "gemm_grouped_accumulate_": gemm_grouped_accumulate_reference_,
}
HALF, BF16 = torch.float16, torch.bfloat16
GROUPS = (
    ([70], 70), ([0, 0, 33, 33], 40), ([64, 64, 100], 100), ([1, 2, 3, 4, 5], 5), ([0, 0], 3),
    ([50, 20, 90, 70], 80), ([-7, 5, 99], 60),
)  # fmt: skip


def positive(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """So that a zero has one sign."""
    return small_integers(shape, torch.float32).abs().to(dtype)


@pytest.mark.parametrize(
    ("setting", "pair"), [("square", (HALF, HALF)), ("wide", (BF16, BF16)), ("tall", FP8)], ids=name
)
def test_groups_of_any_size(
    monkeypatch: pytest.MonkeyPatch, poisoned: None, setting: str, pair: tuple[torch.dtype, ...]
) -> None:
    choose(monkeypatch, setting)
    # Without its check, which refuses such offs on a CPU.
    agree = Agreement(launcher, want=lambda op: OPS[op].by_name(REFERENCES[op]))
    for turn, (ends, s) in enumerate(GROUPS):
        offs, e, k, n = torch.tensor(ends, dtype=torch.int32), len(ends), 40, 19
        a, b = positive((s, k), pair[0]), positive((e, k, n), pair[1])
        a, b = (transposed(a), b) if turn % 2 else (a, transposed(b))
        rows, columns = torch.full((s, 1), 0.5), torch.arange(1.0, e * n + 1).view(e, 1, n)
        agree("gemm_grouped", (a, b, rows, columns, offs, torch.float32, False))
        g = positive((s, n), pair[1])
        acc, of_groups = torch.ones(e, k, n), torch.arange(1.0, e + 1).view(e, 1, 1)
        agree("gemm_grouped", (a.t(), g, None, of_groups, offs, BF16, False))
        agree("gemm_grouped_accumulate_", (acc, a.t(), g, of_groups, torch.ones(()), offs))
