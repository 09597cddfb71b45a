"""Compiles csrc/cuda with g++ against the shim beside this file, and calls the kernels by ctypes.

The functions take and change contiguous CPU tensors like the references in mixprec.ops.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mixprec.ops._dispatch import scale_layout

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CSRC = ROOT / "csrc"
BUILD = ROOT / "build" / "cuda_on_cpu"
SCHEDULER = HERE / "scheduler.cpp"
FLAGS = (
    # 16-byte words stand for the elements in them: nvcc does not look at types here, g++ would
    *("-std=c++20", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", f"-I{HERE}"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
)
SUFFIXES = (".h", ".cuh", ".cpp", ".cu")
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float64),
)  # csrc/dispatch.h: enum class Dtype


def sources(csrc: Path = CSRC) -> list[Path]:
    """Everything that the compiled programs depend on."""
    return sorted(
        path for folder in (csrc, HERE) for path in folder.rglob("*") if path.suffix in SUFFIXES
    )


def compile_(command: Sequence[str | Path], suffix: str, csrc: Path = CSRC) -> Path:
    """The result of `g++ FLAGS command -o ...`, compiled unless these very sources were before."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise RuntimeError("the kernels of csrc/cuda are tested with g++: apt-get install g++")
    words = [compiler, *FLAGS, *map(str, command)]
    key = hashlib.sha256(subprocess.check_output([compiler, "--version"]))
    key.update(" ".join(words).encode())  # without csrc, of which only the contents count
    for path in sources(csrc):
        key.update(path.name.encode() + path.read_bytes())
    target = BUILD / f"{key.hexdigest()[:16]}{suffix}"
    if not target.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}{suffix}")
        words += [f"-I{csrc}", "-o", str(partial)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(words)}\n{done.stderr[-4000:]}")
        partial.replace(target)
    return target


@cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(compile_(["-O2", "-shared", SCHEDULER, HERE / "runner.cpp"], ".so")))


def _call(function: str, *args: object) -> None:
    error = getattr(library(), function)(*args)
    assert error == 0, f"{function}: the launch failed with error {error}"


def _at(t: torch.Tensor | None) -> ctypes.c_void_p:
    if t is None:
        return ctypes.c_void_p(None)
    assert t.is_contiguous(), "the kernels take contiguous memory"
    return ctypes.c_void_p(t.data_ptr())


def _list(tensors: Sequence[torch.Tensor]) -> tuple[object, ...]:
    n = len(tensors)
    return (
        n,
        (ctypes.c_int * n)(*[DTYPES.index(t.dtype) for t in tensors]),
        (ctypes.c_void_p * n)(*[_at(t).value for t in tensors]),
        (ctypes.c_int64 * n)(*[t.numel() for t in tensors]),
    )


def seed(value: int) -> None:
    """Another order of blocks and threads."""
    library().seed(ctypes.c_uint64(value))


def unscale_(
    grads: list[torch.Tensor],
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    counts: torch.Tensor | None,
    sms: int = 2,
) -> None:
    _call("unscale", *_list(grads), _at(inv_scale), _at(found_inf), _at(counts), sms)


def grad_stats_(
    grads: list[torch.Tensor],
    inv_scale: torch.Tensor | None,
    found_inf: torch.Tensor,
    sum_sq: torch.Tensor,
    counts: torch.Tensor | None,
    sms: int = 2,
) -> None:
    tail = (_at(inv_scale), _at(found_inf), _at(sum_sq), _at(counts), sms)
    _call("grad_stats", *_list(grads), *tail)


def amax(x: torch.Tensor, sms: int = 2) -> torch.Tensor:
    result = torch.full((), -7.0)
    _call("amax", DTYPES.index(x.dtype), _at(x), ctypes.c_int64(x.numel()), _at(result), sms)
    return result


def misaligned(shape: Sequence[int], dtype: torch.dtype, by: int) -> torch.Tensor:
    """A tensor of 0xFF bytes (NaN in all formats) that starts `by` elements after a boundary."""
    count = torch.Size(shape).numel() + by
    storage = torch.full((count * dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype)
    return storage[by:].view(shape)


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype,
    scale: torch.Tensor | None,
    transpose: bool,
    granularity: str,
    power_of_two_scale: bool,
    sms: int = 2,
    offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, cols = scale_layout.as_matrix(x.shape)
    q = misaligned(x.shape, dtype, offset)
    q_t = misaligned((cols, rows) if transpose else (0, 0), dtype, offset)
    by_tensor = granularity == "tensor"
    shape_t = (0,)
    if transpose and not by_tensor:
        shape_t = scale_layout.scale_shape(granularity, cols, rows)
    scale_inv = torch.full(scale_layout.scale_shape(granularity, rows, cols), -7.0)
    scale_inv_t, largest = torch.full(shape_t, -7.0), torch.full((), -7.0)
    _call(
        *("quantize", DTYPES.index(x.dtype), DTYPES.index(dtype)),
        *(list(scale_layout.GRANULARITIES).index(granularity), _at(x), _at(q), _at(q_t)),
        *(ctypes.c_int64(rows), ctypes.c_int64(cols), transpose, power_of_two_scale),
        *(_at(scale), _at(scale_inv), _at(scale_inv_t), _at(largest), sms),
    )
    return q, q_t, scale_inv, scale_inv_t, largest


class _ScaleGrid(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        *((f, ctypes.c_int64) for f in ("cols", "rows_each", "cols_each", "stride_0", "stride_1")),
    ]


def dequantize(
    data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype, sms: int = 2, offset: int = 0
) -> torch.Tensor:
    """The scales may have any strides."""
    out = misaligned(data.shape, dtype, offset)
    rows, cols = scale_layout.as_matrix(data.shape)
    grid = _ScaleGrid(scale_inv.data_ptr(), cols, 0, 0, 0, 0)
    if scale_inv.numel() != 1:
        grid.rows_each = 1 if scale_inv.shape[0] == rows else scale_layout.BLOCK
        grid.cols_each = max(1, cols) if scale_inv.shape[1] == 1 else scale_layout.BLOCK
        grid.stride_0, grid.stride_1 = scale_inv.stride()
    _call(
        *("dequantize", DTYPES.index(data.dtype), DTYPES.index(dtype), _at(data), _at(out)),
        *(ctypes.c_int64(data.numel()), ctypes.byref(grid), sms),
    )
    return out


# csrc/cuda/common/group.cuh: enum class Stored
STORED = (None, torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.float64)
ARRAYS = 5  # param, grad, master and two states, of which the last ones may be absent
Lists = Sequence[Sequence[torch.Tensor]]


class StepArgs(ctypes.Structure):
    """csrc/cuda/optim/step.cuh: struct StepArgs."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("steps", "lr_f32", "lr_f64")),
        *((name, ctypes.c_void_p) for name in ("inv_scale", "clip", "found_inf")),
        ("max_value", ctypes.c_double),
        *((name, ctypes.c_bool) for name in ("maximize", "stochastic_rounding")),
        ("seed", ctypes.c_int64),
    )


class StepCall(ctypes.Structure):
    """runner.cpp: struct StepCall."""

    _fields_ = (
        ("count", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("stored", "pointers", "numels", "indices")),
        ("args", StepArgs),
        ("sms", ctypes.c_int),
    )


def _step(
    op: str,
    lists: Lists,
    settings: Sequence[float],
    flag: bool,
    sms: int,
    steps: torch.Tensor,
    maximize: bool,
    max_value: float,
    stochastic_rounding: bool,
    seed: int,
    indices: Sequence[int],
    lr_tensor: torch.Tensor | None,
    inv_scale: torch.Tensor | None,
    clip: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None:
    """lists: params, grads, masters, states; flag: the last of the settings."""
    n = len(lists[0])
    columns = [list(tensors) or [None] * n for tensors in lists]
    columns += [[None] * n] * (ARRAYS - len(columns))
    cells = [t for row in zip(*columns, strict=True) for t in row]
    tables = (
        (ctypes.c_int * len(cells))(*[0 if t is None else STORED.index(t.dtype) for t in cells]),
        (ctypes.c_void_p * len(cells))(*[_at(t).value for t in cells]),
        (ctypes.c_int64 * n)(*[p.numel() for p in lists[0]]),
        (ctypes.c_int64 * n)(*indices) if indices else None,
    )
    wide = lr_tensor is not None and lr_tensor.dtype == torch.float64
    scalars = (None if wide else lr_tensor, lr_tensor if wide else None, inv_scale, clip, found_inf)
    args = StepArgs(
        *(_at(t) for t in (steps, *scalars)), max_value, maximize, stochastic_rounding, seed
    )
    call = StepCall(n, *(ctypes.cast(t, ctypes.c_void_p) for t in tables), args, sms)
    _call(op, ctypes.byref(call), *(ctypes.c_double(x) for x in settings), flag)


def adamw_(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    masters: list[torch.Tensor],
    steps: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled_weight_decay: bool,
    *shared: Any,
    sms: int = 2,
) -> None:
    lists = (params, grads, masters, exp_avgs, exp_avg_sqs)
    settings = (lr, beta1, beta2, eps, weight_decay)
    _step("adamw", lists, settings, decoupled_weight_decay, sms, steps, *shared)


def sgd_(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    momentum_buffers: list[torch.Tensor],
    masters: list[torch.Tensor],
    steps: torch.Tensor,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    *shared: Any,
    sms: int = 2,
) -> None:
    lists = (params, grads, masters, momentum_buffers)
    settings = (lr, momentum, dampening, weight_decay)
    _step("sgd", lists, settings, nesterov, sms, steps, *shared)


def scale_from_amax_(
    scale: torch.Tensor,
    scale_inv: torch.Tensor,
    amax: torch.Tensor,
    dtype: torch.dtype,
    margin: int,
    power_of_two: bool,
) -> None:
    _call(
        *("scale_from_amax", _at(scale), _at(scale_inv), _at(amax), ctypes.c_int64(scale.numel())),
        *(DTYPES.index(dtype), ctypes.c_float(2.0**-margin), power_of_two),
    )


def inv_scale(scale: torch.Tensor) -> torch.Tensor:
    result = torch.full_like(scale, -7.0)
    _call("inv_scale", _at(scale), _at(result))
    return result


def clip_coef(sum_sq: torch.Tensor, max_norm: float) -> torch.Tensor:
    result = torch.full((), -7.0)
    count = ctypes.c_int64(sum_sq.numel())
    _call("clip_coef", _at(sum_sq), count, ctypes.c_double(max_norm), _at(result))
    return result


def update_scale_(
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    hysteresis_tracker: torch.Tensor,
    counters: torch.Tensor,
    found_inf: torch.Tensor,
    underflow: torch.Tensor | None,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
    max_scale: float,
    hysteresis: int,
    grow_on_underflow: float,
) -> None:
    state = (scale, growth_tracker, hysteresis_tracker, counters, found_inf, underflow)
    _call(
        *("update_scale", *map(_at, state)),
        *(ctypes.c_double(growth_factor), ctypes.c_double(backoff_factor)),
        *(ctypes.c_int64(growth_interval), ctypes.c_float(min_scale), ctypes.c_float(max_scale)),
        *(hysteresis, ctypes.c_float(grow_on_underflow)),
    )
