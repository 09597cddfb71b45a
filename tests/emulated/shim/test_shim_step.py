"""The optimizer kernels of csrc/cuda on the CPU, bit for bit the references."""

from __future__ import annotations

import random

import pytest
import torch
from cases import WIDE, name, normal, random_bits
from emulated.ops import reference
from emulated.shim import runner
from emulated.shim.helpers import CHUNK, assert_lists, at_offset

from mixprec.ops._dispatch.rounding import split_master

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
Lists = list[list[torch.Tensor]]  # params, grads, states, masters
# Of a param, its gradient, its states and its master.
Dtypes = tuple[torch.dtype, torch.dtype, tuple[torch.dtype, ...], torch.dtype | None]
# The op, how many states it keeps, and its numbers.
RULES = {
    "decoupled": ("adamw", 2, (1e-3, 0.9, 0.999, 1e-8, 1e-2, True)),
    "l2": ("adamw", 2, (1e-2, 0.8, 0.99, 1e-6, 0.1, False)),
    "sgd": ("sgd", 0, (0.1, 0.0, 0.0, 0.01, False)),
    "momentum": ("sgd", 1, (0.1, 0.9, 0.1, 0.0, False)),
    "nesterov": ("sgd", 1, (0.1, 0.9, 0.0, 0.01, True)),
}
every_rule = pytest.mark.parametrize("rule", RULES)


def mixes(states: int, masters: bool) -> list[Dtypes]:
    """All dtypes that one list may hold."""
    narrow = (F32, BF16)
    kinds = {0: [()], 1: [(m,) for m in narrow], 2: [(m, v) for m in narrow for v in narrow]}
    found: list[Dtypes] = []
    for param in WIDE:
        remainder = [torch.int16] if param == BF16 else []
        for master in [F32, *remainder] if masters else [None]:
            found += [(param, grad, s, master) for grad in WIDE for s in kinds[states]]
    return [*found, (F64, F64, (F64,) * states, F64 if masters else None)]


def step_lists(cases: list[tuple[int, Dtypes]], offsets: tuple[int, ...]) -> Lists:
    """One tensor per size and dtypes; each array starts at an offset of its own."""
    rng = random.Random(len(cases))
    states = len(cases[0][1][2])
    lists: Lists = [[] for _ in range(3 + states)]
    for i, (n, (param, grad, state, master)) in enumerate(cases):
        real = F64 if param == F64 else F32
        wide = normal((n,), real, seed=i)
        low, kept = split_master(wide) if master == torch.int16 else (wide.to(param), wide)
        arrays = [low, normal((n,), grad, seed=i + 1)]
        arrays += [normal((n,), real, seed=i + 2 + k).abs().to(t) for k, t in enumerate(state)]
        arrays += [] if master is None else [kept]
        for tensors, array in zip(lists, arrays, strict=False):
            tensors.append(at_offset(array, rng.choice(offsets)))
    return lists


def every_mix(rule: str, masters: bool, offsets: tuple[int, ...]) -> Lists:
    found = mixes(RULES[rule][1], masters)
    return step_lists([(n, mix) for mix in found for n in (0, 1, 5, 8, 19, 64)], offsets)


def check_step(
    rule: str, lists: Lists, *, maximize: bool = False, max_value: float = float("inf"),
    stochastic: bool = False, seed: int = (1 << 62) + 12345, lr_tensor: torch.Tensor | None = None,
    random_rounding: bool = True, sms: int = 2, **scalars: float,
) -> None:  # fmt: skip
    """One step of the kernels and of the reference, which agree in every bit."""
    op, states, settings = RULES[rule]
    n = len(lists[0])
    steps = torch.tensor([(0.0, 1.0, 7.0, 999.0, 2.0**24)[i % 5] for i in range(n)])
    indices = [(7 * i + (1 << 29)) % (1 << 30) for i in range(n)] if random_rounding else []
    given = [torch.tensor(scalars[k]) if k in scalars else None for k in ("inv_scale", "clip")]
    found_inf = torch.tensor(scalars["found_inf"]) if "found_inf" in scalars else None
    tail = (maximize, max_value, stochastic, seed, indices, lr_tensor, *given, found_inf)
    want, wanted_steps = [[t.clone() for t in ts] for ts in lists], steps.clone()
    runner.step_(op, lists, steps, settings, *tail, sms=sms)
    no_buffers = [[]] if rule == "sgd" else []
    reference(f"{op}_")(*want[: 2 + states], *no_buffers, want[-1], wanted_steps, *settings, *tail)
    for k, (ours, theirs) in enumerate(zip(lists, want, strict=True)):
        assert_lists(ours, theirs, f"{rule}: array {k}")
    assert torch.equal(steps, wanted_steps)


@pytest.mark.parametrize("masters", [False, True])
@every_rule
def test_step_of_all_dtypes_in_one_list(rule: str, masters: bool) -> None:
    for offsets in ((0,), (0, 1, 3, 8)):
        lists = every_mix(rule, masters, offsets)
        check_step(rule, lists, stochastic=True)
        check_step(rule, lists, maximize=True, inv_scale=2.0**-3, clip=0.7, max_value=0.3)


@pytest.mark.parametrize("state", [F32, BF16], ids=name)
@every_rule
def test_step_over_chunks(rule: str, state: torch.dtype) -> None:
    states = (state,) * RULES[rule][1]
    for seed, found in enumerate((
        [(BF16, BF16, states, None), (F32, torch.float16, states, None)],
        [(BF16, F32, states, torch.int16), (torch.float16, BF16, states, F32)],
    ), start=2):  # fmt: skip
        runner.seed(seed)
        cases = [(n, mix) for n in (CHUNK - 1, CHUNK, 17, 2 * CHUNK + 13) for mix in found]
        lists = step_lists(cases, (0, 3))
        check_step(rule, lists, stochastic=True, seed=0, sms=seed, inv_scale=0.5)


@every_rule
def test_step_gives_the_same_bits_in_any_order(rule: str) -> None:
    lists = every_mix(rule, False, (0, 1))
    for seed in range(3):
        runner.seed(seed)
        copies = [[t.clone() for t in ts] for ts in lists]
        check_step(rule, copies, stochastic=True, sms=1 + 3 * seed)


@every_rule
def test_step_changes_nothing_after_an_overflow(rule: str) -> None:
    for masters, flag in ((False, 1.0), (True, 2.0), (True, float("nan"))):
        lists = every_mix(rule, masters, (0, 3))
        before = [[t.clone() for t in ts] for ts in lists]
        check_step(rule, lists, inv_scale=0.5, clip=0.5, found_inf=flag, stochastic=True)
        for ours, was in zip(lists, before, strict=True):
            assert_lists(ours, was, "after a skipped step")


@every_rule
def test_step_with_lr_on_the_device(rule: str) -> None:
    for lr in (torch.tensor(0.3), torch.tensor([1 / 3], dtype=F64)):
        check_step(rule, every_mix(rule, True, (0,)), lr_tensor=lr, found_inf=0.0)


@pytest.mark.parametrize("masters", [False, True])
@every_rule
def test_step_of_any_bits(rule: str, masters: bool) -> None:
    lists = step_lists([(4096, mix) for mix in mixes(RULES[rule][1], masters)[:-1]], (0,))
    for k, tensors in enumerate(lists):
        for i, t in enumerate(tensors):
            if t.dtype != torch.int16:
                t.copy_(random_bits(t.numel(), t.dtype, seed=100 * k + i))
                t[::3] = normal((t[::3].numel(),), t.dtype, seed=i)
            else:
                t.random_(-(1 << 15), 1 << 15, generator=torch.Generator().manual_seed(i))
    check_step(rule, lists, stochastic=True, max_value=1e30)


@every_rule
def test_step_of_a_long_list(rule: str) -> None:
    found = mixes(RULES[rule][1], True)
    cases = [(i % 3, found[i % len(found)]) for i in range(1700)]
    assert sum(n > 0 and mix[0] != F64 for n, mix in cases) > 2 * (32764 // 64)
    check_step(rule, step_lists(cases, (0,)), inv_scale=0.25)


def test_step_without_indices_where_nothing_is_random() -> None:
    for rule in ("decoupled", "nesterov", "sgd"):
        mix: Dtypes = (BF16, BF16, (F32,) * RULES[rule][1], F32)
        check_step(rule, step_lists([(33, mix), (0, mix)], (0,)), random_rounding=False)
    check_step("sgd", [[], [], []], random_rounding=False)
