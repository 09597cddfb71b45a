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

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CSRC = ROOT / "csrc"
BUILD = ROOT / "build" / "cuda_on_cpu"
SCHEDULER = HERE / "scheduler.cpp"
FLAGS = (
    # 16-byte words stand for the elements in them: nvcc does not look at types here, g++ would
    *("-std=c++20", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", f"-I{HERE}"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
)
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float64),
)  # csrc/dispatch.h: enum class Dtype


def sources(csrc: Path = CSRC) -> list[Path]:
    """Everything that the compiled programs depend on."""
    return sorted(
        [*csrc.rglob("*.h"), *csrc.rglob("*.cuh"), *HERE.glob("*.h"), *HERE.glob("*.cpp")]
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
    assert error != -1, f"{function} left its scratch memory dirty"
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
    grads: list[torch.Tensor], inv_scale: torch.Tensor, found_inf: torch.Tensor, sms: int = 2
) -> None:
    _call("unscale", *_list(grads), _at(inv_scale), _at(found_inf), sms)


def grad_stats_(
    grads: list[torch.Tensor],
    inv_scale: torch.Tensor | None,
    found_inf: torch.Tensor,
    sum_sq: torch.Tensor,
    sms: int = 2,
) -> None:
    _call("grad_stats", *_list(grads), _at(inv_scale), _at(found_inf), _at(sum_sq), sms)


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
    power_of_two_scale: bool,
    sms: int = 2,
    offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    cols = x.shape[-1] if transpose else x.numel()
    rows = x.shape[:-1].numel() if transpose else 1
    q = misaligned(x.shape, dtype, offset)
    q_t = misaligned((cols, rows) if transpose else (0, 0), dtype, offset)
    scale_inv, largest = torch.full((), -7.0), torch.full((), -7.0)
    _call(
        *("quantize", DTYPES.index(x.dtype), DTYPES.index(dtype), _at(x), _at(q), _at(q_t)),
        *(ctypes.c_int64(rows), ctypes.c_int64(cols), transpose, power_of_two_scale),
        *(_at(scale), _at(scale_inv), _at(largest), sms),
    )
    return q, q_t, scale_inv, largest


def dequantize(
    data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype, sms: int = 2, offset: int = 0
) -> torch.Tensor:
    out = misaligned(data.shape, dtype, offset)
    _call(
        *("dequantize", DTYPES.index(data.dtype), DTYPES.index(dtype), _at(data), _at(out)),
        *(ctypes.c_int64(data.numel()), _at(scale_inv), sms),
    )
    return out


def adamw_(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    masters: list[torch.Tensor],
    steps: list[torch.Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
    inv_scale: torch.Tensor | None,
    clip: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    sms: int = 2,
) -> None:
    n = len(params)
    columns = (params, grads, exp_avgs, exp_avg_sqs, masters or [None] * n, steps)
    pointers = [_at(t).value for row in zip(*columns, strict=True) for t in row]
    dtypes = [DTYPES.index(t.dtype) for pair in zip(params, grads, strict=True) for t in pair]
    _call(
        *("adamw", n, (ctypes.c_int * (2 * n))(*dtypes), (ctypes.c_void_p * (6 * n))(*pointers)),
        (ctypes.c_int64 * n)(*[p.numel() for p in params]),
        (ctypes.c_double * 5)(lr, beta1, beta2, eps, weight_decay),
        *(maximize, _at(inv_scale), _at(clip), _at(found_inf), sms),
    )
