"""The optimizers' public functions: what they pass on and refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import for_each
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

STATES = {"adamw_": ("exp_avgs", "exp_avg_sqs"), "sgd_": ("momentum_buffers",),
          "lion_": ("exp_avgs",), "muon_direction_": ("momentum_buffers",)}  # fmt: skip


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
