"""Products by the tiles of AMX: the order of their sums, in the model, and on processors that have
AMX the same bits from both. Their layouts, scales and epilogues are those of every level: see the
loop over levels in .ci/run.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mixprec.ops._dispatch.library import C

LEVELS = [] if C is None else C.isa_available()
WHY = f"this processor has no AVX512-BF16, whose packing the tiles share: {LEVELS}"
pytestmark = pytest.mark.skipif("amx_model" not in LEVELS, reason=WHY)

PROGRAM = """
import sys, torch, mixprec
a, b, acc = torch.load(sys.argv[1])
outs = [mixprec.gemm(x, y, out_dtype=torch.float32) for x, y in
        ((a, b), (a.t().contiguous().t(), b), (a, b.t().contiguous().t()))]
fp8 = torch.float8_e4m3fn
outs.append(mixprec.gemm(a.to(fp8), b.to(fp8), out_dtype=torch.float32))
mixprec.gemm_accumulate_(acc, a, b)
torch.save([*outs, acc], sys.argv[2])
"""


def run(level: str, inputs: tuple[torch.Tensor, ...], folder: Path) -> list[torch.Tensor]:
    """Products of a program on this level."""
    given, made = folder / "inputs", folder / level
    torch.save(inputs, given)
    env = {**os.environ, "MIXPREC_ISA": level}
    subprocess.run([sys.executable, "-c", PROGRAM, given, made], check=True, env=env)
    outs: list[torch.Tensor] = torch.load(made)
    return outs


def by_formula(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The sums of amx_tiles.h, of numbers whose products and sums fp64 holds exactly."""
    pad = -a.shape[1] % 32
    x = torch.nn.functional.pad(a.double(), (0, pad))
    y = torch.nn.functional.pad(b.double(), (0, 0, 0, pad))
    c = torch.zeros(a.shape[0], b.shape[1])
    for first in range(0, x.shape[1], 32):
        chains = [torch.zeros_like(c), torch.zeros_like(c)]
        for k in range(first, first + 32):
            product = x[:, k, None] * y[k]
            chains[k % 2] = (chains[k % 2].double() + product).float()
        c = c + (chains[0] + chains[1])
    return c


def inputs(m: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(m + n + k)
    a, b = torch.rand(m, k) + 0.5, torch.rand(k, n) - 1.5
    return a.bfloat16(), b.bfloat16(), torch.randn(m, n)


# Whole blocks of tiles and rests of each; one, and more than one, pass of K.
SHAPES = [(32, 32, 32), (1, 1, 1), (16, 32, 64), (17, 33, 95), (70, 40, 130), (5, 7, 2081)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_those_of_the_formula(shape: tuple[int, int, int], tmp_path: Path) -> None:
    a, b, acc = inputs(*shape)
    *outs, fp8, added = run("amx_model", (a, b, acc), tmp_path)
    expected = by_formula(a, b)
    for out in outs:
        assert torch.equal(out, expected)
    low = [x.to(torch.float8_e4m3fn).bfloat16() for x in (a, b)]
    assert torch.equal(fp8, by_formula(*low))
    assert torch.equal(added, acc + expected)


def test_subnormal_operands_are_multiplied_in_fp32(tmp_path: Path) -> None:
    a, b, acc = inputs(40, 40, 64)
    a[3, 5], b[7, 2] = 2.0**-130, 2.0**-127
    out = run("amx_model", (a, b * 2.0**10, acc), tmp_path)[0]
    assert torch.allclose(out.double(), a.double() @ (b * 2.0**10).double(), rtol=1e-5, atol=0)


@pytest.mark.skipif("amx" not in LEVELS, reason=f"this processor has no AMX: {LEVELS}")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_model_has_the_bits_of_the_processor(shape: tuple[int, int, int], tmp_path: Path) -> None:
    numbers = inputs(*shape)
    each = zip(run("amx", numbers, tmp_path), run("amx_model", numbers, tmp_path), strict=True)
    assert all(torch.equal(x, y) for x, y in each)
