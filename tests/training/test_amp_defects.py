"""Defects of torch.amp and its peers, shown on torch's classes where they have them, not on ours.

The sections are those of the list that this library was designed against. Defects of packages that
are not installed (apex, torchao, Transformer Engine, DeepSpeed), and those that torch has mended
since, are tested on ours alone; a docstring says so.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import LAYOUTS, WRITABLE, Layout, contiguous, name, normal
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from mixprec import ops
from mixprec.amp.grad_scaler import GradScaler
from mixprec.optim import SGD, Adam, AdamW

FUSED, FOREACH, PLAIN = {"fused": True}, {"foreach": True}, {"foreach": False}
IMPLEMENTATIONS = (FUSED, FOREACH, PLAIN)
OURS = (AdamW, Adam, SGD)
MIN_SCALE = 2.0**-24
Optimizer = torch.optim.Optimizer


def param(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(shape, dtype=dtype))


def torch_scaler(**settings: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **settings)


def ours_fused(params: list[torch.Tensor]) -> Optimizer:
    return AdamW(params, lr=0.1)


def torch_fused(params: list[torch.Tensor]) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.1, fused=True)


def torch_plain(params: list[torch.Tensor]) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.1, foreach=False)


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


# 1. A found_inf of 2, from two devices or ranks that both overflowed


@pytest.mark.parametrize("theirs", ["AdamW", "Adam", "Adagrad", "SGD"])
def test_torch_applies_the_step_of_two_overflows(theirs: str) -> None:
    p = param(3)
    optimizer = getattr(torch.optim, theirs)([p], lr=0.1, fused=True)
    p.grad = torch.full((3,), math.nan)
    optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(2.0)
    optimizer.step()
    assert p.isnan().all()
    assert theirs == "SGD" or optimizer.state[p]["step"].item() == -1


@pytest.mark.parametrize("flag", [2.0, 0.5, 1e-45, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("grad_scale", [None, 1.0])
@pytest.mark.parametrize("ours", OURS, ids=name)
def test_ours_skips_for_every_flag_but_0(
    ours: type[Optimizer], grad_scale: float | None, flag: float
) -> None:
    p = param(3)
    optimizer = ours([p], lr=0.1)
    p.grad = torch.full((3,), math.nan if grad_scale is None else 1.0)
    optimizer.grad_scale = None if grad_scale is None else torch.tensor(grad_scale)
    optimizer.found_inf = torch.tensor(flag)
    optimizer.step()
    assert is_one(p)
    assert optimizer.state[p]["step"].item() == 0
    assert optimizer.skipped.item() == 1


def summed_over_two_ranks(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
    """What an all-reduce of the flags does when two ranks overflow."""
    for flag in scaler._found_inf_per_device(optimizer).values():
        flag.mul_(2.0)


@pytest.mark.parametrize("make", [ours_fused, torch_fused, torch_plain], ids=name)
def test_a_sum_of_flags_through_the_scaler(make: Callable) -> None:
    for scaler in (GradScaler(), torch_scaler()):
        p = param(3)
        optimizer = make([p])
        scaler.scale(p.sum()).backward()
        p.grad[0] = math.nan
        scaler.unscale_(optimizer)
        summed_over_two_ranks(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**15
        torchs_defect = make is torch_fused and not isinstance(scaler, GradScaler)
        assert is_one(p) != torchs_defect
        assert p.isnan().any() == torchs_defect


# 2. The collapse of the scale


@pytest.mark.parametrize("make", [ours_fused, torch_fused, torch_plain], ids=name)
def test_the_scale_collapses_and_never_recovers(make: Callable) -> None:
    for scaler in (torch_scaler(growth_interval=1), GradScaler(growth_interval=1)):
        p = param(3)
        optimizer = make([p])
        for _ in range(166):
            iterate(scaler, optimizer, p, math.inf)
        assert is_one(p)
        if isinstance(scaler, GradScaler):
            assert scaler.get_scale() == MIN_SCALE
            for _ in range(40):
                iterate(scaler, optimizer, p)
            assert scaler.get_scale() == 2.0**16
            assert (p < 0).all()  # it trains: 40 steps of 0.1
        elif make is not ours_fused:  # that holds its own against a torch scaler of scale 0
            assert scaler.get_scale() == 0.0
            iterate(scaler, optimizer, p)  # a gradient of 0, times 1 / 0, after the check
            assert p.isnan().all()
            for _ in range(20):
                iterate(scaler, optimizer, p, 0.0, 0.0, 0.0)
            assert scaler.get_scale() == 0.0
            assert scaler.state_dict()["_growth_tracker"] == 0  # it did grow: 0 * 2 = 0


def test_our_optimizer_survives_the_scale_0_of_torchs_scaler() -> None:
    p = param(3)
    optimizer = AdamW([p], lr=0.1)
    scaler = torch_scaler(init_scale=2.0**-149)
    iterate(scaler, optimizer, p, math.inf)
    assert scaler.get_scale() == 0.0
    for _ in range(3):
        iterate(scaler, optimizer, p)
    assert is_one(p)


@pytest.mark.parametrize("make", [ours_fused, torch_fused, torch_plain], ids=name)
def test_a_value_that_overflows_by_unscaling(make: Callable) -> None:
    """torch checks before it multiplies by 1 / scale: finite gradients become infinite updates."""
    for scaler in (torch_scaler(init_scale=2.0**-10), GradScaler(init_scale=2.0**-10)):
        p = param(3)
        iterate(scaler, make([p]), p, 1e37)
        if isinstance(scaler, GradScaler):
            assert is_one(p)
            assert scaler.get_scale() == 2.0**-11
        elif make is not ours_fused:
            assert p[0].isnan()
            assert scaler.get_scale() == 2.0**-10


@pytest.mark.parametrize("make", [ours_fused, torch_fused, torch_plain], ids=name)
def test_many_skips_are_said_aloud_only_if_asked_for(make: Callable) -> None:
    p = param(3)
    optimizer = make([p])
    scaler = GradScaler(max_consecutive_skips=5)
    for _ in range(4):
        iterate(scaler, optimizer, p, math.nan)
    with pytest.raises(RuntimeError, match=r"last 5 updates .*'params'\]\[0\].*: 1 NaN among 3"):
        iterate(scaler, optimizer, p, math.nan)
    quiet = GradScaler()
    for _ in range(60):  # 20 of them at the floor, which is no reason to raise
        iterate(quiet, optimizer, p, math.nan)
    assert quiet.get_scale() == MIN_SCALE
    assert is_one(p)


# 3. found_inf of shape [1]


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("bad", [(), (math.inf,)])
@pytest.mark.parametrize("make", [ours_fused, torch_fused], ids=name)
def test_sharded_grad_scaler_after_unscale(one_rank: None, make: Callable, bad: tuple) -> None:
    """torch's own sharded scaler flags with shape [1], which its fused optimizers refuse.

    That ranks diverge where unscale_ is not called takes two of them: see the distributed tests.
    """
    p = param(3)
    optimizer, scaler = make([p]), ShardedGradScaler(device="cpu")
    scaler.scale(p.sum()).backward()
    p.grad[: len(bad)] = math.inf
    scaler.unscale_(optimizer)
    if make is torch_fused:
        with pytest.raises(RuntimeError, match=r"shape \[\] doesn't match .* \[1\]"):
            scaler.step(optimizer)
        return
    scaler.step(optimizer)
    scaler.update()
    assert is_one(p) == bool(bad)
    assert scaler.get_scale() == (2.0**15 if bad else 2.0**16)


@pytest.mark.parametrize("flag", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("shape", [(1,), (1, 1)])
@pytest.mark.parametrize("make", [ours_fused, torch_fused, torch_plain], ids=name)
def test_ours_takes_flags_of_any_shape(make: Callable, shape: tuple, flag: float) -> None:
    for scaler in (GradScaler(), torch_scaler()):
        p = param(3)
        optimizer = make([p])
        scaler.scale(p.sum()).backward()
        scaler.unscale_(optimizer)
        flags = scaler._found_inf_per_device(optimizer)
        flags[p.device] = torch.full(shape, flag)
        if make is torch_fused and not isinstance(scaler, GradScaler):
            with pytest.raises(RuntimeError, match="shape"):
                scaler.step(optimizer)
            continue
        scaler.step(optimizer)
        scaler.update()
        assert is_one(p) == (flag != 0)


# 4. load_state_dict casts the state to the param's dtype


def through_a_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def stepped(optimizer: Optimizer, p: torch.Tensor, count: int = 3) -> Optimizer:
    for i in range(count):
        p.grad = normal(p.shape, p.dtype, seed=i)
        optimizer.step()
    return optimizer


def test_torch_casts_an_fp32_state_to_bf16() -> None:
    p = param(3, dtype=torch.bfloat16)
    optimizer = stepped(torch.optim.AdamW([p]), p)
    for key in ("exp_avg", "exp_avg_sq", "master"):
        optimizer.state[p][key] = torch.full((3,), 1.001)
    loaded = torch.optim.AdamW([p])
    loaded.load_state_dict(through_a_file(optimizer.state_dict()))
    for key in ("exp_avg", "exp_avg_sq", "master"):
        assert loaded.state[p][key].dtype == torch.bfloat16
        assert loaded.state[p][key].float().tolist() == [1.0] * 3  # of 1.001


RESTORES: dict[str, Callable[[Optimizer, Optimizer], Optimizer]] = {
    "load_state_dict": lambda old, new: new.load_state_dict(through_a_file(old.state_dict())),
    "deepcopy": lambda old, new: copy.deepcopy(old),
    "pickle": lambda old, new: pickle.loads(pickle.dumps(old)),
}


@pytest.mark.parametrize("restore", RESTORES)
@pytest.mark.parametrize("master_weights", ["fp32", "remainder16"])
@pytest.mark.parametrize("ours", OURS, ids=name)
def test_ours_restores_every_dtype_and_bit(
    ours: type[Optimizer], master_weights: str, restore: str
) -> None:
    p = param(5, dtype=torch.bfloat16)
    settings: dict[str, Any] = {"lr": 0.01, "master_weights": master_weights}
    settings |= {"momentum": 0.9} if ours is SGD else {}
    old = stepped(ours([p], **settings), p)
    loaded = ours([p], **settings)
    new = RESTORES[restore](old, loaded) or loaded
    (q,) = new.param_groups[0]["params"]
    assert torch.equal(p, q)
    assert new.state[q].keys() == old.state[p].keys()
    for key, value in old.state[p].items():
        expected = torch.int16 if key == "remainder" else torch.float32
        assert value.dtype == new.state[q][key].dtype == expected
        assert torch.equal(value, new.state[q][key])
        assert value.data_ptr() != new.state[q][key].data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=name)
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "master"])
def test_a_state_that_some_other_way_was_cast_is_refused_at_the_step(
    key: str, dtype: torch.dtype
) -> None:
    """Ours alone: FSDP and others restore a state without calling load_state_dict."""
    p = param(3, dtype=torch.bfloat16)
    optimizer = stepped(AdamW([p]), p)
    optimizer.state[p][key] = optimizer.state[p][key].to(dtype)
    before = {k: v.clone() for k, v in [("p", p.detach()), *optimizer.state[p].items()]}
    with pytest.raises(ValueError, match=rf"adamw_: {key}s\[0\] must have dtype float32"):
        optimizer.step()
    for k, v in [("p", p.detach()), *optimizer.state[p].items()]:
        assert torch.equal(v, before[k])


# 5. Masters


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=name)
def test_without_masters_small_updates_are_lost(implementation: dict) -> None:
    p, q = (param(3, dtype=torch.bfloat16) for _ in range(2))
    settings: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.0}
    theirs, ours = torch.optim.AdamW([p], **settings, **implementation), AdamW([q], **settings)
    for _ in range(100):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
        theirs.step()
        ours.step()
    assert is_one(p)
    assert theirs.state[p]["exp_avg"].dtype == torch.bfloat16
    torch.testing.assert_close(q.float(), torch.full((3,), 0.99), rtol=0, atol=2.0**-9)
    torch.testing.assert_close(ours.state[q]["master"], torch.full((3,), 0.99))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=name)
def test_fp32_gradients_on_bf16_params(implementation: dict) -> None:
    p, q = (param(3, dtype=torch.bfloat16) for _ in range(2))
    for each in (p, q):
        each.grad_dtype = torch.float32
        each.grad = torch.full((3,), 1.0 + 2.0**-20)
    with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
        torch.optim.AdamW([p], **implementation).step()
    optimizer = AdamW([q])
    optimizer.step()
    exact = torch.full((3,), (1.0 + 2.0**-20) * (1 - 0.9))
    torch.testing.assert_close(optimizer.state[q]["exp_avg"], exact, rtol=1e-7, atol=0)


MASTERS = pytest.mark.parametrize("key", ["master", "remainder"])


def with_masters(p: torch.Tensor, key: str, lr: float = 0.01) -> AdamW:
    return AdamW([p], lr=lr, master_weights={"master": "fp32", "remainder": "remainder16"}[key])


@MASTERS
def test_bf16_masters_are_kept_and_saved(key: str) -> None:
    """apex (not installed) keeps none for bf16, and leaves those of fp16 out of its state dict."""
    p = param(3, dtype=torch.bfloat16)
    optimizer = stepped(with_masters(p, key), p)
    assert optimizer.state[p][key].any()
    assert torch.equal(optimizer.state_dict()["state"][0][key], optimizer.state[p][key])


@MASTERS
def test_weights_loaded_before_the_first_step_stay(key: str) -> None:
    """apex (not installed) copies the weights in its constructor, and goes back to those."""
    p = param(3, dtype=torch.bfloat16)
    optimizer = with_masters(p, key, lr=0.0)
    with torch.no_grad():
        p.fill_(5.0)
    stepped(optimizer, p)
    assert p.tolist() == [5.0] * 3


@MASTERS
def test_weights_loaded_after_the_state_re_seed_only_where_they_differ(key: str) -> None:
    p = param(4, dtype=torch.bfloat16)
    optimizer = stepped(with_masters(p, key), p)
    weights, state = p.detach().clone(), through_a_file(optimizer.state_dict())
    master = masters_of(optimizer, p, key)
    assert not torch.equal(master, weights.float())

    q = param(4, dtype=torch.bfloat16)
    resumed = with_masters(q, key)
    resumed.load_state_dict(state)
    other = weights.clone()
    other[2] = 7.0
    with torch.no_grad():
        q.copy_(other)
    for group in resumed.param_groups:
        group["lr"] = 0.0
    q.grad = torch.zeros_like(q)
    resumed.step()
    assert torch.equal(q, other)
    now = masters_of(resumed, q, key)
    assert torch.equal(now[[0, 1, 3]], master[[0, 1, 3]])
    assert abs(now[2] - 7.0) < 7.0 * 2.0**-8  # a remainder stays, less than half a unit
    assert key == "remainder" or now[2] == 7.0


def masters_of(optimizer: Optimizer, p: torch.Tensor, key: str) -> torch.Tensor:
    kept = optimizer.state[p][key]
    return (ops.join_master(p.detach(), kept) if key == "remainder" else kept).clone()


# 6. Settings and arguments


NOT_CHECKED_BY_TORCH = (
    *({"init_scale": x} for x in (0.0, -1.0, math.inf, math.nan)),
    *({"growth_interval": x} for x in (0, -1)),
    *({"growth_factor": x} for x in (math.inf, math.nan)),
    *({"backoff_factor": x} for x in (0.0, -0.5, math.nan)),
)


@pytest.mark.parametrize("settings", NOT_CHECKED_BY_TORCH, ids=str)
def test_settings_are_checked(settings: dict) -> None:
    assert torch_scaler(**settings).is_enabled()
    with pytest.raises(ValueError, match=f"GradScaler: {next(iter(settings))} must be"):
        GradScaler(**settings)


def test_a_positional_closure() -> None:
    calls = []
    for scaler in (torch_scaler(), GradScaler()):
        p = param(3)
        optimizer = torch_plain([p])
        scaler.scale(p.sum()).backward()
        if isinstance(scaler, GradScaler):
            with pytest.raises(RuntimeError, match="closure"):
                scaler.step(optimizer, lambda: calls.append("ours"))
        else:  # it runs, after the gradients that it makes anew were checked and unscaled
            scaler.step(optimizer, lambda: calls.append("torch"))
    assert calls == ["torch"]


def test_an_int_as_the_new_scale() -> None:
    for scaler in (torch_scaler(), GradScaler()):
        scaler.scale(torch.zeros(()))
        if isinstance(scaler, GradScaler):
            scaler.update(4)
            assert scaler.get_scale() == 4.0
        else:
            with pytest.raises(AttributeError):
                scaler.update(4)


def test_a_lowered_growth_interval() -> None:
    for scaler in (torch_scaler(init_scale=4.0), GradScaler(init_scale=4.0)):
        p = param(3)
        optimizer = torch_plain([p])
        for i in range(25):
            if i == 10:
                scaler.set_growth_interval(5)
            iterate(scaler, optimizer, p)
        # Ours at the 11th, then at each 5th; torch's, which waits for equality, never again.
        assert scaler.get_scale() == (4.0 * 2**3 if isinstance(scaler, GradScaler) else 4.0)


# 7. Skipped steps show


@pytest.mark.parametrize("make", [ours_fused, torch_fused, torch_plain], ids=name)
def test_a_skipped_step_is_visible(make: Callable) -> None:
    """accelerate and others watch whether step() was called: with a fused one it always is."""
    for scaler in (torch_scaler(), GradScaler()):
        p = param(3)
        optimizer, calls = make([p]), []
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        seen = []
        for bad in ([math.nan], [], [math.inf], []):
            iterate(scaler, optimizer, p, *bad)
            if isinstance(scaler, GradScaler):
                seen.append(scaler.last_step_skipped)
        assert len(calls) == (2 if make is torch_plain else 4)
        if isinstance(scaler, GradScaler):
            assert seen == [True, False, True, False]
            assert scaler.skipped.item() == scaler.applied_steps.item() == 2
        else:
            assert not hasattr(scaler, "last_step_skipped")


@pytest.mark.parametrize("make", [ours_fused, torch_fused, torch_plain], ids=name)
@pytest.mark.parametrize("way", ["applied_steps", "last_step_skipped"])
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
def test_lr_schedules_follow_applied_steps(make: Callable, way: str) -> None:
    """Two ways to write it; with torch's scaler a schedule moves on through skipped steps."""
    rates = []
    for scaler, maker in ((GradScaler(), make), (torch_scaler(), torch_fused)):
        p = param(3)
        optimizer = maker([p])
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
        for bad in ([math.nan], [], [math.inf], [math.inf], []):
            iterate(scaler, optimizer, p, *bad)
            if not isinstance(scaler, GradScaler):
                schedule.step()
            elif way == "applied_steps":
                while schedule.last_epoch < scaler.applied_steps:
                    schedule.step()
            elif not scaler.last_step_skipped:
                schedule.step()
        rates += schedule.get_last_lr()
    assert rates == [0.1 * 0.5**2, 0.1 * 0.5**5]


@pytest.mark.parametrize("ours", OURS, ids=name)
def test_clipping_inside_the_optimizer_is_clipping_outside(ours: type[Optimizer]) -> None:
    """Lightning refuses to clip for optimizers that unscale by themselves; ours do both."""
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


# 8. unscale_ first


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("make", [*OURS, torch_fused, torch_plain], ids=name)
def test_found_inf_of_unscale_is_honoured(make: Callable, bad: float) -> None:
    """torch has mended this for its optimizers; it is what step() finds, not what is there now."""
    for kind in (GradScaler, torch_scaler):
        p = param(3)
        optimizer, scaler = make([p]), kind()
        scaler.scale(p.sum()).backward()
        p.grad[0] = bad
        scaler.unscale_(optimizer)
        p.grad.nan_to_num_(0.0, 0.0, 0.0)
        scaler.step(optimizer)
        scaler.update()
        assert is_one(p)
        assert scaler.get_scale() == 2.0**15


# 9. Stochastic rounding, moments, lists and strides


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["grad", "param"])
def test_nan_stays_nan_under_stochastic_rounding(where: str, bad: float) -> None:
    """torchao (not installed) made -0.0 of it on CUDA. Without a flag to skip, as an op."""
    size = 257
    p = torch.full((size,), bad if where == "param" else 1.0, dtype=torch.bfloat16)
    grad = torch.full((size,), bad if where == "grad" else 1.0, dtype=torch.bfloat16)
    moments = [torch.zeros(size, dtype=torch.bfloat16) for _ in range(2)]
    for seed in range(3):
        q, m, v = p.clone(), *(t.clone() for t in moments)
        ops.adamw_(
            *([q], [grad], [m], [v], [], torch.zeros(1)),
            **{"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01},
            stochastic_rounding=True,
            seed=seed,
            indices=[0],
        )
        s = p.clone()
        ops.sgd_(
            *([s], [grad], [], [], torch.zeros(1)),
            **{"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0},
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


@pytest.mark.parametrize("ours", OURS, ids=name)
def test_moments_keep_their_dtype_when_capturable(ours: type[Optimizer]) -> None:
    """apex's capturable Adam (not installed) casts the moments to the params' dtype."""
    settings: dict[str, Any] = {"momentum": 0.9} if ours is SGD else {"capturable": True}
    for dtype in (torch.bfloat16, torch.float16):
        p = param(3, dtype=dtype)
        optimizer = stepped(ours([p], lr=0.1, **settings), p)
        assert {v.dtype for v in optimizer.state[p].values()} == {torch.float32}


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name)
@pytest.mark.parametrize("ours", OURS, ids=name)
def test_tensors_without_elements_leave_their_neighbours_alone(
    ours: type[Optimizer], dtype: torch.dtype, explicit: bool
) -> None:
    """Transformer Engine (not installed) skipped or corrupted the next tensor in the list."""
    shapes = [(0,), (3,), (0, 5), (4, 2), (7,), (2, 0, 3)]
    results = []
    for kept in (shapes, [s for s in shapes if math.prod(s)]):
        params = [torch.nn.Parameter(normal(s, dtype, seed=math.prod(s))) for s in kept]
        optimizer = ours(params, lr=0.1, max_grad_norm=1.0)
        scaler = GradScaler(init_scale=8.0)
        for step in range(3):
            scaler.scale(torch.zeros(()))
            for p in params:
                p.grad = normal(p.shape, dtype, seed=step)
            if step == 1:
                params[-1 if kept is not shapes else -2].grad[0] = math.inf
            if explicit and dtype != torch.float16:
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
    """apex (not installed) packs at most 110 tensors and 320 blocks into one launch."""
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


def inside_12_elements(grad: torch.Tensor) -> torch.Tensor:
    """Stride 0 within 12 elements of memory, so that reading them in a row stays in bounds."""
    memory = torch.zeros(12)
    memory[0] = grad.flatten()[0]
    return memory.as_strided(grad.shape, (0, 0))


@pytest.mark.parametrize("layout", ["transposed", "every_second", "stride_0"])
def test_torchs_fused_optimizers_ignore_the_strides_of_gradients(layout: str) -> None:
    """Where those differ from the param's. (The memory is as large as what is read instead.)"""
    values = normal((3, 4), torch.float32)
    wide = torch.zeros(3, 8)
    wide[:, ::2] = values
    grad = {
        "transposed": values.t().contiguous().t(),
        "every_second": wide[:, ::2],
        "stride_0": inside_12_elements(values),
    }[layout]
    runs: dict[str, list[torch.Tensor]] = {}
    for kind, make in (("torch", torch_fused), ("plain", torch_plain), ("ours", ours_fused)):
        for g in (grad, contiguous(grad)):
            p = param(3, 4)
            p.grad = g
            make([p]).step()
            runs.setdefault(kind, []).append(p.detach())
    assert torch.equal(*runs["plain"])
    assert torch.equal(*runs["ours"])
    assert not torch.equal(*runs["torch"])
    torch.testing.assert_close(runs["ours"][0], runs["plain"][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_gradients_of_every_layout(layout: Layout, dtype: torch.dtype) -> None:
    """Compared with contiguous ones; unscale_ refuses only elements that share memory."""
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name)
def test_the_gradient_of_a_sum(dtype: torch.dtype) -> None:
    """Autograd makes it with stride 0 in all dimensions."""
    p = param(4, 8, dtype=dtype)
    seen = []
    p.register_hook(lambda g: seen.append(g.stride()))
    optimizer, scaler = SGD([p], lr=0.5, max_grad_norm=1e9), GradScaler(init_scale=2.0)
    scaler.scale(p.sum().float()).backward()
    p.grad = p.grad[:1, :1].clone().expand(4, 8)
    scaler.step(optimizer)
    scaler.update()
    assert seen == [(0, 0)]
    assert torch.equal(p, torch.full_like(p, 0.5))
    torch.testing.assert_close(optimizer.grad_norm.item(), math.sqrt(32.0))


@pytest.mark.exhaustive
def test_more_than_2_to_the_31_elements() -> None:
    """DeepSpeed (not installed) left them as they were. Rows that overlap in memory: 200 KB hold
    2^31 + 2^16 elements, of which only the last is not 1. (To write as many takes 8 GB: not here.)
    """
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
