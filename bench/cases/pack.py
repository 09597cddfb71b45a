"""pack and unpack, on the CPU and on the GPU, against a copy of as many bytes."""

from __future__ import annotations

from functools import partial

import torch

from mixprec import ops
from mixprec.ops.pack import packed_sizes

from .. import device, verify
from .registry import COPY, DTYPES, GPU_DTYPES, Workload, case, times_faster_than

# 32 MB, and less than the 32 MiB from which on the C library maps, and the kernel clears, the
# memory of every result anew: which would be most of the time.
CPU_BYTES = 32_000_000
GPU_BYTES = 128 << 20
# The share of a copy's speed. pack computes 8 random bits for an element.
PACK, UNPACK = 0.45, 0.85


def _workload(on_gpu: bool, dtype: torch.dtype, bits: int, packs: bool) -> Workload:
    count = CPU_BYTES // dtype.itemsize
    if on_gpu:
        (count,) = device.sized(GPU_BYTES // dtype.itemsize, tiny=1000)
    size, groups = packed_sizes(count, bits)

    def inputs(i: int) -> tuple[torch.Tensor, ...]:
        x = device.randn(count, dtype=dtype, seed=i, on=device.where(on_gpu))
        return (x,) if packs else ops.pack(x, bits)

    def ours(given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if packs:
            return ops.pack(*given, bits, seed=1)
        return (ops.unpack(*given, bits, [count], dtype),)

    return Workload(
        ours,
        {},
        partial(verify.same_as_reference, lambda: ours(inputs(0))),
        inputs,
        ops=("pack" if packs else "unpack",) if on_gpu else (),
        bytes=float(count * dtype.itemsize + size + 4 * groups),
    )


for _name, _dtype in GPU_DTYPES.items():
    for _bits in (8, 4):
        for _op, _share in (("pack", PACK), ("unpack", UNPACK)):
            _way = "to" if _op == "pack" else "from"
            for _prefix in ("", "cuda/") if _name in DTYPES else ("cuda/",):
                case(
                    f"{_prefix}{_op}/{_name}/{_bits}-bit",
                    f"{_name} {_way} {_bits} bits in groups of 128, of the speed of a copy",
                    times_faster_than(COPY, _share),
                    partial(_workload, bool(_prefix), _dtype, _bits, _op == "pack"),
                    quick=_bits == 4,
                )
