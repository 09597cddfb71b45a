"""The points of a trace: which numbers of an op are compared with those of another step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from . import rules
from .lost import ROLES_OF, Lost, product
from .op import PRODUCTS
from .ops import Arguments, Listed
from .shadow import Ran, Shadow
from .trace import sketch
from .values import is_float, widened

_BIASES = {torch.ops.aten.addmm: "self"}
_WORDS = {"x": "input", "w": "weight", "g": "gradient"}


def record(
    shadow: Shadow,
    module: str,
    phase: str,
    func: Any,
    listed: Listed,
    given: Arguments,
    results: list[torch.Tensor],
    ran: Ran | None,
    lost: Mapping[str, Lost],
) -> None:
    """After an op: a product, a convolution, attention or an RNN."""
    if listed.kind not in PRODUCTS or not results or not is_float(results[0]):
        return
    operands = [given[name] for name in listed.operands]
    if not all(isinstance(t, torch.Tensor) and is_float(t) for t in operands):
        return
    roles = [shadow.roles.get(t) or "x" for t in operands]
    values = [_value(shadow, func, given, name) for name in listed.operands]
    wholes = [] if ran is None else [value for value in ran.whole if value is not None]
    if not wholes:
        wholes = [widened(t) for t in results if is_float(t)]
    result = wholes[0]
    if listed.kind in ("attention", "rnn"):  # of some of its gradients nothing may be left
        result = torch.cat([value.reshape(-1) for value in wholes])
    bias = given.get(_BIASES.get(func.overloadpacket, "bias"))
    if bias is not None and bias.dim() == 1 and listed.kind == "product":
        result = result - shadow.of_step(bias)  # other code of the same layer adds it later
    is_product = listed.kind == "product" and [t.dim() > 1 for t in operands] == [True, True]
    name = product(roles) if is_product else None
    if name is not None and tuple(roles) != ROLES_OF[name] and result.dim() == 2:
        roles.reverse()
        values = [t.transpose(-1, -2) for t in reversed(values)]
        result = result.t()
    if name in ("y", "grad_weight"):  # [N, K] and [M, N], as they are in memory
        at = 1 if name == "y" else 0
        values[at] = values[at].transpose(-1, -2)
    point = shadow.trace.point(module, phase, name or listed.kind, result.numel())
    for role, value in zip(roles, values, strict=True):
        point.inputs.setdefault(_WORDS[role], sketch(value))
    if not func._schema.is_mutable:  # else with what was there before
        point.result = sketch(result)
    point.made, point.after = shadow.made, next(iter(shadow.not_followed), "")
    for one in lost.values():
        beyond, wrong = _wrong(one)
        if beyond >= point.beyond:
            point.beyond, point.wrong = beyond, wrong
            point.own = math.sqrt(one.own_noise / one.own_signal) if one.own_signal else 0.0


def _value(shadow: Shadow, func: Any, given: Arguments, name: str) -> torch.Tensor:
    """Of an operand, in a step in FP32."""
    known = (lambda: rules.decoded(given, name)) if func.namespace == "mixprec" else None
    return shadow.of_step(given[name], known)


def _wrong(lost: Lost) -> tuple[float, str]:
    """What is least explained by rounding: the op, or the cast of an operand."""
    found = [(lost.beyond, "what it computes of its operands")]
    for role, operand in lost.operands.items():
        found.append((operand.beyond, f"the cast of its {_WORDS[role]}"))
    return max(found)
