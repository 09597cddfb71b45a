"""gemm inside of simulate: each GPU and format, against FP32 products."""

from __future__ import annotations

from functools import partial

import torch

import mixprec
from mixprec.ops._dispatch import library
from mixprec.ops._reference.tensor_core import ARCHITECTURES, formats, tensor_core

from .. import device, verify
from .registry import Medians, Target, Workload, case, times_faster_than

SIZE = 256
FLOPS = 2.0 * SIZE**3
FP32 = "torch a.float() @ b.float()"
NAMES = {
    **{torch.float16: "fp16", torch.bfloat16: "bf16"},
    **{torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"},
}


def _target(arch: str, dtype: torch.dtype) -> Target:
    """For sums of 14 bits, of FP8, 20 GFLOP/s a core with AVX-512, else 3."""
    core = tensor_core(arch, dtype)
    assert core is not None
    if core.significant_bits > 14:
        return times_faster_than(FP32, 0.05)

    def per_core(medians: Medians) -> float:
        return FLOPS / medians["ours"] / torch.get_num_threads() / 1e9

    wide = library.C is not None and library.C.isa().startswith("avx512")
    return Target(20.0 if wide else 3.0, "GFLOP/s a core", True, per_core)


def _workload(arch: str, dtype: torch.dtype) -> Workload:
    a, b = (device.randn(SIZE, SIZE, dtype=dtype, seed=seed, on="cpu") for seed in range(2))

    def ours() -> torch.Tensor:
        with mixprec.simulate(arch):
            return mixprec.gemm(a, b, out_dtype=torch.float32, fast_accum=True)

    def check() -> str | None:
        args = a, b, None, None, None, torch.float32, True, arch
        want = torch.ops.mixprec.gemm_simulated_reference(*args)
        return verify.equal("c", ours(), want)

    return Workload(ours, {FP32: lambda: a.float() @ b.float()}, check, flops=FLOPS)


for _arch in ARCHITECTURES:
    # One of 16 bits and one of 8, where it has them: the others take as long.
    for _dtype in {t.itemsize: t for t in reversed(formats(_arch))}.values():
        case(
            f"simulate/{_arch}/{NAMES[_dtype]}",
            f"{SIZE} cubed, {NAMES[_dtype]} as {_arch} computes it",
            _target(_arch, _dtype),
            partial(_workload, _arch, _dtype),
            quick=_arch == "hopper" and _dtype == torch.float8_e4m3fn,
        )
