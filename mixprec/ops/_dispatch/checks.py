"""Argument checks shared by the public functions and the fake kernels of the ops."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
REALS = (*FLOATS, torch.float64)  # of params and gradients
# The limits of a scale and its inverse: both are normal fp32 numbers.
MIN_SCALE, MAX_SCALE = 2.0**-126, 2.0**126
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# What to do about another dtype of a layer's input, and of its weight.
CAST_X = "cast it, as by x.float()"
CAST_WEIGHT = "cast the model, as by model.float(), or leave the layer out of convert"
# Words for the dtypes of params, also behind "torch.".
_WORDS = {
    **dict.fromkeys(("float32", "fp32"), torch.float32),
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float16", "fp16", "half"), torch.float16),
}


def as_dtype(value: Any) -> Any:
    """The dtype for a word such as "bf16" or "torch.bfloat16"; anything else as it is."""
    return _WORDS.get(value.removeprefix("torch."), value) if isinstance(value, str) else value


def param_dtype(op: str, name: str, value: object) -> torch.dtype:
    """`value`, a dtype that params can have or a word for it, as the dtype."""
    dtype = as_dtype(value)
    if isinstance(dtype, torch.dtype) and dtype in FLOATS:
        return dtype
    raise ValueError(
        f'{op}: {name} must be torch.bfloat16 ("bfloat16", "bf16"), torch.float16 ("float16", '
        f'"fp16", "half") or torch.float32 ("float32", "fp32"), got {value!r}'
    )


NOT_TRACED = (
    "which it cannot trace: call it before mixprec.convert or after mixprec.unconvert(model), or "
    "use torch.compile or torch.export"
)


def is_tensor(op: str, name: str, x: object) -> None:
    if not isinstance(x, torch.Tensor):
        traced = isinstance(x, torch.fx.Proxy)
        raise TypeError(
            f"{op}: {name} must be a torch.Tensor, got {type(x).__name__}"
            + (
                f": torch.fx.symbolic_trace found a layer of mixprec, {NOT_TRACED}"
                if traced
                else ""
            )
        )
    # torch.compile cannot trace `layout` in a backward; fake and compiled tensors are dense.
    if not torch.compiler.is_compiling() and x.layout != torch.strided:
        raise ValueError(f"{op}: {name} must be a dense tensor, got layout {x.layout}")


def is_module(op: str, model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{op}: model must be a torch.nn.Module, got {type(model).__name__}")


def is_group(op: str, process_group: object) -> None:
    import torch.distributed as dist

    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"{op}: process_group must be a ProcessGroup that this rank is in, got "
            f"{process_group!r}"
        )


def is_int64(op: str, name: str, number: object) -> None:
    """TypeError unless it is an int, ValueError unless 64 bits with a sign hold it."""
    if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)):
        raise TypeError(f"{op}: {name} must be an int, got {number!r}")
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{op}: {name} must be in [-2^63, 2^63), got {number}")


def is_sequence(op: str, name: str, tensors: object) -> None:
    """Require a list or tuple, not a tensor (which torch would split into rows)."""
    if not isinstance(tensors, (list, tuple)):
        got = type(tensors).__name__
        raise TypeError(f"{op}: {name} must be a list of tensors, got {got}")


def is_list(op: str, name: str, tensors: Sequence[object]) -> Sequence[torch.Tensor]:
    """`tensors`, after checking that it is a list or tuple of dense tensors."""
    is_sequence(op, name, tensors)
    for i, t in enumerate(tensors):
        is_tensor(op, f"{name}[{i}]", t)
    return tensors  # type: ignore[return-value]


def of_layer(op: str, name: str) -> str:
    """The op, as errors name it, of the layer that has this path in the model."""
    return f"{op} ({name})" if name else op


def has_dtype(
    op: str, name: str, x: torch.Tensor, allowed: tuple[torch.dtype, ...], hint: str = ""
) -> None:
    """Require a dense tensor of one of these dtypes. hint: what to do otherwise."""
    is_tensor(op, name, x)
    if x.dtype not in allowed:
        dtypes = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        hint = f": {hint}" if hint else ""
        raise ValueError(f"{op}: {name} must have dtype {dtypes}, got {x.dtype}{hint}")


def has_shape(op: str, name: str, x: torch.Tensor, shape: Sequence[int], meaning: str) -> None:
    if tuple(x.shape) != tuple(shape):
        raise ValueError(
            f"{op}: {name} must have shape {meaning} = {tuple(shape)}, got {tuple(x.shape)}"
        )


def on_device(op: str, name: str, x: torch.Tensor, device: torch.device, owner: str) -> None:
    if x.device != device:
        raise ValueError(f"{op}: {name} must be on {owner}'s device {device}, got {x.device}")


def matches(
    op: str,
    name: str,
    t: torch.Tensor | None,
    allowed: tuple[torch.dtype, ...],
    other: torch.Tensor,
    shape: Sequence[int] | None = None,
    meaning: str = "",
    owner: str = "x",
) -> None:
    """Require one of these dtypes, that shape, if any, and the device of `other`, the argument
    `owner`; None is accepted."""
    if t is not None:
        has_dtype(op, name, t, allowed)
        if shape is not None:
            has_shape(op, name, t, shape, meaning)
        on_device(op, name, t, other.device, owner)


def is_like(
    op: str,
    name: str,
    t: torch.Tensor | None,
    other: torch.Tensor,
    allowed: tuple[torch.dtype, ...],
    owner: str = "x",
) -> None:
    """Require one of these dtypes, and the shape and device of the argument `owner`, or None."""
    matches(op, name, t, allowed, other, other.shape, f"{owner}'s shape", owner)


def is_scalar(
    op: str,
    name: str,
    x: torch.Tensor,
    dtype: torch.dtype,
    other: torch.Tensor | None = None,
    owner: str = "x",
) -> None:
    """One element of `dtype`, shape [] or [1], on the device of `other`, the argument `owner`."""
    is_tensor(op, name, x)
    if x.dtype != dtype or x.numel() != 1:
        raise ValueError(
            f"{op}: {name} must hold one {str(dtype).removeprefix('torch.')}, "
            f"got shape {tuple(x.shape)}, dtype {x.dtype}"
        )
    if other is not None:
        on_device(op, name, x, other.device, owner)


def is_table(
    op: str,
    name: str,
    x: torch.Tensor | None,
    dtype: torch.dtype,
    shape: Sequence[int],
    other: torch.Tensor,
    owner: str,
) -> None:
    """A contiguous tensor to be overwritten, one row per tensor of a list, or None."""
    matches(op, name, x, (dtype,), other, shape, "[tensors, ...]", owner)
    if x is not None and not x.is_contiguous():
        raise ValueError(f"{op}: {name} must be contiguous, got strides {x.stride()}")


def is_float(op: str, name: str, dtype: torch.dtype) -> None:
    if dtype not in FLOATS:
        raise ValueError(f"{op}: {name} must be float32, bfloat16 or float16, got {dtype}")


def is_writable(op: str, name: str, x: torch.Tensor) -> None:
    """Require that no two elements of x share memory, as in an expanded tensor, and that memory
    holds its values, as it does not in the imaginary part of a conjugate."""
    if x.is_neg():
        raise ValueError(
            f"{op}: {name} is written in place and must hold its values, got a negative view of "
            f"others; use {name}.resolve_neg()"
        )
    extent = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= extent and x.numel() > 0:
            raise ValueError(
                f"{op}: {name} is written in place, so its elements must not share memory, "
                f"got shape {tuple(x.shape)}, strides {x.stride()}"
            )
        extent += (size - 1) * stride


def needs_no_grad(op: str, hint: str, *tensors: object) -> None:
    """Raise if an input of an op without a derivative requires grad, naming the alternative."""
    if not torch.is_grad_enabled():
        return
    for t in tensors:  # not any(): a generator is a tenth of a microsecond of every call
        if getattr(t, "requires_grad", False):
            raise RuntimeError(
                f"{op}: this op has no derivative and an input requires grad; {hint}"
            )


def positive_scale(
    op: str,
    name: str,
    scale: float | torch.Tensor | None,
    device: torch.device,
    or_zero: bool = False,
) -> torch.Tensor | None:
    """`scale` as an fp32 tensor of one element on `device`, checked to be positive and finite.

    A number and a CPU tensor are checked; a tensor on another device is not read (host sync).
    or_zero: a tensor may hold 0 (not initialized).
    """
    if scale is None:
        return None
    if isinstance(scale, torch.Tensor):
        is_scalar(op, name, scale, torch.float32)
        on_device(op, name, scale, device, "the input")
        needs_no_grad(op, f"detach {name}", scale)
        if device.type != "cpu" or torch.compiler.is_compiling() or type(scale) is not torch.Tensor:
            return scale
        value = scale.item()
        if or_zero and value == 0:
            return scale
    elif isinstance(scale, (int, float)) and not isinstance(scale, bool):
        value = ctypes.c_float(scale).value  # rounded to FP32: 1e-60 is 0
        scale = torch.tensor(value, dtype=torch.float32, device=device)
    else:
        got = type(scale).__name__
        raise TypeError(f"{op}: {name} must be a number or a tensor, got {got}")
    if not MIN_SCALE <= value <= MAX_SCALE:
        raise ValueError(
            f"{op}: {name} must be positive and finite, got {value} (allowed: 2^-126 to 2^126, "
            f"so that the inverse is a normal number too)"
        )
    return scale


def check_disjoint(op: str, name: str, tensors: Sequence[torch.Tensor]) -> None:
    """ValueError for two tensors that share an element, which threads would write in no order.

    Each of them by itself has passed is_writable. As in torch, two views with gaps, such as columns
    of one matrix, may reach into each other's range: whether they share an element is not looked
    for.
    """
    extents = defaultdict(list)
    for i, t in enumerate(tensors):
        if t.numel() > 0:
            begin, end = map(int, extent(t))
            extents[t.untyped_storage()._cdata].append((begin, end, i))
    for found in extents.values():
        reaching: list[tuple[int, int, int]] = []  # those that may reach the next one
        for begin, end, i in sorted(found):
            reaching = [other for other in reaching if other[1] > begin]
            for first, _, j in reaching:
                if first == begin or (is_dense(tensors[i]) and is_dense(tensors[j])):
                    raise ValueError(
                        f"{op}: {name} are written in place, so no two of them may share memory, "
                        f"got {name}[{min(i, j)}] and {name}[{max(i, j)}], which do"
                    )
            reaching.append((begin, end, i))


def ranges_overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether x and y share a storage and their ranges in it overlap."""
    if x.untyped_storage()._cdata != y.untyped_storage()._cdata:
        return False
    if x.numel() == 0 or y.numel() == 0:
        return False
    (x0, x1), (y0, y1) = extent(x), extent(y)
    return bool(x0 < y1 and y0 < x1)


def extent(t: torch.Tensor) -> tuple[Any, Any]:
    """Its first byte in the storage, and the one behind its last, which torch.compile may not know
    as numbers."""
    first, size = t.storage_offset(), t.dtype.itemsize
    last = first + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return first * size, (last + 1) * size


def is_dense(t: torch.Tensor) -> bool:
    """The elements, in some order of the dimensions, fill a range of memory without gaps."""
    expected = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
