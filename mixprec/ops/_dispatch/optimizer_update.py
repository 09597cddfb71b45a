"""UpdateOp: the op of an optimizer, of which only the formula is its own."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from .._reference import rounding, state8
from . import checks, example_inputs
from .op import Op

REMAINDERS = (torch.int16, torch.int8)  # of a master: the bits that a bf16 param lacks; 8 of them
CODES = torch.uint8  # of a state in 8 bits
_CODES_OF = (state8.SIGNED, state8.UNSIGNED)  # of the first state, of the second
SCHEMA = (
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] states, Tensor(c!)[] state_scales, "
    "Tensor(d!)[] masters, Tensor(e!) steps, float lr, float[] settings, bool maximize, "
    "float max_value, bool stochastic_rounding, int seed, int[] indices, Tensor? lr_tensor, "
    "Tensor? inv_scale, Tensor? clip, Tensor? found_inf) -> ()"
)
Tensors = Sequence[torch.Tensor]
Updated = tuple[torch.Tensor, Tensors]  # p and the states after a step
# formula(p, g, states, step), all in the dtype of the arithmetic.
Formula = Callable[..., Updated]


class Step(NamedTuple):
    """What the formula of an optimizer reads for a step. lr: fp64 []; number: fp32 [], from 1."""

    lr: torch.Tensor
    number: torch.Tensor
    settings: tuple[float, ...]


class UpdateOptions(NamedTuple):
    """What one call reads behind its tensors, in the order of the schema; `adamw_` describes each.
    lr: 0 where it is lr_tensor."""

    lr: float
    settings: Sequence[float]  # of the formula
    maximize: bool = False
    max_value: float = math.inf
    stochastic_rounding: bool = False
    seed: int = 0
    indices: Sequence[int] = ()
    lr_tensor: torch.Tensor | None = None
    inv_scale: torch.Tensor | None = None
    clip: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None


def rounded(value: float, real: torch.dtype) -> float:
    """A constant in the dtype of the arithmetic."""
    return value if real == torch.float64 else ctypes.c_float(value).value


def unscaled(
    grad: torch.Tensor, real: torch.dtype, factors: Iterable[torch.Tensor | None], max_value: float
) -> torch.Tensor:
    """grad in `real`, times each factor (one element) in turn, bounded by +-max_value."""
    g = grad.to(real)
    for factor in factors:
        if factor is not None:
            g = g * factor.reshape(()).to(real)
    limit = rounded(max_value, real)
    return torch.where(g > limit, limit, torch.where(g < -limit, -limit, g))  # NaN stays NaN


class _Update:
    """One call of the reference: counts the steps, unless it is skipped, and then reads and writes
    the tensors of each param i."""

    def __init__(self, args: Any) -> None:
        self._args, steps = args, args.steps
        found = torch.zeros_like(steps[:1]) if args.found_inf is None else args.found_inf
        self._skip = found.reshape(()) != 0
        steps.copy_(torch.where(self._skip, steps, steps + 1))
        self.counts = steps.clone()
        self.lr = torch.full((), args.lr, dtype=torch.float64, device=steps.device)
        if args.lr_tensor is not None:
            self.lr = args.lr_tensor.reshape(()).double()

    def gradient(self, i: int) -> torch.Tensor:
        """grad * inv_scale * clip, bounded by +-max_value, negated to maximize."""
        args = self._args
        factors = args.inv_scale, args.clip
        g = unscaled(args.grads[i], _real(args.params[i]), factors, args.max_value)
        return -g if args.maximize else g

    def _master(self, i: int) -> torch.Tensor | None:
        return self._args.masters[i] if self._args.masters else None

    def master(self, i: int) -> torch.Tensor:
        """The values that are updated: the master, or the param if it has none."""
        param, master = self._args.params[i], self._master(i)
        if master is None:
            return param.to(_real(param))
        return rounding.join_master(param, master) if master.dtype in REMAINDERS else master

    def _bits(self, i: int, shape: torch.Size, stream: int) -> torch.Tensor:
        seed, index = (self._args.seed, self._args.indices[i]) if self._args.indices else (0, 0)
        return rounding.random_bits(shape, seed, self.counts[i], index, stream)

    def _block_bits(self, i: int, blocks: int, stream: int) -> torch.Tensor:
        """[blocks, 256]: those of the place in a block plus those of the block."""
        second = stream == rounding.SECOND_STATE
        of_block = self._bits(i, torch.Size([2 * blocks]), rounding.BLOCK)[int(second) :: 2]
        in_block = self._bits(i, torch.Size([state8.BLOCK]), stream)
        return in_block + of_block[:, None] & 0xFFFF

    def _places(self, i: int) -> Iterator[tuple[int, int]]:
        """For each state of param i, which one it is, and its place in the lists."""
        count = len(self._args.params)
        return ((k, k * count + i) for k in range(len(self._args.states) // count))

    def read_states(self, i: int) -> list[torch.Tensor]:
        """In the dtype of the arithmetic."""
        args, states = self._args, []
        for k, place in self._places(i):
            state = args.states[place]
            if state.dtype == CODES:
                states.append(state8.decode(state, args.state_scales[place], _CODES_OF[k]))
            else:
                states.append(state.to(_real(args.params[i])))
        return states

    def write_states(self, i: int, values: Tensors) -> None:
        """States in 16 and 8 bits are always rounded at random."""
        for k, place in self._places(i):
            state, value = self._args.states[place], values[k]
            if state.dtype == CODES:
                scale = self._args.state_scales[place]
                bits = self._block_bits(i, len(scale), rounding.FIRST_STATE + k)
                value, new_scale = state8.encode(value, _CODES_OF[k], bits)
                scale.copy_(torch.where(self._skip, scale, new_scale))
            elif state.dtype == torch.bfloat16:
                bits = self._bits(i, value.shape, rounding.FIRST_STATE + k)
                value = rounding.stochastic_bf16(value, bits)
            state.copy_(torch.where(self._skip, state, value))

    def write_param(self, i: int, p: torch.Tensor) -> None:
        param, master = self._args.params[i], self._master(i)
        stochastic = self._args.stochastic_rounding and param.dtype == torch.bfloat16
        if master is not None and master.dtype == torch.int8:
            blocks = -(-p.numel() // state8.BLOCK)
            bits = self._block_bits(i, blocks, rounding.PARAM).flatten()[: p.numel()]
            p = rounding.stochastic_24(p, bits.view(p.shape))
            low, p = rounding.split_master(p)
            p = p >> 8
        elif master is not None and master.dtype == torch.int16:
            low, p = rounding.split_master(p)
        elif master is None and stochastic:
            low = rounding.stochastic_bf16(p, self._bits(i, p.shape, rounding.PARAM))
        else:
            low = p.to(param.dtype)
        if master is not None:
            master.copy_(torch.where(self._skip, master, p))
        param.copy_(torch.where(self._skip, param, low))


def _reference(formula: Formula, args: Any) -> None:
    update = _Update(args)
    for i in range(len(args.params)):
        step = Step(update.lr, update.counts[i], args.settings)
        p, states = formula(update.master(i), update.gradient(i), update.read_states(i), step)
        update.write_states(i, states)
        update.write_param(i, p)


class UpdateOp(Op):
    """The op `name` of an optimizer: one schema for all of them, `UpdateOptions` at its end.

    states: the names of the lists that its public function has, of the schema's `states`.
    settings: those of the numbers in `settings`, with examples for the comparison with the
    reference. formula: in plain torch. stateless: a call may have none of the states.
    """

    def __init__(
        self,
        name: str,
        *,
        states: tuple[str, ...],
        settings: dict[str, float],
        formula: Formula,
        stateless: bool = False,
    ) -> None:
        self.states, self.settings, self.stateless = states, tuple(settings), stateless
        super().__init__(
            name,
            SCHEMA,
            reference=lambda args: _reference(formula, args),
            check=lambda args: _check(self, args),
            examples=partial(example_inputs.update, len(states), [*settings.values()]),
            triton="step",
        )

    def run(
        self,
        settings: Sequence[float],
        params: Tensors,
        grads: Tensors,
        states: Sequence[Tensors],
        masters: Tensors,
        steps: torch.Tensor,
        lr: float | torch.Tensor,
        state_scales: Tensors = (),
        **options: Any,
    ) -> None:
        """The public function; states: a list for each of the names; may be empty if stateless."""
        for name, tensors in zip(("params", *self.states), (params, *states), strict=True):
            checks.is_sequence(self.name, name, tensors)
        number, rate = (0.0, lr) if isinstance(lr, torch.Tensor) else (lr, None)
        given = UpdateOptions(number, settings, lr_tensor=rate, **options)
        if not params:
            return
        checks.needs_no_grad(self.name, "call it under torch.no_grad()", *params)
        for name, tensors in zip(self.states, states, strict=True):
            if not self.stateless or any(states):
                _check_count(self.name, name, len(tensors), len(params), False)
        flat = [t for tensors in states for t in tensors]
        self(params, grads, flat, state_scales, masters, steps, *given)


def _real(param: torch.Tensor) -> torch.dtype:
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def _check_count(op: str, name: str, count: int, params: int, may_be_empty: bool) -> None:
    if count != params and not (may_be_empty and count == 0):
        raise ValueError(f"{op}: {name} must have one tensor per param ({params}), got {count}")


def _check(op: UpdateOp, args: Any) -> None:
    name, lists = op.name, ("params", "grads", "masters", "states")
    count, grads, masters, all_states = (
        len(checks.is_list(name, each, getattr(args, each))) for each in lists
    )
    _check_count(name, "grads", grads, count, False)
    _check_count(name, "masters", masters, count, True)
    each = f"{name}: {' and '.join(op.states)}"
    _check_count(each, "states", all_states, count * len(op.states), op.stateless)
    if len(args.settings) != len(op.settings):
        raise ValueError(
            f"{name}: settings must be {', '.join(op.settings)}, got {len(args.settings)} numbers"
        )
    _check_scalars(name, args)
    states = [f"{state}[{i}]" for state in op.states for i in range(count)]
    labels = [*zip(states, args.states, strict=False)]
    for i, param in enumerate(args.params):
        _check_param(name, i, param, args, labels[i::count])
    _check_scales(name, args, labels)
    checks.check_disjoint(name, "params", args.params)


def _check_scalars(op: str, args: Any) -> None:
    checks.is_tensor(op, "steps", args.steps)
    count = len(args.params)
    checks.is_table(op, "steps", args.steps, torch.float32, (count,), args.steps, "its own")
    for name in ("inv_scale", "clip", "found_inf", "lr_tensor"):
        if (t := getattr(args, name)) is not None:
            checks.is_tensor(op, name, t)
            fp64 = name == "lr_tensor" and t.dtype == torch.float64
            dtype = torch.float64 if fp64 else torch.float32
            checks.is_scalar(op, name, t, dtype, args.steps, "steps")
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
    op: str, i: int, param: torch.Tensor, args: Any, states: list[tuple[str, torch.Tensor]]
) -> None:
    checks.matches(op, f"params[{i}]", param, checks.REALS, args.steps, owner="steps")
    checks.is_writable(op, f"params[{i}]", param)
    real = _real(param)
    narrow = (torch.bfloat16, CODES) if real == torch.float32 else ()
    remainders = REMAINDERS if param.dtype == torch.bfloat16 else ()
    given = [(f"grads[{i}]", args.grads[i], checks.FLOATS if narrow else (real,))]
    if args.masters:
        given.append((f"masters[{i}]", args.masters[i], (real, *remainders)))
    given += [(label, t, (real, *narrow)) for label, t in states]
    for label, t, dtypes in given:
        meaning = f"params[{i}].shape"
        checks.matches(op, label, t, dtypes, args.steps, param.shape, meaning, "steps")
        if t is not args.grads[i]:
            checks.is_writable(op, label, t)
    for label, t in states:
        if t.dtype != real and not args.indices:
            raise ValueError(
                f"{op}: {label} must have dtype float32, or bfloat16 or uint8 with indices for its "
                f"stochastic rounding, got {str(t.dtype).removeprefix('torch.')} without"
            )
    if args.masters and args.masters[i].dtype == torch.int8 and not args.indices:
        raise ValueError(
            f"{op}: masters[{i}] must have dtype float32 or int16, or int8 with indices for its "
            "stochastic rounding, got int8 without"
        )


def _check_scales(op: str, args: Any, states: list[tuple[str, torch.Tensor]]) -> None:
    """state_scales: none, or one tensor beside each state."""
    scales = checks.is_list(op, "state_scales", args.state_scales)
    if len(scales) not in (0, len(states)):
        raise ValueError(
            f"{op}: state_scales must have one tensor per state and param ({len(states)}), "
            f"got {len(scales)}"
        )
    for i, (label, t) in enumerate(states):
        if t.dtype != CODES:
            continue
        if not scales:
            raise ValueError(f"{op}: {label} is uint8, which needs state_scales, got none")
        count, name = (state8.blocks(t.numel()),), f"state_scales[{i}]"
        checks.is_table(op, name, scales[i], torch.float32, count, args.steps, "steps'")
