"""The step of a tensor core: what GPUs computed, C++ and Python alike."""

from __future__ import annotations

import ctypes
import math
from functools import cache
from pathlib import Path

import independent as ind
import numpy as np
import pytest
import torch
from cases import from_bits, random_bits
from emulated.shim import runner

from mixprec.ops._dispatch.simulation import (
    ARCHITECTURES,
    formats,
    least_exponent,
    step,
    tensor_core,
)

HERE = Path(__file__).parent
E4M3, E5M2, F16, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16
Pair = tuple[torch.dtype, torch.dtype]
MEASURED = {
    **{"V100": "v100", "A100": "a100", "Ada": "ada"},
    **{"H100": "hopper", "H200": "hopper", "B200": "blackwell"},
}
NAMES = {"fp16": F16, "bf16": BF16, "E4M3": E4M3, "E5M2": E5M2}
# Architectures and pairs of formats, FP8 in any mix.
CASES = [
    (arch, (a, b))
    for arch in ARCHITECTURES
    for a in formats(arch)
    for b in formats(arch)
    if a == b or a.itemsize == b.itemsize == 1
]


@cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL(
        str(runner.compile_(["-O2", "-shared", HERE / "tensor_core_step.cpp"], ".so"))
    )


def in_cpp(arch: str, pair: Pair, *abc: torch.Tensor) -> torch.Tensor:
    a, b, c = (x.float().contiguous() for x in abc)
    d = torch.empty_like(c)
    places = [ctypes.c_void_p(x.data_ptr()) for x in (a, b, c, d)]
    sizes = [ctypes.c_int64(n) for n in a.shape]
    kinds = [runner.DTYPES.index(dtype) for dtype in pair]
    library().chain(ARCHITECTURES.index(arch), *kinds, *places, *sizes)
    return d


def in_python(arch: str, pair: Pair, *abc: torch.Tensor) -> torch.Tensor:
    a, b, c = (x.float() for x in abc)
    core = tensor_core(arch, pair[0])
    assert core is not None
    least = least_exponent(pair[0]), least_exponent(pair[1])
    a, b = (torch.nn.functional.pad(x, (0, -x.shape[-1] % core.terms)) for x in (a, b))
    for part in zip(a.split(core.terms, -1), b.split(core.terms, -1), strict=True):
        c = step(core, *part, c, least)
    return c


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Those of NaN too."""
    ind.assert_same_bits(got.view(torch.int32), want.view(torch.int32))


def test_what_gpus_computed() -> None:
    data = np.load(HERE / "measured" / "tensor_core.npz")
    kinds = sorted({key.rsplit("/", 1)[0] for key in data.files})
    assert len(kinds) == 17
    for kind in kinds:
        gpu, name = kind.split("/")
        dtype, arch = NAMES[name], MEASURED[gpu]
        a, b = (from_bits(data[f"{kind}/{x}"], dtype) for x in "ab")
        c, d = (from_bits(data[f"{kind}/{x}"], torch.float32) for x in "cd")
        if arch == "hopper" and dtype.itemsize == 1:
            c = torch.zeros_like(c)  # as the instruction was called
        for run in (in_cpp, in_python):
            assert_same_bits(run(arch, (dtype, dtype), a, b, c), d)


def operands(pair: Pair, count: int, k: int, seed: int) -> list[torch.Tensor]:
    """A quarter each: all patterns, normal values, of all sizes, and of one exponent (no Inf or
    NaN but in the first quarter)."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for i, dtype in enumerate((*pair, torch.float32)):
        shape = (count // 4, k) if i < 2 else (count // 4,)
        n = math.prod(shape)
        normal = torch.randn((3, n), generator=g)
        spread = torch.randint(-12, 12, (n,), generator=g) * (3 if dtype == BF16 else 1)
        parts = [random_bits(n, dtype, seed + i).float(), normal[0]]
        parts += [normal[1] * torch.exp2(spread.float()), normal[2].sign() + normal[2] / 4]
        made.append(torch.stack(parts).reshape(-1, *shape[1:]).to(dtype))
    return made


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_cpp_and_python_agree(arch: str) -> None:
    for case, pair in CASES:
        if case == arch:
            core = tensor_core(arch, pair[0])
            assert core is not None
            for k in (1, core.terms, 2 * core.terms + 3):
                a, b, c = operands(pair, 4000, k, k)
                assert_same_bits(in_cpp(arch, pair, a, b, c), in_python(arch, pair, a, b, c))
