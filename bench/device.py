"""The GPU that is measured: its name and limits, and a dry run without it.

MIXPREC_BENCH_DEVICE=cpu is a dry run: every case of the GPU runs, tiny, on the CPU, so that what is
wrong with the benchmark itself shows without a GPU. Its figures mean nothing, and its files say so.
MIXPREC_BENCH_TINY=1: the same on torch's cuda device, where that is a fake one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

DEVICE = torch.device(os.environ.get("MIXPREC_BENCH_DEVICE", "cuda"))
ON_CPU = DEVICE.type != "cuda"
DRY_RUN = ON_CPU or os.environ.get("MIXPREC_BENCH_TINY") == "1"
FAKE_NAME = "a GPU on the CPU"  # of tests/emulated/device, as torch names it
BACKENDS = ("cpp", "reference") if ON_CPU else ("cuda", "triton", "vendor")
_DRY_RUN_L2 = 1 << 16


@dataclass(frozen=True)
class Peak:
    """What the hardware can do at most: bytes and operations per second."""

    bytes: float
    flops16: float
    flops8: float


# Dense figures of the data sheets of NVIDIA.
PEAKS = {"H200": Peak(4.8e12, 989e12, 1979e12), "H100 80GB HBM3": Peak(3.35e12, 989e12, 1979e12)}


def peak(name: str | None) -> Peak | None:
    """Of the GPU of this name; None for one that is not in the table."""
    return next((c for word, c in PEAKS.items() if word in (name or "")), None)


def sized(*sizes: int, tiny: int = 24) -> tuple[int, ...]:
    """The sizes of a case; in a dry run none above `tiny`."""
    return tuple(min(s, tiny) for s in sizes) if DRY_RUN else sizes


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile of one expression for one set of shapes; in a dry run only traced."""
    backend = "eager" if DRY_RUN else "inductor"
    return torch.compile(function, fullgraph=True, dynamic=False, backend=backend)


def eager_and_compiled(plain: Callable[..., Any], on_gpu: bool = True) -> dict[str, Any]:
    """The baselines that torch offers for an op written in plain torch."""
    return {"torch eager": plain, **({"torch.compile": compiled(plain)} if on_gpu else {})}


def where(on_gpu: bool) -> str:
    return DEVICE.type if on_gpu else "cpu"


def randn(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, on: str | None = None
) -> torch.Tensor:
    """Random numbers, on the GPU unless another device is named: zeros draw less power, and would
    be faster than any real data."""
    device = on or DEVICE
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def operand(
    height: int, width: int, dtype: torch.dtype, way: str, seed: int, on: str | None = None
) -> torch.Tensor:
    """[height, width], "n": row-major, or "t": the transpose of a row-major tensor."""
    if way == "t":
        return randn(width, height, dtype=dtype, seed=seed, on=on).t()
    return randn(height, width, dtype=dtype, seed=seed, on=on)


def scales(
    shape: tuple[int, int, int], kind: str, on: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """0.5 for a and 0.25 for b of a product [M, N, K], as many as scaling per "tensor", "row" or
    "block" has."""
    m, n, k = shape
    chunks, columns = -(-k // 128), -(-n // 128)
    sizes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "tensor": ((), ()),
        "row": ((m, 1), (1, n)),
        "block": ((m, chunks), (chunks, columns)),
    }
    a, b = sizes[kind]
    return torch.full(a, 0.5, device=on or DEVICE), torch.full(b, 0.25, device=on or DEVICE)


def l2_bytes() -> int:
    return _DRY_RUN_L2 if DRY_RUN else torch.cuda.get_device_properties(DEVICE).L2_cache_size


def free_bytes() -> int:
    """Memory that new tensors can have."""
    if ON_CPU:
        return 1 << 28
    free, _ = torch.cuda.mem_get_info(DEVICE)
    return free + torch.cuda.memory_reserved(DEVICE) - torch.cuda.memory_allocated(DEVICE)


def release() -> None:
    """Give the memory of the last case back, so that a large one finds it in one piece."""
    if not ON_CPU:
        torch.cuda.empty_cache()


def name() -> str | None:
    if DRY_RUN or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_name(DEVICE)


def properties() -> dict[str, Any]:
    """The GPU for the environment of a result file."""
    found: dict[str, Any] = {"dry_run": DRY_RUN, "gpu_name": name()}
    if name() is not None:
        of = torch.cuda.get_device_properties(DEVICE)
        found |= {
            "gpu_memory": of.total_memory,
            "gpu_processors": of.multi_processor_count,
            "gpu_l2": of.L2_cache_size,
            "cuda": torch.version.cuda,
            "gpu_state": state(),
        }
    return found


def state() -> dict[str, str]:
    """Driver, clocks, power and temperature at this moment; nothing without nvidia-smi."""
    names = ("driver_version", "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    lines = said.splitlines() or [""]
    return dict(zip(names, map(str.strip, lines[0].split(",")), strict=False))
