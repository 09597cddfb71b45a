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


def included(words: Sequence[str]) -> list[str]:
    """The files of this repository that a compilation reads."""
    rules = subprocess.run([*words, "-MM"], capture_output=True, text=True).stdout
    return sorted({str(Path(path).resolve()) for path in re.findall(r"(?<=\s)/\S+", rules)})


def digest(start: str, files: Sequence[str]) -> str:
    """Of a text and the contents of files; another one if a file is gone."""
    total = hashlib.sha256(start.encode())
    for path in map(Path, files):
        total.update(str(path).encode() + (path.read_bytes() if path.exists() else b""))
    return total.hexdigest()[:16]


def compile_(command: Sequence[str | Path], suffix: str) -> Path:
    """The result of `g++ FLAGS command -o ...`, compiled unless the files that it reads, which are
    listed beside the results, are as they were before."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise RuntimeError("the kernels of csrc/cuda are tested with g++: apt-get install g++")
    words = [compiler, *FLAGS, *map(str, command), f"-I{CSRC}"]  # last: the models come first
    version = subprocess.check_output([compiler, "--version"], text=True)
    start = digest(version + " ".join(words), ())  # an object has a name of its own
    BUILD.mkdir(parents=True, exist_ok=True)
    listed = BUILD / f"{start}.read"
    with (BUILD / f"{start}.lock").open("w") as lock:  # another test process may compile it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if listed.exists():
            target = BUILD / f"{digest(start, listed.read_text().split())}{suffix}"
            if target.exists():
                return target
        files = included(words)
        target = BUILD / f"{digest(start, files)}{suffix}"
        if not target.exists():
            partial = target.with_suffix(f".partial{suffix}")
            words += ["-o", str(partial)]
            done = subprocess.run(words, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"{' '.join(words)}\n{done.stderr[-4000:]}")
            partial.replace(target)
        listed.write_text("\n".join(files))
    return target


@cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(compile_(["-O1", "-shared", SCHEDULER, HERE / "kernels.cpp"], ".so")))


@cache
def instrumented() -> Path:
    """The kernels with a call of ThreadSanitizer at each access."""
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


def _results(name: str, *args: Any) -> list[torch.Tensor]:
    """Memory for what an op returns, of the shapes that its fake promises."""
    meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in args]
    promised = op.OPS[name].handle()(*meta)
    promised = [promised] if isinstance(promised, torch.Tensor) else promised
    return [_result(t.shape, t.dtype) for t in promised]


def _absent(*results: torch.Tensor) -> list[MaybeTensor]:
    """None for those that are empty."""
    return [t if t.numel() else None for t in results]


def _how(x: torch.Tensor, dtype: torch.dtype, layout: Sequence[Any]) -> torch.Tensor:
    """The numbers of a cast; layout: transpose, granularity, power_of_two_scale."""
    transpose, granularity, two = layout
    number = list(scale_layout.FUSED).index(granularity)
    return _numbers((DTYPES.index(dtype), number, *scale_layout.as_matrix(x.shape), transpose, two))


def _inputs(*tensors: MaybeTensor) -> tuple[torch.Tensor, Sequence[MaybeTensor]]:
    return _numbers([0 if t is None else DTYPES.index(t.dtype) for t in tensors]), tensors


def amax(x: torch.Tensor) -> torch.Tensor:
    (result,) = _results("amax", x)
    call("amax", x.dtype, x, x.numel(), result, _sms())
    return result


def quantize(x: torch.Tensor, dtype: torch.dtype, scale: MaybeTensor, *layout: Any) -> Any:
    results = _results("quantize", x, dtype, scale, *layout)
    call("quantize", x.dtype, x, _how(x, dtype, layout), results, scale, _sms())
    return results


def norm_quantize(*args: Any) -> Any:
    *inputs, eps, _, dtype, scale, transpose, granularity, two = args
    *cast, total, mean, rstd = _results("norm_quantize", *args)
    how = _how(inputs[0], dtype, (transpose, granularity, two))
    more = *_absent(total, mean), rstd
    call("norm_quantize", *_inputs(*inputs), eps, *more, how, cast, scale, _sms())
    return *cast, total, mean, rstd


def norm_backward(*args: Any) -> Any:
    g, x, weight, mean, rstd, g_total, _ = args
    dx, *sums = _results("norm_backward", *args)
    sizes, inputs = scale_layout.as_matrix(x.shape), _inputs(g, x, weight, g_total)
    call("norm_backward", *inputs, *sizes, *_absent(mean), rstd, dx, *_absent(*sums), _sms())
    return dx, *sums


def act_quantize(x: torch.Tensor, up: MaybeTensor, kind: str, dtype: torch.dtype,
                 scale: MaybeTensor, *layout: Any) -> Any:  # fmt: skip
    results = _results("act_quantize", x, up, kind, dtype, scale, *layout)
    how = _how(x, dtype, layout)
    call("act_quantize", *_inputs(x, up), KINDS.index(kind), how, results, scale, _sms())
    return results


def act_backward(g: torch.Tensor, x: torch.Tensor, up: MaybeTensor, kind: str, dtype: torch.dtype,
                 scale: MaybeTensor, *layout: Any) -> Any:  # fmt: skip
    results = _results("act_backward", g, x, up, kind, dtype, scale, *layout)
    dx, dup, how = results[:5], _absent(*results[5:]), _how(x, dtype, layout)
    call("act_backward", *_inputs(g, x, up), KINDS.index(kind), how, dx, dup, scale, _sms())
    return results


def dequantize(data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    (out,) = _results("dequantize", data, scale_inv, dtype)
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


def quantize_mx(x: torch.Tensor, fmt: str, mode: str, transpose: bool, seed: MaybeTensor,
                swizzled: bool, with_amax: bool) -> Any:  # fmt: skip
    results = _results("quantize_mx", x, fmt, mode, transpose, seed, swizzled, with_amax)
    number = list(block_formats.BLOCK_FORMATS).index(fmt)
    with_amax = with_amax or block_formats.BLOCK_FORMATS[fmt].nvfp4
    call("quantize_mx", x.dtype, x, *scale_layout.as_matrix(x.shape), number,
         block_formats.SCALE_MODES.index(mode), transpose, seed, swizzled, with_amax,
         results, _sms())  # fmt: skip
    return results


def dequantize_mx(data: torch.Tensor, scale_inv: torch.Tensor, tensor_scale_inv: MaybeTensor,
                  fmt: str, columns: int, dtype: torch.dtype) -> torch.Tensor:  # fmt: skip
    (out,) = _results("dequantize_mx", data, scale_inv, tensor_scale_inv, fmt, columns, dtype)
    number = list(block_formats.BLOCK_FORMATS).index(fmt)
    rows = scale_layout.as_matrix(data.shape)[0]
    call("dequantize_mx", dtype, number, data, scale_inv, tensor_scale_inv, rows, columns, out,
         _sms())  # fmt: skip
    return out


def pack(x: torch.Tensor, bits: int, *random: Any) -> Any:
    codes, ranges = _results("pack", x, bits, *random)
    call("pack", x.dtype, bits, x, codes, ranges, x.numel(), *random, _sms())
    return codes, ranges


def unpack(codes: torch.Tensor, ranges: torch.Tensor, bits: int, shape: Sequence[int],
           dtype: torch.dtype) -> torch.Tensor:  # fmt: skip
    (y,) = _results("unpack", codes, ranges, bits, list(shape), dtype)
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
    (result,) = _results("inv_scale", scale)
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
    (result,) = _results("clip_coef", sum_sq, max_norm)
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
