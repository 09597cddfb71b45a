"""Defects of torch.amp, apex, Transformer Engine and others that ours must not have."""

from __future__ import annotations

import math

import pytest
import torch
from cases import LAYOUTS, Layout, contiguous, name, normal
from scalers import iterate, param

from mixprec import ops
from mixprec.amp.grad_scaler import GradScaler
from mixprec.optim import AdamW


def test_our_optimizer_survives_the_scale_0_of_torchs_scaler() -> None:
    p = param(3)
    optimizer = AdamW([p], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-149)
    iterate(scaler, optimizer, p, math.inf)
    assert scaler.get_scale() == 0.0
    for _ in range(3):
        iterate(scaler, optimizer, p, 0.0, 0.0, 0.0)
    assert torch.equal(p, torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_gradients_of_every_layout(layout: Layout, dtype: torch.dtype) -> None:
    """The bits of contiguous ones. torch's fused optimizers ignore strides unlike the param's."""
    results = []
    for change in (layout, lambda g: contiguous(layout(g))):
        p = param(5, 6, dtype=dtype)
        optimizer, scaler = AdamW([p], lr=0.1, max_grad_norm=0.5), GradScaler(init_scale=4.0)
        scaler.scale(torch.zeros(()))
        p.grad = change(normal((5, 6), dtype) * 4)
        scaler.step(optimizer)
        results.append((p.detach(), optimizer.state[p]["exp_avg"], optimizer.grad_norm))
    (p, exp_avg, norm), (q, expected, its_norm) = results
    assert torch.equal(p, q)
    assert torch.equal(exp_avg, expected)
    torch.testing.assert_close(norm, its_norm, rtol=1e-14, atol=0.0)  # another order of sums


@pytest.mark.exhaustive
def test_more_than_2_to_the_31_elements() -> None:
    """DeepSpeed did not update such tensors. Rows that overlap in memory: 200 KB hold 2^31 + 2^16
    elements, of which only the last is not 1. (To write as many takes 8 GB: not here.)"""
    rows, columns = 2**15 + 1, 2**16
    for bad in (math.nan, 0.0):
        memory = torch.ones(rows + columns - 1, dtype=torch.bfloat16)
        memory[-1] = bad
        grad = memory.as_strided((rows, columns), (1, 1))
        found_inf, counts = torch.zeros(()), torch.zeros(1, 4, dtype=torch.int64)
        sum_sq = torch.zeros(1, dtype=torch.float64)
        ops.grad_stats_([grad], None, found_inf, sum_sq, counts)
        assert found_inf.item() == math.isnan(bad)
        assert counts.tolist() == [[0, 1, 0, 0] if math.isnan(bad) else [0, 0, 1, 0]]
        assert math.isnan(bad) or sum_sq.item() == rows * columns - 1
