"""The optimizers' public functions: what they pass on and refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated.agreement import assert_bits, moved, tensors
from emulated.values.test_updates import (
    BF16,
    F32,
    RULES,
    Mix,
    arguments,
    every_op,
    every_rule,
    mixes,
)  # fmt: skip

from mixprec import ops
from mixprec.ops._dispatch.op import OPS


def call(rule: str, args: list[Any], **changes: Any) -> None:
    """The public function with what `arguments` has made for the op."""
    op, _, numbers = RULES[rule]
    given = dict(zip(OPS[op].arguments, args, strict=True))
    states, n = given.pop("states"), len(given["params"])
    given |= {name: states[k * n : (k + 1) * n] for k, name in enumerate(OPS[op].states)}
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
