"""The GPU that is measured: its name and limits, its clocks, and a dry run without it.

MIXPREC_BENCH_DEVICE=cpu is a dry run: every case of the GPU runs, tiny, on the CPU, so that what is
wrong with the benchmark itself shows without a GPU. Its figures mean nothing, and its files say so.
MIXPREC_BENCH_TINY=1: the same on torch's cuda device, where that is a fake one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DEVICE = torch.device(os.environ.get("MIXPREC_BENCH_DEVICE", "cuda"))
ON_CPU = DEVICE.type != "cuda"
DRY_RUN = ON_CPU or os.environ.get("MIXPREC_BENCH_TINY") == "1"
FAKE_NAME = "a GPU on the CPU"  # of tests/emulated/device, as torch names it
BACKENDS = ("cpp", "reference") if ON_CPU else ("cuda", "triton", "vendor")
QUERY = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
_PROPERTIES = f"name,driver_version,clocks.max.sm,power.limit,memory.free,{QUERY}"
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
    if not DRY_RUN:
        of = torch.cuda.get_device_properties(DEVICE)
        found |= {
            "gpu_memory": of.total_memory,
            "gpu_processors": of.multi_processor_count,
            "gpu_l2": of.L2_cache_size,
            "cuda": torch.version.cuda,
        }
    return found


def _query(fields: str, *more: str) -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    format_ = "--format=csv,noheader,nounits"
    return ["nvidia-smi", f"--query-gpu={fields}", format_, f"--id={visible}", *more]


def snapshot() -> dict[str, str] | None:
    """What nvidia-smi says right now; None where there is none, or the GPU is lost."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        done = subprocess.run(_query(_PROPERTIES), capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return None
    values = [v.strip() for v in done.stdout.strip().split(",")]
    names = _PROPERTIES.split(",")
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else None


class Watch:
    """Notes clocks, power and temperature twice a second while cases run, by one nvidia-smi."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._notes = Path(self._folder.name) / "notes"
        self._notes.touch()
        self._process: subprocess.Popen[str] | None = None
        self._seen = 0
        if shutil.which("nvidia-smi") is not None:
            with self._notes.open("w") as file:
                command = _query(QUERY, "-lms", "500")
                self._process = subprocess.Popen(command, stdout=file, text=True)

    def since_last(self) -> dict[str, list[float]]:
        """Every value noted since the last call, by name."""
        text = self._notes.read_text()[self._seen :]
        complete = text[: text.rfind("\n") + 1]
        self._seen += len(complete)
        noted: dict[str, list[float]] = {}
        for line in complete.splitlines():
            for key, value in zip(QUERY.split(","), line.split(","), strict=False):
                if re.fullmatch(r"\s*\d+(\.\d+)?\s*", value):
                    noted.setdefault(key, []).append(float(value))
        return noted

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        self._folder.cleanup()
