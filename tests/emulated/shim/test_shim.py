"""The shim of CUDA's primitives itself. (../values runs the kernels of csrc/cuda on it: that does
not show the GPU's own memory model, its speed, or that nvcc compiles the same.)"""

from __future__ import annotations

import ctypes

import torch
from emulated.shim import runner


def test_the_shim_itself() -> None:
    blocks, threads = 3, 64
    out = torch.full((blocks, threads, 6), -1, dtype=torch.int32)
    library, sizes = runner.library(), (ctypes.c_int64(blocks), ctypes.c_int64(threads))
    assert library.deadlock() == 719  # cudaErrorLaunchFailure, and the next launch works
    assert library.primitives(*sizes, ctypes.c_void_p(out.data_ptr())) == 0
    for t in range(threads):
        lane, first = t % 32, t // 32 * 32
        ballot = sum(1 << i for i in range(32) if (first + i) % 3 == 0)
        signed = ballot - (1 << 32) if ballot >> 31 else ballot
        down = t + 2 if lane < 30 else t
        want = torch.tensor([t ^ 1, threads - 1 - t, down, signed, 1, 0], dtype=torch.int32)
        assert torch.equal(out[:, t], want.expand(blocks, 6)), f"thread {t}: {out[:, t]}"
