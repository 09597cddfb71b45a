"""States in 8 bits: the format and its rounding. test_values.py has the updates of such states."""

from __future__ import annotations

import pytest
import torch
from cases import normal

from mixprec.ops._reference import state8
from mixprec.ops._reference.state8 import BLOCK, SIGNED, UNSIGNED, decode, encode

KINDS = [pytest.param(SIGNED, id="signed"), pytest.param(UNSIGNED, id="unsigned")]


def table(kind: state8.Codes) -> torch.Tensor:
    """The values of codes 0 and up as the module describes them, from the largest down."""
    octaves, lowest = (4, 11) if kind is SIGNED else (8, 23)
    upper = [2.0**-e * (1 + f / 16) for e in range(octaves) for f in reversed(range(16))]
    lower = [2.0**-e * (1 + f / 8) for e in range(octaves, lowest + 1) for f in reversed(range(8))]
    return torch.tensor([0.0, *reversed((upper + lower)[:-1])])


def spread(kind: state8.Codes, count: int) -> torch.Tensor:
    """Numbers of many magnitudes, and zeros."""
    x = normal((count,), torch.float32, 0) * torch.exp2(12 * normal((count,), torch.float32, 1))
    x[::7] = 0.0
    return x if kind is SIGNED else x.abs()


@pytest.mark.parametrize("kind", KINDS)
def test_values(kind: state8.Codes) -> None:
    """Of every code, with scales at both ends of the range: BF16 numbers, which encoding keeps."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = table(kind)
    values = torch.cat([values, -values]) if kind is SIGNED else values
    for scale in (2.0**-100, 1.0, 2.0**126):
        x = decode(codes, torch.tensor([scale]), kind)
        assert torch.equal(x, values * scale)
        assert torch.equal(x.bfloat16().float(), x)
        for random in (None, torch.full((1, BLOCK), 0xFFFF)):
            again, scales = encode(x, kind, random)
            assert scales.item() == scale
            assert torch.equal(again, codes)
    part = decode(codes[:100], torch.ones(1), kind)  # whose largest value allows another scale
    assert torch.equal(decode(*encode(part, kind), kind), part)


@pytest.mark.parametrize("kind", KINDS)
def test_rounding(kind: state8.Codes) -> None:
    """To the nearest code, or to one of the two neighbours at random and without bias."""
    x = spread(kind, 40 * BLOCK)
    codes, scale = encode(x, kind)
    relative = x.abs().view(-1, BLOCK) / scale[:, None]
    assert (relative <= 1.9375).all()
    values = table(kind)
    above = torch.bucketize(relative, values).clamp(max=len(values) - 1)
    low, high = values[(above - 1).clamp(min=0)], values[above]
    nearest = torch.where(relative - low < high - relative, low, high)
    if kind is UNSIGNED:
        nearest = torch.where((relative > 0) & (relative < values[1]), values[1], nearest)
    got = decode(codes, scale, kind).abs().view(-1, BLOCK) / scale[:, None]
    assert torch.equal(got, nearest)

    draws = 400
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros_like(relative, dtype=torch.float64)
    for _ in range(draws):
        random = torch.randint(0, 2**16, relative.shape, generator=generator)
        drawn = decode(encode(x, kind, random)[0], scale, kind).abs().view(-1, BLOCK)
        drawn = drawn / scale[:, None]
        assert ((drawn == low) | (drawn == high)).all()
        total += drawn
    fair = relative >= values[1] if kind is UNSIGNED else relative > 0
    error, width = total / draws - relative, (high - low).double()
    z = (error[fair] / width[fair]).sum() / (fair.sum() / 4 / draws).sqrt()
    assert abs(z) < 4


@pytest.mark.parametrize("kind", KINDS)
def test_an_average_decays_only_with_random_rounding(kind: state8.Codes) -> None:
    """0.999^1000 of it is left; to nearest, all of it."""
    generator = torch.Generator().manual_seed(0)
    nearest = drawn = torch.ones(16 * BLOCK)
    for _ in range(1000):
        random = torch.randint(0, 2**16, (16, BLOCK), generator=generator)
        nearest = decode(*encode(0.999 * nearest, kind), kind)
        drawn = decode(*encode(0.999 * drawn, kind, random), kind)
    assert (nearest == 1.0).all()
    assert drawn.mean().item() == pytest.approx(0.999**1000, rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_are_not_finite(kind: state8.Codes) -> None:
    """None of them becomes a number; what is too small becomes 0, or the least code."""
    for bad in (torch.inf, torch.nan, 3e38):
        x = torch.ones(3 * BLOCK)
        x[BLOCK + 3] = bad
        y = decode(*encode(x, kind), kind).view(3, BLOCK)
        assert y[1].isnan().all()
        assert torch.equal(y[::2], torch.ones(2, BLOCK))
    tiny = decode(*encode(torch.tensor([0.0, 1e-45, 1e-38]), kind), kind)
    least = 0.0 if kind is SIGNED else 2.0**-123 * 1.125
    assert tiny.tolist() == [0.0, least, least]
