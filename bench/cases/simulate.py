"""gemm inside of simulate: each GPU and format, against FP32 products and another simulation."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

import mixprec
from mixprec.ops._dispatch import library
from mixprec.ops._reference.tensor_core import ARCHITECTURES, formats, tensor_core

from .. import device, verify
from .registry import Medians, Target, Workload, case, times_faster_than

SIZE = 256  # of a larger product mmasim takes many seconds
FLOPS = 2.0 * SIZE**3
FP32 = "torch a.float() @ b.float()"
NAMES = {
    **{torch.float16: "fp16", torch.bfloat16: "bf16"},
    **{torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"},
}


def _mmasim(arch: str, dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], Any] | None:
    """The instruction of that package (arXiv 2511.10909), along K; None where it is missing."""
    if find_spec("mmasim") is None or shutil.which("ninja") is None:
        return None
    from mmasim.nv_ptx import sim

    kind = {torch.float16: "f16", torch.bfloat16: "bf16"}.get(dtype, NAMES[dtype])
    depth = 4 if arch == "v100" else 32 // dtype.itemsize
    model = {
        "v100": lambda: sim.MMA("Volta", f"m8n8k4.f32.{kind}.{kind}.f32"),
        "a100": lambda: sim.MMA("Ampere", f"m16n8k{depth}.f32.{kind}.{kind}.f32"),
        "ada": lambda: sim.MMA("Ada Lovelace", f"m16n8k{depth}.f32.{kind}.{kind}.f32"),
        "hopper": lambda: sim.WGMMA("Hopper", f"m64n8k{depth}.f32.{kind}.{kind}"),
    }[arch]()

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        c = torch.zeros(a.shape[0], b.shape[1])
        for k in range(0, a.shape[1], depth):
            c = model(a[:, k : k + depth], b[k : k + depth], c)
        return c

    return product


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

    baselines: dict[str, Callable[[], Any]] = {FP32: lambda: a.float() @ b.float()}
    other = _mmasim(arch, dtype) if arch != "blackwell" else None
    if other is not None:
        baselines["mmasim"] = partial(other, a, b)
    return Workload(ours, baselines, check, flops=FLOPS)


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
