"""The comparison before a CUDA kernel is first used, with the kernels on the shim: results begin at
16-byte boundaries, as those of a GPU do."""

from __future__ import annotations

import pytest
import torch
from emulated.agreement import Agreement
from emulated.shim import runner

from mixprec.ops._dispatch.op import OPS


@pytest.mark.parametrize("op", runner.OPS)
def test_examples(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    monkeypatch.setattr(runner, "SHIFTS", (0,))
    found = OPS[op].difference(runner.OPS[op], "cpu")
    assert found is None, found


@pytest.mark.parametrize("n", [8, 9, 1001])  # one launch of either kind, and two
def test_delayed_scales_of_many_tensors(n: int) -> None:
    agree = Agreement(runner.OPS.__getitem__)
    amaxes = torch.tensor([0.0, 2.0**-149, 0.3, 447.0, 3e38, torch.inf, torch.nan, -1.0])
    limits = ([448.0, 448.0, 57344.0] * n)[:n]
    for i, length in enumerate((1, 5, 4)):
        histories = [torch.full((length,), 2.0 ** (k % 60)) for k in range(n)]
        lists = [histories, [torch.tensor(3.0)] * n, list(amaxes.repeat(n)[:n]), limits]
        agree("update_delayed_scales_", [*lists, i - 1, i == 1, i == 2])
