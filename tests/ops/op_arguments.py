"""Arguments that each op takes, in its schema's order."""

from __future__ import annotations

from typing import Any

import torch
from cases import permuted, small_integers

from mixprec.ops._dispatch.op import OPS

UPDATES = ("adamw_", "sgd_", "lion_", "muon_direction_")
CROSS_ENTROPY = ("cross_entropy", "cross_entropy_backward")
FUSED = ("norm_quantize", "norm_backward", "act_quantize", "act_backward")


def tensor(shape: tuple[int, ...], dtype: torch.dtype, arrangement: str) -> torch.Tensor:
    """Small integers: exact in every format, so that functional and in-place runs compare equal."""
    if arrangement == "empty":
        shape = (0, *shape[1:])
    x = small_integers(shape, dtype, limit=4)
    return permuted(x) if arrangement == "permuted" else x


def arguments(op: str, dtype: torch.dtype, arrangement: str) -> tuple[Any, ...]:
    """Positional arguments of the raw op, in the schema's order; those of an op that is not listed
    are its first example, whatever dtype and arrangement."""
    one, flag = torch.ones(()), torch.zeros(1)
    x = tensor((4, 6), dtype, arrangement)
    if op == "amax":
        return (x,)
    if op == "quantize":
        return x, torch.float8_e4m3fn, one, True, "tensor", True, None
    if op in FUSED:
        cast = torch.float8_e4m3fn, None, True, "block1x128", True, None
        k, column = torch.ones(6), torch.ones(x.shape[0])
        return {
            "norm_quantize": (x, x.clone(), k, k.bfloat16(), 1e-5, True, *cast),
            "norm_backward": (x.clone(), x, k, column, column + 1, x + 1, True),
            "act_quantize": (x, x.clone(), "gelu", *cast),
            "act_backward": (x.clone(), x, x + 1, "silu", *cast),
        }[op]
    if op in CROSS_ENTROPY:
        target, row = torch.arange(len(x)), torch.ones(len(x))
        more = (torch.ones(len(x), 4), 1) if op == "cross_entropy" else (row, row, 1, 9, 0.1, 0.01)
        return x, target, *more, 5.0, *([torch.bfloat16] if op != "cross_entropy" else [])
    if op == "dequantize":
        return x, one, torch.bfloat16
    if op == "quantize_mx":
        return x, "nvfp4", "rceil", True, torch.ones(1, dtype=torch.int64), True, False
    if op == "dequantize_mx":
        data = tensor((4, 3), torch.uint8, arrangement)
        scales = tensor((4, 1), torch.uint8, arrangement)
        return data, scales, None, "mxfp4", 6, dtype
    if op == "pack":
        return x, 4, 2**40, 3, torch.ones(1, dtype=torch.int64)
    if op == "unpack":
        codes = torch.arange(x.numel() // 2, dtype=torch.uint8)
        ranges = torch.full(((x.numel() + 127) // 128, 2), 0.5, dtype=torch.bfloat16)
        return codes, ranges, 4, list(x.shape), dtype
    if op in ("attention", "attention_backward"):
        q = tensor((2, 4, 5, 8), dtype, arrangement)
        k, v = (tensor((q.shape[0], 2, 7, 8), dtype, arrangement) for _ in range(2))
        results = OPS["attention"].handle()(q, k, v, True, 0.25)
        more = (q.clone(), q, k, v, *results) if op != "attention" else (q, k, v)
        mask = torch.arange(5)[:, None] >= torch.arange(7).view(1, 1, 1, 7) - 2
        return *more, True, 0.25, mask, *((None,) if op == "attention" else ())
    if op == "rotary":
        q, k, v = (tensor((2, n, 5, 8), dtype, arrangement) for n in (3, 2, 1))
        return q, k, v, one.expand(5, 4), one.expand(5, 4), False, False
    if op == "rotary_":
        x = tensor((2, 3, 5, 8), dtype, arrangement)
        x = x if x.stride(3) == 1 else x.contiguous()
        return x, one.expand(5, 4), one.expand(5, 4), False, False
    if op in ("gemm_grouped", "gemm_grouped_accumulate_"):
        first = min(1, len(x))
        offs = torch.tensor([first, first, len(x)], dtype=torch.int32)
        if op == "gemm_grouped":
            b = tensor((3, 6, 5), dtype, "permuted" if arrangement == "permuted" else "contiguous")
            return x, b, one, torch.ones(3, 1, 5), offs, torch.float32, False
        b, acc = tensor((4, 5), dtype, arrangement), torch.zeros((3, 6, 5))
        acc = permuted(acc) if arrangement == "permuted" else acc
        return acc, x.t(), b, torch.ones(3, 6, 1), one, offs
    if op in ("gemm", "gemm_accumulate_", "gemm_simulated"):
        b = tensor((6, 5), dtype, "permuted" if arrangement == "permuted" else "contiguous")
        if op != "gemm_accumulate_":
            gpu = ["hopper", None, None] if op == "gemm_simulated" else []
            return x, b, one, None, torch.ones(5).bfloat16(), torch.float32, False, *gpu
        acc = torch.zeros((x.shape[0], 5))
        acc = permuted(acc) if arrangement == "permuted" else acc
        return acc, x, b, None, one
    counts = torch.zeros((2, 4), dtype=torch.int64)
    if op == "unscale_":
        return [x, tensor((3,), torch.float32, "contiguous")], one * 0.5, flag, counts
    if op == "grad_stats_":
        grads = [x, tensor((3,), torch.float32, "contiguous")]
        return grads, one, flag, torch.zeros(2).double(), counts
    if op in UPDATES:
        real = torch.float64 if dtype == torch.float64 else torch.float32
        wide = [tensor((4, 6), real, arrangement) for _ in range(3)]
        masters = [wide[2]] if real != dtype and op != "sgd_" else []
        states, scales = [wide[0], wide[1].abs()][: len(OPS[op].states)], []
        if real == torch.float32:  # the first state in 8 bits
            states[0] = torch.zeros_like(states[0], dtype=torch.uint8)
            scales = [torch.ones((x.numel() + 255) // 256), torch.ones(0)][: len(states)]
        settings = [*OPS[op].examples.args[1]]
        options = (1e-3, settings, False, 1e9, True, 7, [4], None, one, one, flag)
        return [x], [x.clone()], states, scales, masters, torch.ones(1), *options
    if op == "scale_from_amax_":
        same = [tensor((4, 6), dtype, arrangement) for _ in range(3)]
        return *same, torch.float8_e5m2, 1, True
    if op == "update_delayed_scales_":
        histories, scales = [torch.ones(4), torch.zeros(4)], [torch.ones(()), torch.zeros(())]
        return histories, scales, [one * 2, one * 3], [448.0, 57344.0], 0, True, False
    return tuple(next(iter(OPS[op].examples("cpu"))))
