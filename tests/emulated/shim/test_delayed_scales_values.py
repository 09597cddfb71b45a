"""update_delayed_scales_, which has no kernel of Triton, on the shim."""

from __future__ import annotations

import pytest
import torch
from emulated.agreement import Agreement
from emulated.shim import runner


@pytest.mark.parametrize("n", [8, 9, 1001])  # one launch of either kind, and two
def test_delayed_scales_of_many_tensors(n: int) -> None:
    agree = Agreement(runner.OPS.__getitem__)
    amaxes = torch.tensor([0.0, 2.0**-149, 0.3, 447.0, 3e38, torch.inf, torch.nan, -1.0])
    limits = ([448.0, 448.0, 57344.0] * n)[:n]
    for i, length in enumerate((1, 5, 4)):
        histories = [torch.full((length,), 2.0 ** (k % 60)) for k in range(n)]
        lists = [histories, [torch.tensor(3.0)] * n, list(amaxes.repeat(n)[:n]), limits]
        agree("update_delayed_scales_", [*lists, i - 1, i == 1, i == 2])
