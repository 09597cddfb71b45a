"""torch.autocast for torch.ops.mixprec: it casts the operands of a GEMM."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}  # the dispatch key by device type
_CAST = (torch.float32, torch.bfloat16, torch.float16)


def cast_operand(x: torch.Tensor, device: str) -> torch.Tensor:
    """Cast an operand as torch.autocast does: fp32, bf16 and fp16 to the autocast dtype.

    FP8, whose scale belongs to its format, is not cast, nor is fp64, as in torch's own ops.
    """
    return x.to(operand_dtype(x, device))


def operand(x: torch.Tensor) -> torch.Tensor:
    """x, cast as an operand where torch.autocast is on for its device."""
    if not torch._C._is_any_autocast_enabled():  # asking for a device takes four times as long
        return x
    device = x.device.type
    return cast_operand(x, device) if is_on(device) else x


def operand_dtype(x: torch.Tensor, device: str) -> torch.dtype:
    """The dtype of `cast_operand(x, device)`."""
    cast = x.dtype in _CAST and x.device.type == device
    return torch.get_autocast_dtype(device) if cast else x.dtype


def is_on(device: str) -> bool:
    return device != "meta" and torch.is_autocast_enabled(device)  # meta has no autocast


def disabled(device: str) -> AbstractContextManager[Any]:
    """A block without torch.autocast, for what casts by a rule of its own."""
    return torch.autocast(device, enabled=False) if is_on(device) else nullcontext()


def kernel(op: str, operands: tuple[int, ...], device: str) -> Callable[..., Any]:
    """The autocast kernel of `mixprec::op`; operands: the indices of the arguments to cast, empty
    for an op that autocast does not affect."""
    if not operands:
        return torch.library.fallthrough_kernel

    def cast_and_run(*args: Any) -> Any:
        cast = list(args)
        for i in operands:
            cast[i] = cast_operand(args[i], device)
        with torch.autocast(device, enabled=False):
            return getattr(torch.ops.mixprec, op).default(*cast)

    return cast_and_run
