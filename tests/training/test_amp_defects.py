"""Defects of torch.amp, apex, Transformer Engine and others that ours must not have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from cases import LAYOUTS, WRITABLE, Layout, contiguous, name, normal
from optimizers import our_adamw, torch_fused, torch_plain
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from mixprec import ops
from mixprec.amp.grad_scaler import GradScaler
from mixprec.optim import SGD, Adam, AdamW

OURS = (AdamW, Adam, SGD)
MIN_SCALE = 2.0**-24
Optimizer = torch.optim.Optimizer


def param(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(shape, dtype=dtype))


every_make = pytest.mark.parametrize("make", [our_adamw, torch_fused, torch_plain], ids=name)


def iterate(
    scaler: torch.amp.GradScaler, optimizer: Optimizer, p: torch.Tensor, *bad: float
) -> None:
    """One iteration on the loss p.sum(); `bad` is written into the scaled gradient."""
    p.grad = None
    scaler.scale(p.sum()).backward()
    for i, value in enumerate(bad):
        p.grad[i] = value
    scaler.step(optimizer)
    scaler.update()


def is_one(p: torch.Tensor) -> bool:
    return torch.equal(p, torch.ones_like(p))


@every_make
def test_the_scale_does_not_collapse(make: Callable) -> None:
    """torch's scale is 0 after 166 overflows; then 1 / 0 * 0 is NaN, and 0 * 2 never recovers."""
    scaler, p = GradScaler(growth_interval=1), param(3)
    optimizer = make([p])
    for _ in range(166):
        iterate(scaler, optimizer, p, math.inf)
    assert is_one(p)
    assert scaler.get_scale() == MIN_SCALE
    for _ in range(40):
        iterate(scaler, optimizer, p)
    assert scaler.get_scale() == 2.0**16
    assert (p < 0).all()  # it trains: 40 steps of 0.05


def test_our_optimizer_survives_the_scale_0_of_torchs_scaler() -> None:
    p = param(3)
    optimizer = AdamW([p], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-149)
    iterate(scaler, optimizer, p, math.inf)
    assert scaler.get_scale() == 0.0
    for _ in range(3):
        iterate(scaler, optimizer, p)
    assert is_one(p)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_sharded_grad_scaler_after_unscale(one_rank: None) -> None:
    """Its found_inf has shape [1], which torch's fused optimizers refuse."""
    for bad in (False, True):
        p = param(3)
        optimizer, scaler = AdamW([p], lr=0.1), ShardedGradScaler(device="cpu")
        scaler.scale(p.sum()).backward()
        if bad:
            p.grad[0] = math.inf
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert is_one(p) == bad
        assert scaler.get_scale() == (2.0**15 if bad else 2.0**16)


@every_make
def test_lr_schedules_follow_applied_steps(make: Callable) -> None:
    """torch's scaler does not show a step that a fused optimizer skipped: schedules move on."""
    for way in ("applied_steps", "last_step_skipped"):
        scaler, p = GradScaler(), param(3)
        optimizer = make([p])
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
        optimizer.step()  # without gradients: the schedule warns if it comes first
        for bad in ([math.nan], [], [math.inf], [math.inf], []):
            iterate(scaler, optimizer, p, *bad)
            if way == "applied_steps":
                while schedule.last_epoch < scaler.applied_steps:
                    schedule.step()
            elif not scaler.last_step_skipped:
                schedule.step()
        assert schedule.get_last_lr() == [optimizer.defaults["lr"] * 0.5**2]


@pytest.mark.parametrize("ours", OURS, ids=name)
def test_clipping_inside_the_optimizer_is_clipping_outside(ours: type[Optimizer]) -> None:
    """Lightning does not clip for optimizers that unscale by themselves; ours clip inside."""
    inside, outside = (
        [torch.nn.Parameter(normal(s, torch.float32, seed=i)) for i, s in enumerate(((4, 3), (5,)))]
        for _ in range(2)
    )
    clipping, other = ours(inside, lr=0.1, max_grad_norm=0.5), ours(outside, lr=0.1)
    a, b = GradScaler(), GradScaler()
    for step in range(6):
        for scaler, optimizer, params in ((a, clipping, inside), (b, other, outside)):
            for p in params:
                p.grad = None
            scaler.scale(sum((p**2).sum() for p in params)).backward()
            if step == 3:
                params[1].grad[0] = math.inf
            if optimizer is other:
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(params, 0.5)
            scaler.step(optimizer)
            scaler.update()
        torch.testing.assert_close(clipping.grad_norm.float(), norm, equal_nan=True)
        for p, q in zip(inside, outside, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert a.skipped.item() == b.skipped.item() == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["grad", "param"])
def test_nan_stays_nan_under_stochastic_rounding(where: str, bad: float) -> None:
    """torchao made -0.0 of it on CUDA. The op alone, without a flag to skip."""
    size = 257
    p = torch.full((size,), bad if where == "param" else 1.0, dtype=torch.bfloat16)
    grad = torch.full((size,), bad if where == "grad" else 1.0, dtype=torch.bfloat16)
    moments = [torch.zeros(size, dtype=torch.bfloat16) for _ in range(2)]
    for seed in range(3):
        q, m, v = p.clone(), *(t.clone() for t in moments)
        ops.adamw_(
            [q],
            [grad],
            [m],
            [v],
            [],
            torch.zeros(1),
            lr=0.1,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=0.01,
            stochastic_rounding=True,
            seed=seed,
            indices=[0],
        )
        s = p.clone()
        ops.sgd_(
            [s],
            [grad],
            [],
            [],
            torch.zeros(1),
            lr=0.1,
            momentum=0.0,
            dampening=0.0,
            weight_decay=0.0,
            stochastic_rounding=True,
            seed=seed,
            indices=[0],
        )
        if where == "grad":
            assert q.isnan().all()  # also of Inf / Inf
            assert torch.equal(m, grad * 0.1) if math.isinf(bad) else m.isnan().all()
            assert torch.equal(s, -grad) if math.isinf(bad) else s.isnan().all()
        else:
            for after in (q, s):
                assert after.isnan().all() if math.isnan(bad) else not after.isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name)
@pytest.mark.parametrize("ours", OURS, ids=name)
def test_tensors_without_elements_leave_their_neighbours_alone(
    ours: type[Optimizer], dtype: torch.dtype
) -> None:
    """Transformer Engine skipped or corrupted the next tensor in the list."""
    shapes = [(0,), (3,), (0, 5), (4, 2), (7,), (2, 0, 3)]
    results = []
    for kept in (shapes, [s for s in shapes if math.prod(s)]):
        params = [torch.nn.Parameter(normal(s, dtype, seed=math.prod(s))) for s in kept]
        optimizer = ours(params, lr=0.1, max_grad_norm=1.0)
        scaler = GradScaler(init_scale=8.0)
        for step in range(4):
            scaler.scale(torch.zeros(()))
            for p in params:
                p.grad = normal(p.shape, dtype, seed=step)
            if step == 1:
                params[-1 if kept is not shapes else -2].grad[0] = math.inf
            if step > 1 and dtype != torch.float16:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.skipped.item() == 1
        full = [p for p in params if p.numel()]
        results.append([(p.detach(), optimizer.state[p]) for p in full])
    for (p, state), (q, expected) in zip(*results, strict=True):
        assert torch.equal(p, q)
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[k], expected[k]) for k in state)


@pytest.mark.parametrize("ours", OURS, ids=name)
def test_lists_longer_than_any_table(ours: type[Optimizer]) -> None:
    """apex packs at most 110 tensors and 320 blocks into one launch."""
    count = 701
    joined = torch.nn.Parameter(normal((count,), torch.float32))
    params = [torch.nn.Parameter(joined.detach()[i : i + 1].clone()) for i in range(count)]
    one, many = ours([joined], lr=0.1), ours(params, lr=0.1)
    scaler = GradScaler()
    for step in range(3):
        joined.grad = scaler.scale(normal((count,), torch.float32, seed=step))
        for p, g in zip(params, joined.grad.split(1), strict=True):
            p.grad = g.clone()
        if step == 1:
            joined.grad[-1] = params[-1].grad[0] = math.nan
        scaler.step(one)
        scaler.step(many)
        scaler.update()
    assert scaler.skipped.item() == 1
    assert torch.equal(joined, torch.cat([p.detach() for p in params]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_gradients_of_every_layout(layout: Layout, dtype: torch.dtype) -> None:
    """The bits of contiguous ones; unscale_ refuses only elements that share memory.

    torch's fused optimizers ignore strides that differ from the param's.
    """
    values = normal((5, 6), dtype)
    for explicit in (False, True):
        results = []
        for change in (layout, lambda g: contiguous(layout(g))):
            p = param(5, 6, dtype=dtype)
            optimizer, scaler = AdamW([p], lr=0.1, max_grad_norm=0.5), GradScaler(init_scale=4.0)
            scaler.scale(torch.zeros(()))
            p.grad = change(values * 4)
            if explicit and change is layout and layout not in WRITABLE:
                with pytest.raises(ValueError, match=r"unscale_: grads\[0\] .* share memory"):
                    scaler.unscale_(optimizer)
            elif explicit:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            results.append((p.detach(), optimizer.state[p]["exp_avg"], optimizer.grad_norm))
        if explicit and dtype == torch.bfloat16:
            continue  # rounded once more, or not, where unscale_ was refused
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
