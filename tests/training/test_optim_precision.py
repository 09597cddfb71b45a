"""What a state holds: masters, remainders, moments in 8, 16 and 32 bits; stochastic rounding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import name
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizers import LOW, MOMENTS, Kind, Run, assert_same, kinds, mixed, parameters

from mixprec.ops._reference import rounding
from mixprec.optim import SGD, Adam, AdamW, Lion, Muon

REMAINDERS = {"remainder16": torch.int16, "remainder8": torch.int8}


@kinds
def test_what_a_state_holds(kind: Kind) -> None:
    """In 8 bits: moments of 4,096 elements and more, except fp64."""
    for mix in kind.mixes:
        params = [*mixed(), *parameters(torch.float64, [(4100,)])]
        params += parameters(torch.bfloat16, [(4095,), (4096,)])
        run = Run(kind, params, **mix).train(2)
        assert run.optimizer.master_weights == mix["master_weights"]
        for p, state in zip(params, run.states, strict=True):
            want = {"step": torch.float32}
            if p.dtype == torch.bfloat16 and mix["stochastic_rounding"]:
                pass
            elif p.dtype == torch.bfloat16 and mix["master_weights"] in REMAINDERS:
                want["remainder"] = REMAINDERS[mix["master_weights"]]
            elif p.dtype in LOW and mix["master_weights"]:
                want["master"] = torch.float32
            real = torch.float32 if mix["state_dtype"] == "int8" else mix["state_dtype"]
            real = torch.float64 if p.dtype == torch.float64 else real
            coded = mix["state_dtype"] == "int8" and p.numel() >= 4096 and real != torch.float64
            for key in MOMENTS & state.keys():
                want[key] = torch.uint8 if coded else real
                assert (state[key].shape, state[key].stride()) == (p.shape, p.stride())
                if coded:
                    want[f"{key}_scale"] = torch.float32
                    assert len(state[f"{key}_scale"]) == math.ceil(p.numel() / 256)
            assert {key: t.dtype for key, t in state.items()} == want


def drift(kind: Callable, dtype: torch.dtype, n: int = 4096, **options: Any) -> float:
    """How far n ones come in 100 steps of 1e-4, much less than half a unit of a 16-bit number."""
    p = torch.nn.Parameter(torch.ones(n, dtype=dtype))
    optimizer = kind([p], lr=1e-4, weight_decay=0.0, **options)
    p.grad = torch.ones_like(p)
    for _ in range(100):
        optimizer.step()
    return 1.0 - p.detach().double().mean().item()


@settings(max_examples=300)
@given(bits=st.integers(0, 2**32 - 1), seed=st.integers(0, 2**16 - 1))
def test_24_bits_are_a_neighbour_and_on_average_the_number(bits: int, seed: int) -> None:
    code = bits - 2**32 * (bits >= 2**31)
    x = torch.tensor([code], dtype=torch.int32).view(torch.float32).expand(256).clone()
    rounded = rounding.stochastic_24(x, torch.arange(256) ^ seed & 0xFF | seed & 0xFF00)
    param, low = rounding.split_master(rounded)
    kept = rounding.join_master(param, (low >> 8).to(torch.int8))
    assert_same([kept.view(torch.int32)[~kept.isnan()]], [rounded.view(torch.int32)[~x.isnan()]])
    if not x.isfinite().all():
        assert kept.isnan().all() if x.isnan().any() else kept.equal(x)
        return
    codes = kept.view(torch.int32).long() & 0xFFFFFFFF
    assert (codes & 0xFF).eq(0).all()
    assert codes.sum() == 256 * bits  # also of the numbers, but where the exponent changes
    again = rounding.remainder_of(rounding.export_master(param, low), param, torch.int8)
    near = rounded.to(torch.bfloat16) == param  # not a tie that rounds to the other one
    assert again[near].equal((low >> 8).to(torch.int8)[near])


@pytest.mark.parametrize("kind", [AdamW, Adam, SGD, Lion], ids=name)
def test_tiny_updates_are_lost_without_masters(kind: Callable) -> None:
    """Why masters exist. The last rounding is half a unit of the param.

    Stochastic rounding keeps them on average. Each element moves by a whole number of units
    u = 2^-8: in a step by one unit with probability 1e-4 / u. So 100 steps have the variance
    1e-2 * u, and the mean of 4,096 elements is within 5 of its own deviations.
    """
    for dtype in LOW:
        half = torch.finfo(dtype).eps / 4
        assert drift(kind, dtype, n=4, master_weights=None) == 0.0
        for mode in ("auto", "fp32", *REMAINDERS):
            assert drift(kind, dtype, n=4, master_weights=mode) == pytest.approx(1e-2, abs=half)
    deviation = math.sqrt(1e-2 * 2.0**-8 / 4096)
    for free in ("auto", None):
        got = drift(kind, torch.bfloat16, master_weights=free, stochastic_rounding=True)
        assert got == pytest.approx(1e-2, abs=5 * deviation)
        assert got != pytest.approx(1e-2, abs=1e-9)  # and it is random


@kinds
@pytest.mark.parametrize(
    "mix", [{"stochastic_rounding": True}, {"state_dtype": torch.bfloat16}], ids=name
)
def test_the_seed_decides_every_bit(kind: Kind, mix: dict) -> None:
    runs = []
    for seed in (0, 0, 1, 2**32, 2**63 - 1):
        params = parameters(torch.bfloat16, [(33,), (129,), (7, 5)])
        torch.manual_seed(seed)  # torch's own generator has no part in it
        runs.append(Run(kind, params, lr=0.01, seed=seed, **mix).train(5))
    assert_same(runs[0], runs[1])
    for run, other in itertools.combinations(runs[1:], 2):
        assert not all(map(torch.equal, run.tensors(), other.tensors()))


@pytest.mark.parametrize(
    "make",
    [partial(SGD, lr=2.0**-9), partial(Muon, lr=2.0**-9 * 512**0.5, weight_decay=0.0, ns_steps=0)],
    ids=["SGD", "Muon"],
)
def test_two_params_and_two_steps_get_different_noise(make: Callable) -> None:
    """The same numbers twice, which move by half a unit: where they are rounded differs."""
    params = [torch.nn.Parameter(torch.ones(1, 512, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = make(params, stochastic_rounding=True)
    seen = set()
    for _ in range(2):
        for p in params:
            p.data.fill_(1.0)
            p.grad = torch.ones_like(p)
        optimizer.step()
        seen |= {tuple(p[0].tolist()) for p in params}
    assert len(seen) == 4
