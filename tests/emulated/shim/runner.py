"""Compiles csrc/cuda with g++ against cuda_runtime.h beside this file, and calls the kernels.

OPS has a function for each op, with the op's arguments: contiguous CPU tensors. In every call the
order of blocks and threads, the size of the GPU and the results' alignment are drawn anew from
Python's random numbers, which each test starts from the same seed.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from mixprec.ops._dispatch import op
from mixprec.ops._reference import block_formats, scale_layout
from mixprec.ops.act_quantize import KINDS
from mixprec.ops.pack import packed_sizes

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CSRC = ROOT / "csrc"
BUILD = ROOT / "build" / "emulated"
SCHEDULER = HERE / "scheduler.cpp"
# Kernels access elements as 16-byte words: nvcc does not use strict aliasing, g++ would.
FLAGS = f"""-std=c++20 -ffp-contract=off -fno-strict-aliasing -fPIC -I{HERE}
    -Wall -Wextra -Werror -Wno-unknown-pragmas""".split()
# csrc/dispatch.h: enum class Dtype
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float64, torch.uint8]
DTYPES += [torch.int16, torch.int8, None]


def included(words: Sequence[str], csrc: Path) -> list[str]:
    """The files of this repository that a compilation reads; those of csrc as `csrc/...`, since a
    test may compile a copy of it."""
    rules = subprocess.run([*words, f"-I{csrc}", "-MM"], capture_output=True, text=True).stdout
    paths = {Path(path).resolve() for path in re.findall(r"(?<=\s)/\S+", rules)}
    return sorted(
        f"csrc/{path.relative_to(csrc)}" if path.is_relative_to(csrc) else str(path)
        for path in paths
    )


def digest(start: str, files: Sequence[str], csrc: Path) -> str:
    """Of a text and the contents of files; another one if a file is gone."""
    total = hashlib.sha256(start.encode())
    for name in files:
        path = csrc / name.removeprefix("csrc/")
        total.update(name.encode() + (path.read_bytes() if path.exists() else b""))
    return total.hexdigest()[:16]


def compile_(command: Sequence[str | Path], suffix: str, csrc: Path = CSRC) -> Path:
    """The result of `g++ FLAGS command -o ...`, compiled unless the files that it reads, which are
    listed beside the results, are as they were before."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise RuntimeError("the kernels of csrc/cuda are tested with g++: apt-get install g++")
    words = [compiler, *FLAGS, *map(str, command)]
    csrc = csrc.resolve()
    version = subprocess.check_output([compiler, "--version"], text=True)
    start = digest(version + " ".join(words), (), csrc)  # an object has a name of its own
    BUILD.mkdir(parents=True, exist_ok=True)
    listed = BUILD / f"{start}.read"
    with (BUILD / f"{start}.lock").open("w") as lock:  # another test process may compile it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if listed.exists():
            target = BUILD / f"{digest(start, listed.read_text().split(), csrc)}{suffix}"
            if target.exists():
                return target
        files = included(words, csrc)
        target = BUILD / f"{digest(start, files, csrc)}{suffix}"
        if not target.exists():
            partial = target.with_suffix(f".partial{suffix}")
            words += [f"-I{csrc}", "-o", str(partial)]
            done = subprocess.run(words, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"{' '.join(words)}\n{done.stderr[-4000:]}")
            partial.replace(target)
        listed.write_text("\n".join(files))
    return target


@cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(compile_(["-O2", "-shared", SCHEDULER, HERE / "kernels.cpp"], ".so")))


@cache
def instrumented() -> Path:
    """The kernels with a call at each access: of ThreadSanitizer, or of counting.cpp."""
    words = ["-O2", "-g1", "-fsanitize=thread", "-fno-sanitize-recover=all"]
    return compile_([*words, "-c", HERE / "sanitized.cpp"], ".o")


Argument = bool | int | float | torch.dtype | torch.Tensor | Sequence[torch.Tensor | None] | None
MaybeTensor = torch.Tensor | None
# Is told the function and its arguments before and after every call.
on_call: Callable[[str, Sequence[Argument], bool], None] | None = None


def address(tensor: MaybeTensor) -> int:
    assert tensor is None or tensor.is_contiguous(), "the kernels take contiguous memory"
    return 0 if tensor is None else tensor.data_ptr()


def _c_value(value: Argument) -> Any:
    """As kernels.cpp takes it: a number of 64 bits, the address of a tensor, or of addresses."""
    if isinstance(value, torch.dtype):
        return ctypes.c_int64(DTYPES.index(value))
    if isinstance(value, float):
        return ctypes.c_double(value)
    if isinstance(value, int):
        return ctypes.c_int64(value)
    if isinstance(value, Sequence):
        return (ctypes.c_void_p * len(value))(*map(address, value))
    return ctypes.c_void_p(address(value))


def call(function: str, *args: Argument) -> None:
    library().seed(ctypes.c_int64(random.getrandbits(32)))
    if on_call is not None:
        on_call(function, args, False)
    error = getattr(library(), function)(*map(_c_value, args))
    assert error == 0, f"{function}: the launch failed with error {error}"
    if on_call is not None:
        on_call(function, args, True)


SMS = (1, 2, 7)  # sizes of the GPU


def _sms() -> int:
    return random.choice(SMS)


def _numbers(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _list(tensors: Sequence[torch.Tensor]) -> tuple[Argument, ...]:
    """Count, dtypes, addresses, sizes."""
    dtypes = _numbers([DTYPES.index(t.dtype) for t in tensors])
    return len(tensors), dtypes, list(tensors), _numbers([t.numel() for t in tensors])


def misaligned(shape: Sequence[int], dtype: torch.dtype, by: int) -> torch.Tensor:
    """Full of 0xFF bytes (NaN in all formats), `by` elements after a 16-byte boundary."""
    count = torch.Size(shape).numel() + by
    storage = torch.full((count * dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype)
    return storage[by:].view(shape)


SHIFTS = (0, 0, 1, 3, 4)  # elements between a 16-byte boundary and a result


def _result(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return misaligned(shape, dtype, random.choice(SHIFTS))


def unscale_(grads: Sequence[torch.Tensor], inv_scale: torch.Tensor, found_inf: torch.Tensor,
             counts: MaybeTensor) -> None:  # fmt: skip
    call("unscale", *_list(grads), inv_scale, found_inf, counts, _sms())


def grad_stats_(grads: Sequence[torch.Tensor], inv_scale: MaybeTensor, found_inf: torch.Tensor,
                sum_sq: torch.Tensor, counts: MaybeTensor) -> None:  # fmt: skip
    call("grad_stats", *_list(grads), inv_scale, found_inf, sum_sq, counts, _sms())


def amax(x: torch.Tensor) -> torch.Tensor:
    result = _result((), torch.float32)
    call("amax", x.dtype, x, x.numel(), result, _sms())
    return result


Cast = tuple[torch.Tensor, ...]  # data, data_t, scale_inv, scale_inv_t, amax


def _cast(
    x: torch.Tensor, dtype: torch.dtype, transpose: bool, granularity: str, power_of_two: bool
) -> tuple[torch.Tensor, Cast]:
    """The numbers and the results of a cast, as kernels.cpp takes them."""
    rows, cols = scale_layout.as_matrix(x.shape)
    q, q_t = _result(x.shape, dtype), _result((cols, rows) if transpose else (0, 0), dtype)
    shape_t: tuple[int, ...] = (0,)
    if transpose and granularity != "tensor":
        shape_t = scale_layout.scale_shape(granularity, cols, rows)
    shapes = (scale_layout.scale_shape(granularity, rows, cols), shape_t, ())
    number = list(scale_layout.FUSED).index(granularity)
    scales = torch.uint8 if granularity == "mx" else torch.float32
    how = (DTYPES.index(dtype), number, rows, cols, transpose, power_of_two)
    dtypes = (scales, scales, torch.float32)
    return _numbers(how), (q, q_t, *map(_result, shapes, dtypes))


def quantize(
    x: torch.Tensor, dtype: torch.dtype, scale: MaybeTensor, transpose: bool, granularity: str,
    power_of_two_scale: bool,
) -> Cast:  # fmt: skip
    how, results = _cast(x, dtype, transpose, granularity, power_of_two_scale)
    call("quantize", x.dtype, x, how, results, scale, _sms())
    return results


def _inputs(*tensors: MaybeTensor) -> tuple[torch.Tensor, Sequence[MaybeTensor]]:
    return _numbers([0 if t is None else DTYPES.index(t.dtype) for t in tensors]), tensors


def norm_quantize(
    x: torch.Tensor, residual: MaybeTensor, weight: MaybeTensor, bias: MaybeTensor, eps: float,
    subtract_mean: bool, dtype: torch.dtype, scale: MaybeTensor, *layout: Any,
) -> Cast:  # fmt: skip
    how, results = _cast(x, dtype, *layout)
    rows = scale_layout.as_matrix(x.shape)[0]
    total = None if residual is None else _result(x.shape, x.dtype)
    mean = _result((rows,), torch.float32) if subtract_mean else None
    rstd = _result((rows,), torch.float32)
    inputs = _inputs(x, residual, weight, bias)
    call("norm_quantize", *inputs, eps, total, mean, rstd, how, results, scale, _sms())
    total, mean = (t.new_empty((0,)) if y is None else y for t, y in ((x, total), (rstd, mean)))
    return *results, total, mean, rstd


def norm_backward(
    g: torch.Tensor, x: torch.Tensor, weight: MaybeTensor, mean: torch.Tensor, rstd: torch.Tensor,
    g_total: MaybeTensor, with_bias: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    dx, sizes = _result(x.shape, x.dtype), scale_layout.as_matrix(x.shape)
    wanted = (weight is not None, with_bias)
    sums = [_result((sizes[1],), torch.float32) if of_it else None for of_it in wanted]
    inputs = _inputs(g, x, weight, g_total)
    call("norm_backward", *inputs, *sizes, mean if mean.numel() else None, rstd, dx, *sums, _sms())
    return dx, *(rstd.new_empty((0,)) if t is None else t for t in sums)


def act_quantize(x: torch.Tensor, up: MaybeTensor, kind: str, dtype: torch.dtype,
                 scale: MaybeTensor, *layout: Any) -> Cast:  # fmt: skip
    how, results = _cast(x, dtype, *layout)
    call("act_quantize", *_inputs(x, up), KINDS.index(kind), how, results, scale, _sms())
    return results


def act_backward(g: torch.Tensor, x: torch.Tensor, up: MaybeTensor, kind: str, dtype: torch.dtype,
                 scale: MaybeTensor, *layout: Any) -> tuple[torch.Tensor, ...]:  # fmt: skip
    inputs, number = _inputs(g, x, up), KINDS.index(kind)
    how, dx = _cast(x, dtype, *layout)
    dup = tuple(torch.empty(shape, dtype=dtype) for shape in ((0,), (0, 0)))
    dup += tuple(torch.empty(0) for _ in range(3))
    if up is not None:
        _, dup = _cast(x, dtype, *layout)
    call("act_backward", *inputs, number, how, dx, dup, scale, _sms())
    return *dx, *dup


def dequantize(data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = _result(data.shape, dtype)
    rows, cols = scale_layout.as_matrix(data.shape)
    blocks = (0, 0, 0, 0)
    if scale_inv.numel() != 1:
        rows_each = 1 if scale_inv.shape[0] == rows else scale_layout.BLOCK
        cols_each = max(1, cols) if scale_inv.shape[1] == 1 else scale_layout.BLOCK
        blocks = (rows_each, cols_each, *scale_inv.stride())
    sizes = (data.numel(), cols, *blocks)
    flat = scale_inv.as_strided((scale_inv.numel(),), (1,))  # dense, in rows or in columns
    call("dequantize", data.dtype, dtype, data, out, flat, *sizes, _sms())
    return out


def quantize_mx(
    x: torch.Tensor, fmt: str, scale_mode: str, transpose: bool, seed: MaybeTensor, swizzled: bool,
    with_amax: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    rows, cols = scale_layout.as_matrix(x.shape)
    block = block_formats.BLOCK_FORMATS[fmt]
    scales = torch.float8_e4m3fn if block.nvfp4 else torch.uint8
    (size, across), (size_t, across_t) = (block_formats.sizes(fmt, n) for n in (cols, rows))
    shape_of = scale_layout.swizzled_shape if swizzled else lambda *shape: shape
    with_amax = with_amax or block.nvfp4
    results = (
        _result((*x.shape[:-1], size) if x.dim() else (), block.element.dtype),
        _result((cols, size_t) if transpose else (0, 0), block.element.dtype),
        _result(shape_of(rows, across), scales),
        _result(shape_of(cols, across_t) if transpose else (0,), scales),
        _result(() if block.nvfp4 else (0,), torch.float32),
        _result(() if with_amax else (0,), torch.float32),
    )
    how = list(block_formats.BLOCK_FORMATS).index(fmt), block_formats.SCALE_MODES.index(scale_mode)
    call("quantize_mx", x.dtype, x, rows, cols, *how, transpose, seed, swizzled, with_amax,
         results, _sms())  # fmt: skip
    return results


def dequantize_mx(
    data: torch.Tensor, scale_inv: torch.Tensor, tensor_scale_inv: MaybeTensor, fmt: str,
    columns: int, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    rows = scale_layout.as_matrix(data.shape)[0]
    out = _result((*data.shape[:-1], columns) if data.dim() else (), dtype)
    number = list(block_formats.BLOCK_FORMATS).index(fmt)
    call("dequantize_mx", dtype, number, data, scale_inv, tensor_scale_inv, rows, columns, out,
         _sms())  # fmt: skip
    return out


def pack(x: torch.Tensor, bits: int, seed: int, counter: int,
         offset: MaybeTensor) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    size, groups = packed_sizes(x.numel(), bits)
    codes, ranges = _result((size,), torch.uint8), _result((groups, 2), torch.bfloat16)
    call("pack", x.dtype, bits, x, codes, ranges, x.numel(), seed, counter, offset, _sms())
    return codes, ranges


def unpack(codes: torch.Tensor, ranges: torch.Tensor, bits: int, shape: Sequence[int],
           dtype: torch.dtype) -> torch.Tensor:  # fmt: skip
    y = _result(shape, dtype)
    call("unpack", dtype, bits, codes, ranges, y, y.numel(), _sms())
    return y


UPDATES = ("adamw_", "sgd_", "lion_", "muon_direction_")  # in the order of kernels.cpp


def update(name: str, *args: Any) -> None:
    """One of UPDATES."""
    a = op.OPS[name].Args(*args)
    none, count = [None] * len(a.params), len(a.params)
    states, scales = (
        [x[k * count : (k + 1) * count] for k in range(2)] for x in (a.states, a.state_scales)
    )
    lists = (a.params, a.grads, a.masters, *states, *scales)  # enum StepArray
    columns = [t or none for t in lists]
    cells = [t for tensor in zip(*columns, strict=True) for t in tensor]
    dtypes = _numbers([DTYPES.index(None if t is None else t.dtype) for t in cells])
    order = _numbers(a.indices) if a.indices else None
    wide = a.lr_tensor is not None and a.lr_tensor.dtype == torch.float64
    rates = (None, a.lr_tensor) if wide else (a.lr_tensor, None)
    settings = torch.tensor(a.settings, dtype=torch.float64)
    call(
        "update", UPDATES.index(name), count, dtypes, cells,
        _numbers([p.numel() for p in a.params]), order, a.steps, *rates, a.inv_scale, a.clip,
        a.found_inf, a.max_value, a.maximize, a.stochastic_rounding, a.seed, a.lr, settings, _sms(),
    )  # fmt: skip


def scale_from_amax_(scale: torch.Tensor, scale_inv: torch.Tensor, amax: torch.Tensor,
                     dtype: torch.dtype, margin: int, power_of_two: bool) -> None:  # fmt: skip
    how = (scale.numel(), dtype, 2.0**-margin, power_of_two)
    call("scale_from_amax", scale, scale_inv, amax, *how)


def inv_scale(scale: torch.Tensor) -> torch.Tensor:
    result = _result(scale.shape, torch.float32)
    call("inv_scale", scale, result)
    return result


def update_delayed_scales_(
    amax_histories: Sequence[torch.Tensor], scales: Sequence[torch.Tensor],
    amaxes: Sequence[torch.Tensor], fmt_max: Sequence[float], margin: int, *how: bool,
) -> None:  # fmt: skip
    limits = torch.tensor(fmt_max, dtype=torch.float64)
    length = amax_histories[0].numel()
    call("update_delayed_scales", len(scales), amax_histories, scales, amaxes, limits, length,
         2.0**-margin, *how)  # fmt: skip


def clip_coef(sum_sq: torch.Tensor, max_norm: float) -> torch.Tensor:
    result = _result((), torch.float32)
    call("clip_coef", sum_sq, sum_sq.numel(), max_norm, result)
    return result


OPS: dict[str, Callable[..., Any]] = {
    "unscale_": unscale_, "grad_stats_": grad_stats_, "amax": amax, "quantize": quantize,
    "norm_quantize": norm_quantize, "norm_backward": norm_backward,
    "act_quantize": act_quantize, "act_backward": act_backward,
    "dequantize": dequantize, "pack": pack, "unpack": unpack,
    "quantize_mx": quantize_mx, "dequantize_mx": dequantize_mx,
    "scale_from_amax_": scale_from_amax_, "inv_scale": inv_scale,
    "clip_coef": clip_coef, "update_scale_": partial(call, "update_scale"),
    "update_delayed_scales_": update_delayed_scales_,
    **{name: partial(update, name) for name in UPDATES},
}  # fmt: skip
