"""Counts the bytes of global memory that each op moves in csrc/cuda, which is compiled with a call
at each access (counting.cpp).

    python tests/emulated/shim/count_bytes.py    # writes bench/results/kernel_bytes.json

Arrays with a value for every 256 elements or more count: vectors [K], statistics and scales of
rows, and single numbers do not.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

TESTS = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(TESTS)]

from cases import normal  # noqa: E402
from emulated.agreement import moved, reference, tensors  # noqa: E402
from emulated.shim import runner  # noqa: E402
from emulated.values.test_updates import RULES, Mix, arguments  # noqa: E402

RESULT = runner.ROOT / "bench" / "results" / "kernel_bytes.json"
ROWS = COLS = 512
N = ROWS * COLS
SPARSE = 256  # elements for one value, at most, of an array that counts
F32, BF16, F16, INT16, U8 = torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.uint8
E4M3 = torch.float8_e4m3fn

Call = tuple[str, Sequence[Any]]


class Case(NamedTuple):
    table: str
    name: str
    calls: Sequence[Call]  # one after the other
    sms: int = 1  # of the GPU


@cache
def library() -> ctypes.CDLL:
    parts = (runner.instrumented(), runner.HERE / "counting.cpp", runner.SCHEDULER)
    return ctypes.CDLL(str(runner.compile_(["-O2", "-shared", *parts], ".counted.so")))


def count(calls: Iterable[Call], sms: int = 1) -> dict[str, float]:
    """launches; and bytes an element: loaded and stored, each access; read and written, each byte
    once a launch."""
    total, found = [0] * 5, (ctypes.c_int64 * 5)()

    def on_call(function: str, args: Sequence[runner.Argument], done: bool) -> None:
        if done:
            library().counted(found)
            total[:] = [a + b for a, b in zip(total, found, strict=True)]
            return
        arrays = [t for t in tensors(list(args)) if t.numel() * SPARSE >= N]
        starts = (ctypes.c_void_p * len(arrays))(*(t.data_ptr() for t in arrays))
        sizes = (ctypes.c_int64 * len(arrays))(*(t.numel() * t.itemsize for t in arrays))
        library().count_arrays(ctypes.c_int64(len(arrays)), starts, sizes)

    with (
        mock.patch.object(runner, "library", library),
        mock.patch.object(runner, "on_call", on_call),
        mock.patch.object(runner, "SMS", (sms,)),
        mock.patch.object(runner, "_result", lambda *of: runner.misaligned(*of, 0)),
    ):
        for op, args in calls:
            runner.OPS[op](*moved(list(args), torch.device("cpu")))
    names = ("launches", "loaded", "stored", "read", "written")
    per_element = [total[0], *(round(bytes_ / N, 3) for bytes_ in total[1:])]
    return dict(zip(names, per_element, strict=True))


def _casts() -> Iterator[Case]:
    one = torch.tensor(1.0)
    for dtype, name in ((F32, "fp32"), (BF16, "bf16")):
        x = normal((ROWS, COLS), dtype)
        yield Case("quantize", f"`amax`, {name}", [("amax", [x])])
        for scale, given in ((one, "scale given"), (None, "scale=None")):
            for transpose in (False, True):
                how = f"{given}{', transpose' * transpose}"
                args = [x, E4M3, scale, transpose, "tensor", True]
                yield Case("quantize", f"{name} to FP8, {how}", [("quantize", args)])
        for granularity in ("row", "block1x128", "block128x128"):
            for transpose in (False, True):
                how = f"`{granularity}`{', transpose' * transpose}"
                args = [x, E4M3, None, transpose, granularity, True]
                yield Case("quantize", f"{name} to FP8, {how}", [("quantize", args)])
    for dtype, name in ((F32, "fp32"), (BF16, "bf16")):
        args = [normal((ROWS, COLS), F32).to(E4M3), one, dtype]
        yield Case("quantize", f"`dequantize` of FP8 to {name}", [("dequantize", args)])


CASTS = (
    ("bf16", (BF16, None, False, "tensor", True)),
    ("fp32", (F32, None, False, "tensor", True)),
    ("FP8, scale given", (E4M3, torch.tensor(2.0), False, "tensor", True)),
    ("FP8, scale=None", (E4M3, None, False, "tensor", True)),
    ("FP8 and its transpose, scale given", (E4M3, torch.tensor(2.0), True, "tensor", True)),
    ("FP8 and its transpose, scale=None", (E4M3, None, True, "tensor", True)),
    ("FP8 by rows", (E4M3, None, False, "row", True)),
    ("FP8 by rows and its transpose", (E4M3, None, True, "row", True)),
    ("FP8 `block1x128` and its transpose", (E4M3, None, True, "block1x128", True)),
    ("FP8 `block128x128` and its transpose", (E4M3, None, True, "block128x128", True)),
    ("MXFP8 and its transpose", (E4M3, None, True, "mx", True)),
)  # fmt: skip


def _fused() -> Iterator[Case]:
    x, other, g = (normal((ROWS, COLS), BF16, seed=seed) for seed in range(3))
    weight, rows = torch.ones(COLS), torch.ones(ROWS)
    for residual, name in ((None, ""), (other, " with a residual")):
        for subtract_mean, norm in ((False, "RMSNorm"), (True, "LayerNorm")):
            chosen = CASTS[:1] if residual is not None or subtract_mean else CASTS
            for cast, of in chosen:
                args = [x, residual, weight, None, 1e-5, subtract_mean, *of]
                yield Case("norm", f"{norm}{name} to {cast}", [("norm_quantize", args)])
    for mean, norm in ((rows[:0], "RMSNorm"), (rows, "LayerNorm")):
        for total, name in ((None, ""), (g, " with the residual's gradient")):
            args = [g, x, weight, mean, rows, total, mean.numel() > 0]
            yield Case("norm", f"backward of {norm}{name}", [("norm_backward", args)])
            few = f"backward of {norm}{name}, too few bands"
            yield Case("norm", few, [("norm_backward", args)], sms=132)
    for cast, of in CASTS:
        yield Case("act", f"silu(x) * up to {cast}",
                   [("act_quantize", [x, other, "silu", *of])])  # fmt: skip
    for cast, of in CASTS:
        yield Case("act", f"both gradients to {cast}",
                   [("act_backward", [g, x, other, "silu", *of])])  # fmt: skip


def _blocks() -> Iterator[Case]:
    x = normal((ROWS, COLS), BF16)
    for fmt in ("mxfp8_e4m3", "mxfp4", "nvfp4"):
        for transpose in (False, True):
            args = [x, fmt, "rceil", transpose, None, False, False]
            name = f"bf16 to {fmt}{' and its transpose' * transpose}"
            yield Case("quantize_mx", name, [("quantize_mx", args)])
        data, _, scale, _, of_tensor, _ = reference("quantize_mx")(
            x, fmt, "rceil", False, None, False, False
        )
        args = [data, scale, of_tensor if of_tensor.numel() else None, fmt, COLS, BF16]
        yield Case("quantize_mx", f"{fmt} to bf16", [("dequantize_mx", args)])
    for bits in (8, 4, 2):
        codes, ranges = reference("pack")(x, bits, 1, 2, None)
        yield Case("pack", f"`pack` of bf16, {bits} bits", [("pack", [x, bits, 1, 2, None])])
        yield Case("pack", f"`unpack` to bf16, {bits} bits",
                   [("unpack", [codes, ranges, bits, x.shape, BF16])])  # fmt: skip


def _grad_stats(grads: Sequence[torch.Tensor]) -> Call:
    zero, sums = torch.zeros(()), torch.zeros(len(grads)).double()
    return "grad_stats_", [grads, zero + 0.5, zero, sums, None]


def _updates() -> Iterator[Case]:
    for dtype, name in ((F32, "fp32"), (BF16, "bf16")):
        grads = [normal((ROWS, COLS), dtype)]
        args = [grads, torch.tensor(0.5), torch.tensor(0.0), None]
        yield Case("grads", f"`unscale_`, {name}", [("unscale_", args)])
        yield Case("grads", f"`grad_stats_`, {name}", [_grad_stats(grads)])
    narrow, bytes_ = (BF16, BF16), (U8, U8)
    of_params = (
        (Mix(BF16, BF16, F32), "bf16, fp32 masters and states"),
        (Mix(BF16, BF16, INT16), "bf16, 16 remainder bits, fp32 states"),
        (Mix(BF16, BF16, INT16, bytes_), "bf16, 16 remainder bits, 8-bit states"),
        (Mix(BF16, BF16, None, narrow), "bf16, bf16 states, stochastic rounding"),
        (Mix(BF16, BF16, None, bytes_), "bf16, 8-bit states, stochastic rounding"),
        (Mix(F32, F32), "fp32"),
    )
    # Which it writes, in FP32.
    of_direction = ((Mix(F32, BF16), "bf16 gradients"),
                    (Mix(F32, BF16, None, bytes_), "bf16 gradients, 8-bit states"))  # fmt: skip
    for rule, mixes in (("decoupled", of_params), ("momentum", of_params), ("lion", of_params),
                        ("muon", of_direction)):  # fmt: skip
        op = RULES[rule][0]
        for mix, name in mixes:
            stochastic = mix.master is None and mix.param == BF16
            args = arguments(rule, [mix], [(ROWS, COLS)], stochastic_rounding=stochastic)
            yield Case("updates", f"`{op}`, {name}", [_grad_stats(args[1]), (op, args)])


def cases() -> list[Case]:
    return [*_casts(), *_fused(), *_blocks(), *_updates()]


def rows() -> list[dict[str, Any]]:
    return [{"table": c.table, "name": c.name, **count(c.calls, c.sms)} for c in cases()]


if __name__ == "__main__":
    from mixprec.bench.results import write_json

    write_json(RESULT, {"shape": [ROWS, COLS], "rows": rows()})
    print(f"written: {RESULT}; then: python -m mixprec.bench report")
