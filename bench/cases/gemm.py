"""gemm: FP16, BF16 and FP8 operands against what torch offers for the same job."""

from __future__ import annotations

from functools import partial

import torch

import mixprec

from .. import verify
from .registry import Workload, case, times_faster

SIZES = (512, 1024, 2048)
E4M3 = torch.float8_e4m3fn


def _operands(size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """a [S, S] and b [S, S] = weight.t(), as in a linear layer.

    The column-major b is also the kind one to torch: its fp16 product takes 20 times as long with
    a row-major b on processors without fp16 arithmetic (1024 cubed: 13 against 0.7 GFLOP/s).
    """
    generator = torch.Generator().manual_seed(size)
    a, weight = (torch.randn(size, size, generator=generator).to(dtype) for _ in range(2))
    return a, weight.t()


def product(size: int, operands: torch.dtype, out: torch.dtype, baseline: str) -> Workload:
    """a @ b in `operands`, written as `out`, against one baseline."""
    a, b = _operands(size, operands)
    one = torch.ones(())
    baselines = {
        "torch a @ b": lambda: a @ b,
        "torch._scaled_mm": lambda: torch._scaled_mm(a, b, one, one, out_dtype=out),
        "torch a.float() @ b.float()": lambda: a.float() @ b.float(),
    }
    ours = partial(mixprec.gemm, a, b, out_dtype=out)
    return Workload(
        ours=ours,
        baselines={baseline: baselines[baseline]},
        check=lambda: verify.gemm(ours(), a, b),
        flops=2.0 * size**3,
        bytes=size * size * (2 * operands.itemsize + out.itemsize),
    )


_KINDS = (
    # name, operands, output, baseline, target
    ("fp16", torch.float16, torch.float16, "torch a @ b", 3.5),
    ("fp8-bf16", E4M3, torch.bfloat16, "torch._scaled_mm", 2.5),
    ("fp8-fp32", E4M3, torch.float32, "torch._scaled_mm", 1.3),
    # torch's CPU mm has no fp32 output for bf16 operands; this gives the same single rounding
    ("bf16-fp32", torch.bfloat16, torch.float32, "torch a.float() @ b.float()", 1.3),
)

for _name, _operand, _out, _baseline, _target in _KINDS:
    for _size in SIZES:
        case(
            f"gemm/{_name}/{_size}",
            f"{_size} cubed, {str(_operand)[6:]} operands, {str(_out)[6:]} output",
            times_faster(_target),
            partial(product, _size, _operand, _out, _baseline),
            quick=_size == SIZES[0],
        )
