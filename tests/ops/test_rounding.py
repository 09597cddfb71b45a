"""Philox, and that what is rounded with its bits is right on average. test_values.py has values."""

from __future__ import annotations

from collections.abc import Callable

import independent as ind
import independent_mx as mx
import torch
from cases import for_each

import mixprec
from mixprec.ops import pack, sgd_, unpack
from mixprec.ops._reference import rounding
from mixprec.ops.pack import BITS

# Random123's known answers for Philox4x32-10: counter, key (low word first), result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@for_each("counter, key, want", KNOWN)
def test_philox_known_answers(counter: tuple, key: tuple, want: tuple) -> None:
    seed = key[0] | key[1] << 32
    got = rounding.philox(tuple(torch.tensor([c]) for c in counter), seed)
    assert got.tolist() == [list(want)]
    assert ind.philox(counter, seed) == list(want)


# --- right on average ----------------------------------------------------------------------------

DRAWS = 1 << 20
Rounded = Callable[
    [float], torch.Tensor
]  # the share of the way from 1 up -> 0 for 1, 1 for the next


def stored(part: float) -> torch.Tensor:
    """In a bf16 param: p - (p - value) * 1, exactly."""
    param, values = torch.zeros(DRAWS).bfloat16(), torch.full((DRAWS,), 1 + part * 2.0**-7)
    options = {"lr": 1.0, "stochastic_rounding": True, "seed": 3, "indices": [0]}
    sgd_([param], [-values], [], [], torch.zeros(1), **options)
    return (param.double() - 1) * 2.0**7


def packed(bits: int) -> Rounded:
    def run(part: float) -> torch.Tensor:
        x = torch.full((DRAWS // 128, 128), 1 + part)
        x[:, 0], x[:, 1] = 0.0, 2**bits - 1
        return unpack(*pack(x, bits, seed=11, counter=bits), bits, x.shape)[:, 2:].double() - 1

    return run


def stochastic(x: torch.Tensor, element: str, fmt: str, seed: int) -> torch.Tensor:
    granularity = "nvfp4" if fmt == "nvfp4" else "mx"
    q = mixprec.quantize(x, element, granularity=granularity, seed=seed)
    return mixprec.dequantize(q, torch.float32).double()


def in_blocks(fmt: str) -> Rounded:
    spec, size = mx.BLOCKS[fmt]
    granularity, unit = ("nvfp4", 448.0) if fmt == "nvfp4" else ("mx", 1.0)

    def run(part: float) -> torch.Tensor:
        x = torch.full((DRAWS // size, size), 1 + part * 2.0**-spec.mantissa_bits)
        x[:, 0] = spec.max  # which is exact, and with which the scale is `unit`
        q = mixprec.quantize(x * unit, spec.name, granularity=granularity, seed=5)
        return (mixprec.dequantize(q)[:, 1:].double() / unit - 1) * 2.0**spec.mantissa_bits

    return run


@for_each("fmt", mx.BLOCKS)
def test_the_mean_of_random_blocks_is_exact(fmt: str) -> None:
    """The slope of 400 draws against x, and that of the blocks' largest elements, which a scale
    that is rounded down makes smaller. Each block weighs the same, whatever its scale."""
    spec, size = mx.BLOCKS[fmt]
    x = torch.randn(64, 64) * torch.logspace(-12, 12, 64, base=2.0)[:, None]
    drawn = torch.stack([stochastic(x, spec.name, fmt, seed) for seed in range(400)])
    blocks = x.double().unflatten(1, (-1, size))
    largest = (blocks.abs() == blocks.abs().amax(-1, keepdim=True)).flatten(1)
    for chosen in (torch.ones_like(largest), largest):
        ratios = drawn[:, chosen] / x[chosen] - 1
        weights = (blocks.abs() / blocks.abs().amax(-1, keepdim=True)).flatten(1)[chosen] ** 2
        slopes = (ratios * weights).sum(1) / weights.sum()
        assert slopes.mean().abs() < 4 * slopes.std() / 20 + 2.0**-16, "a bias"


@for_each("unit", [448.0, 1.0, 2.0**-5, 2.0**-9, 2.0**-22])
def test_no_nvfp4_scale_is_too_small_for_its_block(unit: float) -> None:
    """Block maxima whose scales would be `unit` to its double, beside 448: subnormal ones, and
    those that nearest rounding makes 0, too. above: by how much elements may be larger than 6."""
    above = 1 + 2.0**-21
    x = torch.zeros(1025, 16)
    x[:, 3] = torch.linspace(6 * unit, 12 * unit, 1025).clamp(max=2688.0)
    x[0] = 2688.0
    q = mixprec.quantize(x, "e2m1", granularity="nvfp4", seed=1)
    scales = q.scale_inv.float().flatten()
    assert torch.all(x.amax(1) <= 6 * above * scales)
    smaller = (q.scale_inv.view(torch.uint8).flatten() - 1).view(torch.float8_e4m3fn).float()
    assert torch.all(x.amax(1) > 6 / above * smaller), "the next smaller one would do"
    zeros = mixprec.quantize(x * 0, "e2m1", granularity="nvfp4", seed=1)
    assert not zeros.scale_inv.float().any()
    assert not mixprec.dequantize(zeros).any()


ROUNDED = {"bf16": stored, **{f"{bits} bits": packed(bits) for bits in BITS}}
ROUNDED |= {fmt: in_blocks(fmt) for fmt in mx.BLOCKS}


@for_each("part", [0.0007, 0.25, 0.5, 0.7503, 0.999])
@for_each("kind", ROUNDED)
def test_only_the_two_neighbours_and_on_average_the_value(kind: str, part: float) -> None:
    """Of 10^6 draws. Those of a row may share random bits: the deviation is that of their means."""
    up = ROUNDED[kind](part)
    assert set(up.unique().tolist()) == {0.0, 1.0}
    means = up.view(1024, -1).mean(1)
    assert abs(up.mean() - part) < 4.5 * means.std() / 32 + 2.0**-16
