"""GradScaler.unscale_ and step: what is refused, and what counts as an overflow."""

from __future__ import annotations

import math
import re
import warnings
from contextlib import nullcontext
from math import isnan
from typing import Any

import pytest
import torch
from cases import name, normal
from scalers import (
    INF,
    NAN,
    TORCHS,
    Make,
    every_optimizer,
    every_way,
    filled,
    iterate,
    our_adamw,
    param,
    step,
    torch_sgd,
    with_optimizers,
)
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import mixprec
from mixprec import ops
from mixprec.amp.grad_scaler import GradScaler
from mixprec.optim import SGD, Adam, AdamW, Lion, Muon


@every_way
def test_a_step_of_ours_without_gradients_is_an_error(explicit: bool) -> None:
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        step(GradScaler(), our_adamw([param(4)]), explicit)


@every_optimizer
def test_flags_of_any_value_and_shape_are_taken(make: Make) -> None:
    """Two ranks that both overflow make 2.0, for which torch's fused optimizers do the step.

    The gradients, which are finite, do not matter any more, as when another rank overflowed.
    """
    for shape, flag in (((), 2.0), ((1,), 2.0), ((1, 1), 1.0), ((1,), 0.0), ((1, 1), 3.0)):
        p, scaler = param(4), GradScaler(max_consecutive_skips=1)
        optimizer = make([p])
        p.grad = scaler.scale(filled((4,)))
        scaler.unscale_(optimizer)
        flags = scaler._found_inf_per_device(optimizer)
        assert len(flags) == 1
        for device in flags:
            flags[device] = torch.full(shape, flag)
        scaler.step(optimizer)
        assert torch.equal(p, torch.ones(4)) == (flag != 0)
        if flag:
            assert all(s["step"] == 0 for s in optimizer.state.values() if "step" in s)
        message = r"scale is 32768\. If it goes on"  # there is no worst parameter to name
        with pytest.raises(RuntimeError, match=message) if flag else nullcontext():
            scaler.update()
        assert scaler.get_scale() == (2.0**15 if flag else 2.0**16)
        assert scaler.overflow_report() == []


@with_optimizers(*TORCHS[:3])
def test_fp16_gradients_with_torch_optimizers(make: Make) -> None:
    p, scaler = param(4, dtype=torch.float16), GradScaler(init_scale=8.0)
    optimizer = make([p])
    p.grad = scaler.scale(filled((4,), dtype=p.dtype))
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            call(optimizer)


def test_unscale_on_fp16_gradients_warns_once() -> None:
    p, q = param(4, dtype=torch.float16), param(4, dtype=torch.bfloat16)
    optimizer, scaler = our_adamw([p]), GradScaler(init_scale=8.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            p.grad = scaler.scale(filled((4,), 3.0, dtype=p.dtype))
            scaler.unscale_(optimizer)
            assert p.grad.tolist() == [3.0, 1.0, 1.0, 1.0]
            scaler.step(optimizer)
            scaler.update()
    (warning,) = caught
    assert warning.filename == __file__
    assert re.match("GradScaler.unscale_: .*max_grad_norm", str(warning.message))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no warning without unscale_, nor for bf16
        iterate(GradScaler(), optimizer)
        scaler = GradScaler()
        q.grad = scaler.scale(filled((4,), dtype=q.dtype))
        scaler.unscale_(our_adamw([q]))


@pytest.mark.parametrize("bad", [None, NAN])
def test_sparse_gradients_of_torch_optimizers(bad: float | None) -> None:
    weight = torch.nn.Parameter(torch.ones(4, 2))
    optimizer = torch.optim.SparseAdam([weight], lr=0.1)
    scaler = GradScaler()
    rows = torch.nn.functional.embedding(torch.tensor([1, 1, 3]), weight, sparse=True)
    scaler.scale(rows.sum()).backward()
    assert weight.grad.is_sparse
    if bad is not None:
        weight.grad._values()[-1] = bad
    scaler.step(optimizer)
    scaler.update()
    changed = (weight.detach() != 1).any(dim=1).tolist()
    assert changed == ([False, True, False, True] if bad is None else [False] * 4)
    assert scaler.skipped.item() == (bad is not None)
    assert bad is not None or weight.grad.to_dense()[1].tolist() == [2.0, 2.0]


def test_fp16_sparse_gradients_are_added_up_before_they_are_checked() -> None:
    """Two entries of one row, each finite in fp16, whose sum is not."""
    weight = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float16))
    entries = torch.full((2, 2), 60000.0, dtype=torch.float16)
    scaler = GradScaler()
    scaler.scale(torch.zeros(()))
    with torch.sparse.check_sparse_tensor_invariants():  # torch warns where this is not chosen
        weight.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), entries, (3, 2))
        flags = scaler._check_inf_per_device(torch_sgd([weight]))
    assert [flag.item() for flag in flags.values()] == [1.0]


@every_way
@pytest.mark.parametrize(
    "kind", [None, GradScaler, torch.amp.GradScaler, ShardedGradScaler], ids=name
)
def test_last_step_skipped_of_an_optimizer(
    kind: type[torch.amp.GradScaler] | None, explicit: bool, one_rank: None
) -> None:
    """ShardedGradScaler's found_inf has shape [1], which torch's fused optimizers refuse."""
    p = param(4, dtype=torch.bfloat16)
    optimizer, scale = SGD([p], lr=1.0), 4.0
    scaler = kind("cpu", init_scale=scale) if kind else None
    assert not optimizer.last_step_skipped
    for bad in ((), (INF,), (), (NAN,)):
        before = p.detach().clone()
        if scaler is None:
            p.grad = filled((4,), *bad, dtype=p.dtype)
            optimizer.step()
        else:
            iterate(scaler, optimizer, *bad, explicit=explicit)
            scale *= 0.5 if bad else 1.0
            assert scaler.get_scale() == scale
        assert optimizer.last_step_skipped == bool(bad)
        assert torch.equal(p, before) == bool(bad)
    optimizer.zero_grad()
    optimizer.step()
    assert not optimizer.last_step_skipped, "a step without gradients was not skipped"


def test_our_optimizer_survives_the_scale_0_of_torchs_scaler() -> None:
    p = param(3)
    optimizer = our_adamw([p])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-149)
    iterate(scaler, optimizer, INF)
    assert scaler.get_scale() == 0.0
    for _ in range(3):
        iterate(scaler, optimizer, 0.0, 0.0, 0.0)
    assert torch.equal(p, torch.ones(3))


@pytest.mark.exhaustive
def test_more_than_2_to_the_31_elements() -> None:
    """DeepSpeed did not update such tensors. Rows that overlap in memory: 200 KB hold 2^31 + 2^16
    elements, of which only the last is not 1. (To write as many takes 8 GB: not here.)"""
    rows, columns = 2**15 + 1, 2**16
    for bad in (NAN, 0.0):
        memory = torch.ones(rows + columns - 1, dtype=torch.bfloat16)
        memory[-1] = bad
        grad = memory.as_strided((rows, columns), (1, 1))
        found_inf, counts = torch.zeros(()), torch.zeros(1, 4, dtype=torch.int64)
        sum_sq = torch.zeros(1, dtype=torch.float64)
        ops.grad_stats_([grad], None, found_inf, sum_sq, counts)
        assert found_inf.item() == isnan(bad)
        assert counts.tolist() == [[0, 1, 0, 0] if isnan(bad) else [0, 0, 1, 0]]
        assert isnan(bad) or sum_sq.item() == rows * columns - 1


# torch.compile of a whole step: what reads gradients stays outside of the graph


class Run:
    def __init__(self, recipe: str, scaled: bool, kind: type[torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        dtype = torch.float16 if recipe == "fp16" else torch.bfloat16
        self.model = mixprec.cast_parameters(mixprec.convert(layers, recipe), dtype)
        self.optimizer = kind(self.model.parameters(), lr=1e-2, max_grad_norm=1.0)
        self.scaler = mixprec.GradScaler("cpu", 2.0**10, growth_interval=2, enabled=scaled)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).float().square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        mixprec.update_scales(self.model)
        return loss

    def everything(self) -> list[Any]:
        states = [t for s in self.optimizer.state.values() for t in s.values()]
        return [*self.model.state_dict().values(), *states, self.scaler.get_scale()]


@pytest.mark.parametrize(
    ("recipe", "scaled", "kind"),
    [
        ("fp16", True, AdamW),
        ("fp8-delayed", False, Adam),
        *(("bf16", False, kind) for kind in (SGD, Lion, Muon)),
    ],
)
def test_a_compiled_train_step_gives_the_bits_of_an_eager_one(
    recipe: str, scaled: bool, kind: type[torch.optim.Optimizer]
) -> None:
    runs = [Run(recipe, scaled, kind) for _ in range(2)]
    steps = [runs[0].step, torch.compile(runs[1].step, backend="aot_eager")]
    for i in range(4):
        x = normal((4, 16), next(runs[0].model.parameters()).dtype, seed=i)
        x[0, 0] = math.inf if i == 1 else x[0, 0]
        losses = [step(x) for step in steps]
    torch.testing.assert_close(*losses, rtol=0, atol=0)
    torch.testing.assert_close(*(run.everything() for run in runs), rtol=0, atol=0)
    assert all(int(run.optimizer.skipped) == 1 for run in runs)
