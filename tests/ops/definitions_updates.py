"""One step of each optimizer, from reading its tensors to rounding what is written back.

States in 8 bits are read and written by the reference's own code: test_state8.py has its values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import independent as ind
import numpy as np
import torch
from definitions_casts import filled, fp32

from mixprec.ops._reference import state8

F32 = np.float32
UPDATES: dict[str, tuple[Callable[..., Any], str]] = {
    "adamw_": (ind.adamw, "beta1 beta2 eps weight_decay decoupled_weight_decay"),
    "sgd_": (ind.sgd, "momentum dampening weight_decay nesterov"),
    "lion_": (ind.lion, "beta1 beta2 weight_decay"),
    "muon_direction_": (ind.muon_direction, "momentum nesterov"),
}
KINDS = (state8.SIGNED, state8.UNSIGNED)  # of the first state, of the second


def update_(
    op: str, params: list[torch.Tensor], grads: list[torch.Tensor], states: list[torch.Tensor],
    state_scales: list[torch.Tensor], masters: list[torch.Tensor], steps: torch.Tensor, lr: float,
    settings: list[float], maximize: bool, max_value: float, stochastic: bool, seed: int,
    indices: list[int], lr_tensor: torch.Tensor | None, inv_scale: torch.Tensor | None,
    clip: torch.Tensor | None, found_inf: torch.Tensor | None,
) -> None:  # fmt: skip
    if found_inf is not None and found_inf.item() != 0:
        return
    steps += 1
    formula, names = UPDATES[op]
    options = dict(zip(names.split(), settings, strict=True))
    options |= {"maximize": maximize, "max_value": max_value, "lr": lr}
    given = {"lr": lr_tensor, "inv_scale": inv_scale, "clip": clip}
    options |= {name: t.item() for name, t in given.items() if t is not None}
    for i, param in enumerate(params):
        step, real = int(steps[i]), np.float64 if param.dtype == torch.float64 else F32
        mine, scales = states[i :: len(params)], state_scales[i :: len(params)]
        master = masters[i] if masters else None

        def random(stream: int, count: int, i: int = i, step: int = step) -> np.ndarray:
            return ind.random16(count, seed & 2**64 - 1, step, indices[i], stream)

        def by_blocks(stream: int, blocks: int, second: int = 0) -> np.ndarray:
            of_block = random(3, 2 * blocks)[second::2].astype(np.int64)
            return random(stream, state8.BLOCK) + of_block[:, None] & 0xFFFF

        before = [
            s if s.dtype != torch.uint8 else state8.decode(s, scale, KINDS[k])
            for k, (s, scale) in enumerate(zip(mine, scales, strict=True))
        ]
        p, *after = formula(
            ind.values(held(param, master)), ind.values(grads[i]),
            *([ind.values(s) for s in before] or [None] * (op == "sgd_")),
            step, real=real, **options,
        )  # fmt: skip
        for k, state in enumerate(mine):
            if state.dtype == torch.uint8:
                bits = by_blocks(1 + k, len(scales[k]), k)
                codes, scale = state8.encode(
                    fp32(after[k], *state.shape), KINDS[k], torch.from_numpy(bits)
                )
                scales[k].copy_(scale)
                state.copy_(codes)
            else:
                bits = random(1 + k, state.numel()) if state.dtype == torch.bfloat16 else None
                write(state, after[k], bits)
        if master is not None and master.dtype in (torch.int16, torch.int8):
            if master.dtype == torch.int8:
                bits = by_blocks(0, -(-param.numel() // state8.BLOCK)).reshape(-1)
                p = with_24_bits(np.array(p, F32), bits[: param.numel()])
            write_with_remainder(param, master, p)
            continue
        at_random = stochastic and master is None and param.dtype == torch.bfloat16
        write(param, p, random(0, param.numel()) if at_random else None)
        if master is not None:
            write(master, p, None)


def write(t: torch.Tensor, x: np.ndarray, bits: np.ndarray | None) -> None:
    with np.errstate(all="ignore"):
        codes = ind.narrow(x, t.dtype) if bits is None else ind.stochastic_bf16(x, bits)
    t.copy_(filled(codes, t.dtype).reshape(t.shape))


def held(param: torch.Tensor, master: torch.Tensor | None) -> torch.Tensor:
    """What is updated: the master, which may be the param and its remainder, or the param. One that
    other code set to 0 stays that."""
    if master is None or master.dtype not in (torch.int16, torch.int8):
        return param if master is None else master
    low = master.numpy().astype(np.int64) * (1 if master.dtype == torch.int16 else 256)
    low = np.where((ind.values(param) == 0) & (low < 0), 0, low)
    code = (ind.bits(param).astype(np.int64) << 16) + low & 0xFFFFFFFF
    return fp32(code.astype(np.uint32).view(F32))


def with_24_bits(p: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """The neighbours below and above are 256 codes apart; bits: random, of which 8 count."""
    code = p.reshape(-1).view(np.uint32).astype(np.int64)
    below, part = code // 256 * 256, code % 256
    rounded = (below + 256 * (part + bits.reshape(-1) % 256 >= 256)).astype(np.uint32).view(F32)
    return np.where(np.isfinite(p), rounded.reshape(p.shape), p)


def write_with_remainder(param: torch.Tensor, remainder: torch.Tensor, p: np.ndarray) -> None:
    code = np.array(p, F32).view(np.uint32).astype(np.int64)
    high = code + 0x8000 >> 16
    nan = np.isnan(p)
    high, low = np.where(nan, 0x7FC0, high), np.where(nan, 0, code - (high << 16))
    param.copy_(filled(high.astype(np.uint16), torch.bfloat16).reshape(param.shape))
    low = np.asarray(low // 256 if remainder.dtype == torch.int8 else low)
    remainder.copy_(torch.from_numpy(low).reshape(remainder.shape))
