"""The optimizers' public functions: what they pass on and refuse, and lists that are split."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cases import WRITABLE, for_each
from emulated.agreement import assert_bits, moved, tensors
from emulated.values.test_updates import (
    BF16,
    F32,
    KINDS,
    RULES,
    Mix,
    arguments,
    every_rule,
    mixes,
)  # fmt: skip
from hypothesis import given
from hypothesis import strategies as st

from mixprec import ops
from mixprec.ops._dispatch.op import OPS

STATES = {"adamw_": ("exp_avgs", "exp_avg_sqs"), "sgd_": ("momentum_buffers",),
          "lion_": ("exp_avgs",), "muon_direction_": ("momentum_buffers",)}  # fmt: skip
# A rule for each of them.
every_op = pytest.mark.parametrize("rule", ["decoupled", "momentum", "lion", "muon"])


def call(rule: str, args: list[Any], **changes: Any) -> None:
    """The public function with what `arguments` has made for the op."""
    op, _, numbers = RULES[rule]
    given = dict(zip(OPS[op].arguments, args, strict=True))
    states, n = given.pop("states"), len(given["params"])
    given |= {name: states[k * n : (k + 1) * n] for k, name in enumerate(STATES[op])}
    given |= dict(zip([*numbers][1:], given.pop("settings"), strict=True))
    if (rate := given.pop("lr_tensor")) is not None:
        given["lr"] = rate
    getattr(ops, op)(**given | changes)


@every_rule
def test_the_public_functions_pass_everything_on(backend: str, rule: str) -> None:
    options = {"maximize": True, "max_value": 0.3, "stochastic_rounding": True, "seed": 2**62 + 7}
    rates = (None, torch.tensor(0.3))
    for rate, kind in zip(rates, ((BF16, None), (F32, F32)), strict=True):
        args = arguments(rule, mixes(*kind), lr_tensor=rate, **options)
        same = moved(args, torch.device("cpu"))
        call(rule, args)
        OPS[RULES[rule][0]](*same)
        assert_bits(tensors(args), tensors(same))


T = torch.ones(3)


@for_each(
    "changes, error, message",
    [
        ({"params": T}, TypeError, "params must be a list of tensors, got Tensor"),
        ({"params": [torch.ones(9).as_strided((2, 3), (1, 1))]}, ValueError, r"params\[0\] is wr"),
        ({"params": [T.clone().requires_grad_()]}, RuntimeError, "no derivative"),
        ({"grads": [T, T]}, ValueError, r"grads must have one tensor per param \(1\), got 2"),
        ({"grads": [T[:2]]}, ValueError, r"grads\[0\] must have shape"),
        ({"grads": [T.double()]}, ValueError, r"grads\[0\] must have dtype .*float64"),
        ({"states": [T, T]}, ValueError, r"STATE must have one tensor per param \(1\), got 2"),
        ({"states": T}, TypeError, "STATE must be a list of tensors, got Tensor"),
        ({"states": [T.half()]}, ValueError, r"STATE\[0\] must have dtype float32"),
        ({"states": [T[:2]]}, ValueError, r"STATE\[0\] must have shape"),
        ({"states": [T.bfloat16()]}, ValueError, r"STATE\[0\] must have .*with indices"),
        ({"masters": [T.half()]}, ValueError, r"masters\[0\] must have dtype float32"),
        ({"steps": [T[:1]]}, TypeError, "steps must be a torch.Tensor, got list"),
        ({"steps": torch.zeros(1).long()}, ValueError, "steps must have dtype float32"),
        ({"steps": torch.zeros(2)}, ValueError, r"steps must have shape .* = \(1,\)"),
        ({"max_value": 0.0}, ValueError, "max_value must be positive"),
        ({"stochastic_rounding": True}, ValueError, r"indices must have one number per param \(1"),
        ({"indices": [-1]}, ValueError, r"indices must be in \[0, 2\^30\)"),
        ({"lr": T[:1].half()}, ValueError, "lr_tensor must hold one float32"),
    ],
)
@every_op
def test_bad_input(rule: str, changes: dict, error: type[Exception], message: str) -> None:
    """Of one FP32 param of shape [3]; of the states, the last one is changed."""
    op, _, numbers = RULES[rule]
    lists = {name: [T.clone()] for name in ("params", "grads", *STATES[op])}
    args = {**lists, "masters": [], "steps": torch.zeros(1), **numbers}
    last = STATES[op][-1]
    args |= {last if name == "states" else name: value for name, value in changes.items()}
    given = [t for t in tensors([*args.values()]) if t.layout == torch.strided]
    before = [t.detach().clone() for t in given]
    with pytest.raises(error, match=f"^{op}: .*{message.replace('STATE', last)}"):
        getattr(ops, op)(**args)
    for t, saved in zip(given, before, strict=True):
        assert torch.equal(t, saved), "written before the error"
    assert torch.equal(T, torch.ones(3))


@every_op
def test_nothing_is_written_before_an_error_in_the_last_tensor(backend: str, rule: str) -> None:
    args = arguments(rule, [Mix(F32, F32)] * 3, ((5,),))
    args[1][-1] = args[1][-1][:4]
    before = [t.clone() for t in tensors(args)]
    with pytest.raises(ValueError, match=rf"^{RULES[rule][0]}: grads\[2\] must have shape"):
        call(rule, args)
    assert_bits(tensors(args), before)


def test_no_params() -> None:
    for rule in RULES:
        call(rule, arguments(rule, []))


@given(st.sampled_from([*RULES]), st.integers(0, 1 << 30), st.integers(1, 100), st.booleans())
def test_split_and_permuted_lists_give_the_same_bits(
    rule: str, seed: int, count: int, masters: bool
) -> None:
    """Of mixed dtypes and layouts."""
    rng = random.Random(seed)
    kinds = [kind for kind in KINDS if (kind[1] is not None) is masters]
    mixed = [rng.choice(mixes(*rng.choice(kinds))) for _ in range(count)]
    shapes = [rng.choice([(0,), (), (5,), (16, 3)]) for _ in range(count)]
    layouts = rng.sample(WRITABLE, len(WRITABLE))
    options = {"stochastic_rounding": not masters, "seed": seed}
    whole, parts = (arguments(rule, mixed, shapes, layouts, **options) for _ in range(2))
    call(rule, whole)
    order, states = rng.sample(range(count), count), RULES[rule][1]
    cut = rng.randrange(count + 1)
    at = OPS["adamw_"].arguments.index("indices")
    for part in (order[:cut], order[cut:]):
        some = [[tensors[i] for i in part] for tensors in parts[:2]]
        some += [[kept[k * count + i] for k in range(states) for i in part] for kept in parts[2:4]]
        indices = [parts[at][i] for i in part]
        some.append([parts[4][i] for i in part] if masters else [])
        call(rule, [*some, parts[5][part], *parts[6:at], indices, *parts[at + 1 :]])
    assert_bits(tensors(parts[:5]), tensors(whole[:5]))
