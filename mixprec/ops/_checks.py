"""Argument checks shared by the public functions and the fake kernels of the ops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def is_tensor(op: str, name: str, x: object) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(x).__name__}")
    # torch.compile cannot trace `layout` in a backward; fake and compiled tensors are dense.
    if not torch.compiler.is_compiling() and x.layout != torch.strided:
        raise ValueError(f"{op}: {name} must be a dense tensor, got layout {x.layout}")


def is_list(op: str, name: str, tensors: object) -> list[torch.Tensor]:
    """`tensors` as a list, after checking that it is a sequence and not a single tensor."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
        got = type(tensors).__name__
        raise TypeError(f"{op}: {name} must be a list of tensors, got {got}")
    for i, t in enumerate(tensors):
        is_tensor(op, f"{name}[{i}]", t)
    return list(tensors)


def has_dtype(op: str, name: str, x: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if x.dtype not in allowed:
        words = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise ValueError(f"{op}: {name} must have dtype {words}, got {x.dtype}")


def has_shape(op: str, name: str, x: torch.Tensor, shape: Sequence[int], meaning: str) -> None:
    if tuple(x.shape) != tuple(shape):
        raise ValueError(
            f"{op}: {name} must have shape {meaning} = {tuple(shape)}, got {tuple(x.shape)}"
        )


def on_device(op: str, name: str, x: torch.Tensor, device: torch.device, owner: str) -> None:
    if x.device != device:
        raise ValueError(f"{op}: {name} must be on {owner}'s device {device}, got {x.device}")


def is_scalar(op: str, name: str, x: torch.Tensor, dtype: torch.dtype) -> None:
    """One element of `dtype`, shape [] or [1]."""
    is_tensor(op, name, x)
    if x.dtype != dtype or x.numel() != 1:
        raise ValueError(
            f"{op}: {name} must hold one {str(dtype).removeprefix('torch.')}, "
            f"got shape {tuple(x.shape)}, dtype {x.dtype}"
        )


def is_writable(op: str, name: str, x: torch.Tensor) -> None:
    """No two elements of x share memory (an expanded tensor cannot be written in place)."""
    for size, stride in zip(x.shape, x.stride(), strict=True):
        if stride == 0 and size > 1:
            raise ValueError(
                f"{op}: {name} is written in place, so its elements must not share memory, "
                f"got shape {tuple(x.shape)}, strides {x.stride()}"
            )


def needs_no_grad(op: str, hint: str, *tensors: torch.Tensor | None) -> None:
    """Raw ops have no derivative: refuse inputs that ask for one, naming what to use instead."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(f"{op}: this op has no derivative and an input requires grad; {hint}")


def positive_scale(
    op: str, name: str, scale: float | torch.Tensor | None, device: torch.device
) -> torch.Tensor | None:
    """`scale` as an fp32 tensor of one element on `device`, checked to be positive and finite.

    A number and a CPU tensor are checked; a tensor on another device is not read (host sync).
    """
    if scale is None:
        return None
    if isinstance(scale, torch.Tensor):
        is_scalar(op, name, scale, torch.float32)
        on_device(op, name, scale, device, "the input")
        if device.type != "cpu" or torch.compiler.is_compiling() or type(scale) is not torch.Tensor:
            return scale
        value = scale.item()
    else:
        value = float(scale)
        scale = torch.tensor(value, dtype=torch.float32, device=device)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{op}: {name} must be positive and finite, got {value}")
    return scale


def mutated(*tensors: torch.Tensor) -> None:
    """Tell autograd that these tensors were written in place (our schemas do not do it alone)."""
    if torch.compiler.is_compiling():
        return
    if torch.is_inference_mode_enabled():
        tensors = tuple(t for t in tensors if not t.is_inference())
    torch.autograd.graph.increment_version(tensors)
