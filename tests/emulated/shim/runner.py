"""Compiles csrc/cuda with g++ against cuda_runtime.h beside this file, and calls the kernels.

The functions take and change contiguous CPU tensors like the references in mixprec.ops.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from mixprec.ops._dispatch import scale_layout

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CSRC = ROOT / "csrc"
BUILD = ROOT / "build" / "emulated"
SCHEDULER = HERE / "scheduler.cpp"
# Kernels access elements as 16-byte words: nvcc does not use strict aliasing, g++ would.
FLAGS = f"""-std=c++20 -ffp-contract=off -fno-strict-aliasing -fPIC -I{HERE}
    -Wall -Wextra -Werror -Wno-unknown-pragmas""".split()
SUFFIXES = (".h", ".cuh", ".cpp", ".cu")
# csrc/dispatch.h: enum class Dtype
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float64]


def sources(csrc: Path = CSRC) -> list[Path]:
    """Everything that the compiled programs depend on."""
    folders = (csrc, HERE, HERE.parent / "hopper")
    return sorted(path for f in folders for path in f.rglob("*") if path.suffix in SUFFIXES)


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
    BUILD.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:  # another test process may compile it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return target
        partial = target.with_suffix(f".partial{suffix}")
        words += [f"-I{csrc}", "-o", str(partial)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(words)}\n{done.stderr[-4000:]}")
        partial.replace(target)
    return target


@cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(compile_(["-O2", "-shared", SCHEDULER, HERE / "kernels.cpp"], ".so")))


C_TYPES = {
    "i": ctypes.c_int, "q": ctypes.c_int64, "f": ctypes.c_float, "d": ctypes.c_double,
    "p": ctypes.c_void_p,
}  # fmt: skip


def _plain(value: object) -> object:
    """A tensor as its address, a dtype as its number."""
    if isinstance(value, torch.Tensor):
        assert value.is_contiguous(), "the kernels take contiguous memory"
        return value.data_ptr()
    return DTYPES.index(value) if isinstance(value, torch.dtype) else value


def call(function: str, types: str, *args: object) -> None:
    """types: a letter of C_TYPES for each argument of the C function."""
    values = [C_TYPES[t](_plain(a)) for t, a in zip(types, args, strict=True)]
    error = getattr(library(), function)(*values)
    assert error == 0, f"{function}: the launch failed with error {error}"


def _list(tensors: Sequence[torch.Tensor]) -> tuple[object, ...]:
    """Count, dtypes, addresses, sizes."""
    return (
        len(tensors),
        torch.tensor([DTYPES.index(t.dtype) for t in tensors], dtype=torch.int32),
        torch.tensor([_plain(t) for t in tensors], dtype=torch.int64),
        torch.tensor([t.numel() for t in tensors], dtype=torch.int64),
    )


def seed(value: int) -> None:
    """Another order of blocks and threads."""
    library().seed(ctypes.c_uint64(value))


Tensors = Sequence[torch.Tensor]
MaybeTensor = torch.Tensor | None


def unscale_(grads: Tensors, inv_scale: torch.Tensor, found_inf: torch.Tensor,
             counts: MaybeTensor, sms: int = 2) -> None:  # fmt: skip
    call("unscale", "ippppppi", *_list(grads), inv_scale, found_inf, counts, sms)


def grad_stats_(grads: Tensors, inv_scale: MaybeTensor, found_inf: torch.Tensor,
                sum_sq: torch.Tensor, counts: MaybeTensor, sms: int = 2) -> None:  # fmt: skip
    call("grad_stats", "ipppppppi", *_list(grads), inv_scale, found_inf, sum_sq, counts, sms)


def amax(x: torch.Tensor, sms: int = 2) -> torch.Tensor:
    result = torch.full((), -7.0)
    call("amax", "ipqpi", x.dtype, x, x.numel(), result, sms)
    return result


def misaligned(shape: Sequence[int], dtype: torch.dtype, by: int) -> torch.Tensor:
    """A tensor of 0xFF bytes (NaN in all formats) that starts `by` elements after a boundary."""
    count = torch.Size(shape).numel() + by
    storage = torch.full((count * dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype)
    return storage[by:].view(shape)


def quantize(
    x: torch.Tensor, dtype: torch.dtype, scale: MaybeTensor, transpose: bool, granularity: str,
    power_of_two_scale: bool, sms: int = 2, offset: int = 0,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """offset: of the results from a 16-byte boundary, in elements."""
    rows, cols = scale_layout.as_matrix(x.shape)
    q = misaligned(x.shape, dtype, offset)
    q_t = misaligned((cols, rows) if transpose else (0, 0), dtype, offset)
    shape_t: tuple[int, ...] = (0,)
    if transpose and granularity != "tensor":
        shape_t = scale_layout.scale_shape(granularity, cols, rows)
    scale_inv = torch.full(scale_layout.scale_shape(granularity, rows, cols), -7.0)
    scale_inv_t, largest = torch.full(shape_t, -7.0), torch.full((), -7.0)
    number = list(scale_layout.GRANULARITIES).index(granularity)
    how = (rows, cols, transpose, power_of_two_scale, scale, scale_inv, scale_inv_t, largest, sms)
    call("quantize", "iiipppqqiippppi", x.dtype, dtype, number, x, q, q_t, *how)
    return q, q_t, scale_inv, scale_inv_t, largest


def dequantize(
    data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype, sms: int = 2, offset: int = 0
) -> torch.Tensor:
    """The scales may have any strides."""
    out = misaligned(data.shape, dtype, offset)
    rows, cols = scale_layout.as_matrix(data.shape)
    blocks = (0, 0, 0, 0)
    if scale_inv.numel() != 1:
        rows_each = 1 if scale_inv.shape[0] == rows else scale_layout.BLOCK
        cols_each = max(1, cols) if scale_inv.shape[1] == 1 else scale_layout.BLOCK
        blocks = (rows_each, cols_each, *scale_inv.stride())
    grid = torch.tensor([scale_inv.data_ptr(), cols, *blocks])  # struct ScaleGrid
    call("dequantize", "iippqpi", data.dtype, dtype, data, out, data.numel(), grid, sms)
    return out


# csrc/cuda/common/group.cuh: enum class Stored
STORED = (None, torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.float64)
ARRAYS = 5  # param, grad, master and two states, of which the last ones may be absent


def step_(
    op: str, lists: Sequence[Tensors], steps: torch.Tensor, settings: Sequence[float],
    maximize: bool, max_value: float, stochastic_rounding: bool, seed: int,
    indices: Sequence[int], lr_tensor: MaybeTensor, inv_scale: MaybeTensor, clip: MaybeTensor,
    found_inf: MaybeTensor, sms: int = 2,
) -> None:  # fmt: skip
    """op: adamw or sgd; lists: params, grads, states, masters; settings: its rule, in order."""
    n, (params, grads, *states, masters) = len(lists[0]), lists
    columns = [list(tensors) or [None] * n for tensors in (params, grads, masters, *states)]
    columns += [[None] * n] * (ARRAYS - len(columns))
    cells = [t for tensor in zip(*columns, strict=True) for t in tensor]
    stored = torch.tensor([0 if t is None else STORED.index(t.dtype) for t in cells]).int()
    pointers = torch.tensor([0 if t is None else _plain(t) for t in cells], dtype=torch.int64)
    numels = torch.tensor([p.numel() for p in params], dtype=torch.int64)
    order = torch.tensor(indices, dtype=torch.int64) if indices else None
    rates = (lr_tensor, None)
    if lr_tensor is not None and lr_tensor.dtype == torch.float64:
        rates = (None, lr_tensor)
    scalars = (steps, *rates, inv_scale, clip, found_inf)
    rule = torch.tensor(settings, dtype=torch.float64)
    how = (*scalars, max_value, maximize, stochastic_rounding, seed, rule, sms)
    call("update", "iippppppppppdiiqpi", op == "adamw", n, stored, pointers, numels, order, *how)


def scale_from_amax_(scale: torch.Tensor, scale_inv: torch.Tensor, amax: torch.Tensor,
                     dtype: torch.dtype, margin: int, power_of_two: bool) -> None:  # fmt: skip
    how = (scale.numel(), dtype, 2.0**-margin, power_of_two)
    call("scale_from_amax", "pppqifi", scale, scale_inv, amax, *how)


def inv_scale(scale: torch.Tensor) -> torch.Tensor:
    result = torch.full_like(scale, -7.0)
    call("inv_scale", "pp", scale, result)
    return result


def clip_coef(sum_sq: torch.Tensor, max_norm: float) -> torch.Tensor:
    result = torch.full((), -7.0)
    call("clip_coef", "pqdp", sum_sq, sum_sq.numel(), max_norm, result)
    return result


def update_scale_(*args: object) -> None:
    """Arguments as of the op update_scale_."""
    call("update_scale", "ppppppddqffif", *args)
