"""Shared by the references of the optimizer updates: checks, reading and writing of state."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from . import checks, overlap, rounding, state8

REMAINDER = torch.int16  # of a master: the bits that a bf16 param lacks
CODES = torch.uint8  # of a state in 8 bits
_KINDS = {rounding.FIRST_STATE: state8.SIGNED, rounding.SECOND_STATE: state8.UNSIGNED}
# The end of every update's schema.
SHARED_SCHEMA = (
    "Tensor(z!)[] state_scales, bool maximize, float max_value, bool stochastic_rounding, "
    "int seed, int[] indices, Tensor? lr_tensor, Tensor? inv_scale, Tensor? clip, "
    "Tensor? found_inf) -> ()"
)


def rounded(value: float, real: torch.dtype) -> float:
    """A constant in the dtype of the arithmetic."""
    return value if real == torch.float64 else ctypes.c_float(value).value


def unscaled(
    grad: torch.Tensor,
    real: torch.dtype,
    factors: Iterable[torch.Tensor | None],
    max_value: float,
) -> torch.Tensor:
    """grad in `real`, times each factor (one element) in turn, bounded by +-max_value."""
    g = grad.to(real)
    for factor in factors:
        if factor is not None:
            g = g * factor.reshape(()).to(real)
    limit = rounded(max_value, real)
    return torch.where(g > limit, limit, torch.where(g < -limit, -limit, g))  # NaN stays NaN


class Update:
    """One call of an update, by its arguments `args`: counts the steps, unless it is skipped, and
    then reads and writes the tensors of each param i.

    skip: whether found_inf is not 0. counts: the steps after this one. lr: fp64 [].
    """

    def __init__(self, args: Any) -> None:
        self._args, steps = args, args.steps
        found = torch.zeros_like(steps[:1]) if args.found_inf is None else args.found_inf
        self.skip = found.reshape(()) != 0
        steps.copy_(torch.where(self.skip, steps, steps + 1))
        self.counts = steps.clone()
        self.lr = torch.full((), args.lr, dtype=torch.float64, device=steps.device)
        if args.lr_tensor is not None:
            self.lr = args.lr_tensor.reshape(()).double()

    def real(self, i: int) -> torch.dtype:
        """The dtype of the arithmetic."""
        return _real(self._args.params[i])

    def gradient(self, i: int) -> torch.Tensor:
        """grad * inv_scale * clip, bounded by +-max_value, negated to maximize."""
        args = self._args
        factors = args.inv_scale, args.clip
        g = unscaled(args.grads[i], self.real(i), factors, args.max_value)
        return -g if args.maximize else g

    def _master(self, i: int) -> torch.Tensor | None:
        return self._args.masters[i] if self._args.masters else None

    def master(self, i: int) -> torch.Tensor:
        """The values that are updated: the master, or the param if it has none."""
        param, master = self._args.params[i], self._master(i)
        if master is None:
            return param.to(self.real(i))
        return rounding.join_master(param, master) if master.dtype == REMAINDER else master

    def _bits(self, i: int, shape: torch.Size, stream: int) -> torch.Tensor:
        args = self._args
        seed, index = (args.seed, args.indices[i]) if args.indices else (0, 0)
        return rounding.random_bits(shape, seed, self.counts[i], index, stream)

    def _scale(self, i: int, stream: int) -> torch.Tensor:
        place = stream - rounding.FIRST_STATE
        return self._args.state_scales[place * len(self._args.params) + i]

    def read_state(self, i: int, state: torch.Tensor, stream: int) -> torch.Tensor:
        """The first state or the second, which is never negative, in the dtype of the arithmetic.
        Those in 8 bits are of the formats in state8.py."""
        if state.dtype == CODES:
            return state8.decode(state, self._scale(i, stream), _KINDS[stream])
        return state.to(self.real(i))

    def write_state(self, i: int, state: torch.Tensor, value: torch.Tensor, stream: int) -> None:
        """State in 16 and 8 bits is always rounded at random."""
        if state.dtype == CODES:
            scale, place = self._scale(i, stream), stream - rounding.FIRST_STATE
            # Of the place in a block plus of the block: any two sums are independent of each other.
            of_block = self._bits(i, torch.Size([2 * len(scale)]), rounding.BLOCK)[place::2]
            bits = self._bits(i, torch.Size([state8.BLOCK]), stream) + of_block[:, None]
            value, new_scale = state8.encode(value, _KINDS[stream], bits & 0xFFFF)
            scale.copy_(torch.where(self.skip, scale, new_scale))
        elif state.dtype == torch.bfloat16:
            value = rounding.stochastic_bf16(value, self._bits(i, value.shape, stream))
        state.copy_(torch.where(self.skip, state, value))

    def write_param(self, i: int, p: torch.Tensor) -> None:
        param, master = self._args.params[i], self._master(i)
        stochastic = self._args.stochastic_rounding and param.dtype == torch.bfloat16
        if master is not None and master.dtype == REMAINDER:
            low, p = rounding.split_master(p)
        elif master is None and stochastic:
            low = rounding.stochastic_bf16(p, self._bits(i, p.shape, rounding.PARAM))
        else:
            low = p.to(param.dtype)
        if master is not None:
            master.copy_(torch.where(self.skip, master, p))
        param.copy_(torch.where(self.skip, param, low))


def _real(param: torch.Tensor) -> torch.dtype:
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def prepare(op: str, params: Sequence[torch.Tensor], steps: torch.Tensor) -> None:
    """The checks that a kernel cannot make: a tensor given for a list, and autograd."""
    checks.is_sequence(op, "params", params)
    if params:
        checks.is_tensor(op, "steps", steps)
        checks.needs_no_grad(op, "call it under torch.no_grad()", *params)


def check(
    op: str,
    args: Any,
    *,
    states: tuple[str, ...],
    may_be_empty: tuple[str, ...] = ("masters",),
) -> None:
    """states: the names of the op's lists of moments. may_be_empty: of lists that may be left out
    by giving an empty one."""
    params = checks.is_list(op, "params", args.params)
    lists = {name: getattr(args, name) for name in ("grads", *states, "masters")}
    for name, tensors in lists.items():
        count = len(checks.is_list(op, name, tensors))
        if count != len(params) and (count or name not in may_be_empty):
            raise ValueError(
                f"{op}: {name} must have one tensor per param ({len(params)}), got {count}"
            )
    _check_scalars(op, args)
    for i, param in enumerate(params):
        _check_param(op, i, param, lists, args)
    _check_scales(op, args, {name: lists[name] for name in states})
    overlap.check_disjoint(op, "params", params)


def _check_scalars(op: str, args: Any) -> None:
    checks.is_tensor(op, "steps", args.steps)
    count, device = len(args.params), args.steps.device
    checks.is_table(op, "steps", args.steps, torch.float32, (count,), device, "its own")
    for name in ("inv_scale", "clip", "found_inf", "lr_tensor"):
        if (t := getattr(args, name)) is not None:
            checks.is_tensor(op, name, t)
            fp64 = name == "lr_tensor" and t.dtype == torch.float64
            checks.is_scalar(op, name, t, torch.float64 if fp64 else torch.float32)
            checks.on_device(op, name, t, device, "steps")
    if not args.max_value > 0:
        raise ValueError(f"{op}: max_value must be positive, got {args.max_value}")
    if len(args.indices) not in (count, *([] if args.stochastic_rounding else [0])):
        raise ValueError(
            f"{op}: indices must have one number per param ({count}) for stochastic rounding, "
            f"got {len(args.indices)}"
        )
    if any(not 0 <= i < rounding.MAX_INDEX for i in args.indices):
        raise ValueError(f"{op}: indices must be in [0, 2^30), got {list(args.indices)}")


def _check_param(
    op: str, i: int, param: torch.Tensor, lists: dict[str, Sequence[torch.Tensor]], args: Any
) -> None:
    device = args.steps.device
    checks.has_dtype(op, f"params[{i}]", param, checks.REALS)
    checks.on_device(op, f"params[{i}]", param, device, "steps")
    checks.is_writable(op, f"params[{i}]", param)
    real = _real(param)
    narrow = (torch.bfloat16, CODES) if real == torch.float32 else ()
    remainder = (REMAINDER,) if param.dtype == torch.bfloat16 else ()
    allowed = {"grads": checks.FLOATS if narrow else (real,), "masters": (real, *remainder)}
    for name, tensors in lists.items():
        if not tensors:
            continue
        t, label, is_state = tensors[i], f"{name}[{i}]", name not in allowed
        checks.has_shape(op, label, t, param.shape, f"params[{i}].shape")
        checks.has_dtype(op, label, t, allowed.get(name, (real, *narrow)))
        if is_state and t.dtype != real and not args.indices:
            raise ValueError(
                f"{op}: {label} must have dtype float32, or bfloat16 or uint8 with indices for its "
                f"stochastic rounding, got {str(t.dtype).removeprefix('torch.')} without"
            )
        checks.on_device(op, label, t, device, "steps")
        if name != "grads":
            checks.is_writable(op, label, t)


def _check_scales(op: str, args: Any, states: dict[str, Sequence[torch.Tensor]]) -> None:
    """state_scales: none, or for each list of states in turn one tensor per param."""
    scales = checks.is_list(op, "state_scales", args.state_scales)
    each = [(f"{name}[{i}]", t) for name, tensors in states.items() for i, t in enumerate(tensors)]
    if len(scales) not in (0, len(each)):
        raise ValueError(
            f"{op}: state_scales must have one tensor per state and param ({len(each)}), "
            f"got {len(scales)}"
        )
    for i, (label, t) in enumerate(each):
        if t.dtype != CODES:
            continue
        if not scales:
            raise ValueError(f"{op}: {label} is uint8, which needs state_scales, got none")
        count, name = (state8.blocks(t.numel()),), f"state_scales[{i}]"
        checks.is_tensor(op, name, scales[i])
        checks.is_table(op, name, scales[i], torch.float32, count, args.steps.device, "steps'")
