"""gemm as a GPU computes it: the compiled loops and the reference agree in every bit."""

from __future__ import annotations

import itertools
import re
from typing import Any

import independent as ind
import pytest
import torch
from cases import LAYOUTS, WIDE, for_each, normal, random_bits
from test_tensor_core import BF16, CASES, E4M3, F16, Pair

import mixprec
from mixprec.ops._dispatch.simulation import ARCHITECTURES, formats

SHAPES = ((1, 1, 1), (5, 33, 70), (9, 17, 300), (4, 16, 128), (3, 2, 0), (0, 4, 5))


def scaled(m: int, n: int, k: int, kind: int) -> list[torch.Tensor | None]:
    """Scales of one element, of rows, along K, of blocks; in other granularities for b."""
    chunks, factors = -(-k // 128), torch.tensor([0.5, 3.0, 1.0])
    shapes = [(), (m, 1), (m, chunks), (-(-m // 128), chunks)]
    of_b = [(), (1, n), (chunks, 1), (chunks, -(-n // 128))]
    both = []
    for shape in (shapes[kind], of_b[(kind + 1) % 4]):
        size = torch.Size(shape).numel()
        both.append(factors.repeat(size)[:size].reshape(shape))
    return both if kind else [None, None]


def both_ways(*args: Any) -> torch.Tensor:
    """torch.ops.mixprec.gemm_simulated, after a comparison with its reference."""
    got = torch.ops.mixprec.gemm_simulated(*args)
    ind.assert_same_bits(got, torch.ops.mixprec.gemm_simulated_reference(*args))
    return got


def of_sizes(shape: tuple[int, int], dtype: torch.dtype, power: int, seed: int) -> torch.Tensor:
    """Normal values times powers of two between 2^-power and 2^(power / 2)."""
    g = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-power, power // 2 + 1, shape, generator=g)
    return (normal(shape, torch.float32, seed) * torch.exp2(exponents.float())).to(dtype)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_loops_agree_with_the_reference(arch: str) -> None:
    layouts = itertools.cycle(LAYOUTS[:-2])
    options = itertools.cycle(itertools.product(WIDE, (False, True), range(4), (0, 6, 60, 100)))
    for case, pair in CASES:
        for m, n, k in SHAPES if case == arch else ():
            for _ in range(4):
                out, fast, kind, power = next(options)
                a = next(layouts)(of_sizes((m, k), pair[0], power, 1))
                b = next(layouts)(of_sizes((k, n), pair[1], power, 2))
                bias = normal((n,), out) if fast else None
                both_ways(a, b, *scaled(m, n, k, kind), bias, out, fast, arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_pattern_with_nan_and_inf(arch: str) -> None:
    """Also rows and columns of zeros, of tiny numbers, and sums that overflow."""
    for case, pair in CASES:
        if case == arch:
            a, b = random_bits(6 * 70, pair[0], 1), random_bits(70 * 35, pair[1], 2)
            a, b = a.reshape(6, 70), b.reshape(70, 35)
            for x in (a[1], b[:, 3], a[4, :64]):
                x.copy_(torch.zeros(()))
            a[2], b[:, 5] = torch.tensor(1e-30).to(pair[0]), torch.tensor(1e-12).to(pair[1])
            a[3], b[:, 30] = torch.tensor(3e38).to(pair[0]), 2.0
            a[5], b[:, 31] = (torch.finfo(dtype).max for dtype in pair)
            for fast in (False, True):  # True: in passes, where Inf and NaN reach the next one
                got = both_ways(a, b, None, None, None, torch.float32, fast, arch)
                assert set(got[got.isnan()].view(torch.int32).tolist()) == {0x7FFFFFFF}


@for_each("pair, arch", [(pair, arch) for arch, pair in CASES if pair[0].itemsize == 1])
def test_every_fp8_product_at_every_place(pair: Pair, arch: str) -> None:
    """All pairs of patterns, each beside a product of +-2^place: how much is cut, of each sign."""
    codes = torch.arange(256, dtype=torch.uint8)
    for place in range(-18, 17, 7 if arch == "mi300" else 1):  # which has the scalar formula only
        a, b = torch.zeros(256, 3).to(pair[0]), torch.zeros(3, 256).to(pair[1])
        a[:, 2], b[2] = codes.view(pair[0]), codes.view(pair[1])
        a[:, 0], b[0] = 2.0 ** (place // 2), 2.0 ** (place - place // 2) * (-1) ** (place // 3)
        both_ways(a, b, None, None, None, torch.float32, True, arch)


def test_the_rounding_mode_is_restored() -> None:
    a, b, tiny = normal((3, 64), F16), normal((64, 3), F16, 1), torch.full((8,), 1e-40)
    for dtype, flush in itertools.product((F16, E4M3), (True, False)):
        torch.set_flush_denormal(flush)
        try:
            torch.ops.mixprec.gemm_simulated(
                a.to(dtype), b.to(dtype), None, None, None, torch.float32, False, "hopper"
            )
            assert torch.equal((tiny * 0.5 == 0), torch.full((8,), flush))
        finally:
            torch.set_flush_denormal(False)
        assert torch.equal(1 + torch.full((8,), 1.5 * 2.0**-24), torch.full((8,), 1 + 2.0**-23))


def test_promotion() -> None:
    """Ones after a sum of 2^15, whose last bit is 4: lost, but where the sum is promoted."""
    a, b = torch.ones(1, 384), torch.ones(384, 1)
    a[0, :128], b[:128] = 16.0, 16.0
    for arch, fast in itertools.product(("ada", "hopper", "blackwell"), (False, True)):
        args = a.to(E4M3), b.to(E4M3), None, None, None, torch.float32, fast, arch
        lost = fast and arch != "blackwell"
        assert both_ways(*args).item() == 2.0**15 + (0 if lost else 256)


def test_the_block() -> None:
    a, b = normal((9, 256), torch.float32).to(E4M3), normal((256, 8), torch.float32, 1).to(E4M3)

    def now() -> torch.Tensor:
        return mixprec.gemm(a, b, out_dtype=torch.float32)

    def of(arch: str) -> torch.Tensor:
        args = a, b, None, None, None, torch.float32, False, arch
        return torch.ops.mixprec.gemm_simulated(*args)

    plain, acc = now(), normal((9, 8), torch.float32)
    with mixprec.simulate("hopper"):
        assert torch.equal(now(), of("hopper"))
        with mixprec.simulate("ada"):
            assert torch.equal(now(), of("ada"))
        assert torch.equal(now(), of("hopper"))
        with mixprec.use_backend("reference"):
            assert torch.equal(now(), of("hopper"))
        want = acc + of("hopper")
        version = acc._version
        mixprec.gemm_accumulate_(acc, a, b)
        assert torch.equal(acc, want)
        assert acc._version > version
        with pytest.raises(ValueError, match=r"^gemm_accumulate_: acc must have shape"):
            mixprec.gemm_accumulate_(acc[:3], a, b)
    with pytest.raises(ValueError, match=r"^gemm: a must be"), mixprec.simulate("hopper"):
        mixprec.gemm(a[0], b)
    assert torch.equal(now(), plain)
    assert len({tuple(x.flatten().tolist()) for x in (plain, of("hopper"), of("ada"))}) == 3


def test_refusals() -> None:
    x = torch.zeros(2, 2).half()
    with mixprec.simulate("hopper"), pytest.raises(TypeError, match=r"acc must be a torch\.Tensor"):
        mixprec.gemm_accumulate_(None, x, x)  # type: ignore[arg-type]
    q = mixprec.quantize(x, "e2m1", granularity="mx")
    other = mixprec.quantize(x, "e2m1", granularity="nvfp4")
    for arch, b in (("hopper", q.t()), ("mi300", q.t()), ("blackwell", other.t())):
        with mixprec.simulate(arch), pytest.raises(ValueError, match=f"{arch} have no instruction"):
            mixprec.gemm(q, b)
    for b in (q, x.bfloat16()):
        with mixprec.simulate("blackwell"), pytest.raises(ValueError, match="blocks along K"):
            mixprec.gemm(q, b)
    for wrong in ("p100", None, ["hopper"]):
        message = "^simulate: arch must be one of v100, .*, or a GPU .*h100: hopper, .* got "
        with pytest.raises(ValueError, match=message + re.escape(repr(wrong))):
            mixprec.simulate(wrong)
    for arch, pair in itertools.product(ARCHITECTURES, ((F16, F16), (BF16, BF16), (E4M3, E4M3))):
        a, b = torch.zeros(2, 3).to(pair[0]), torch.zeros(3, 2).to(pair[1])
        with mixprec.simulate(arch):
            if pair[0] in formats(arch):
                mixprec.gemm(a, b)
                continue
            match = rf"^simulate: the tensor cores of {arch} have no instruction for {pair[0]}"
            with pytest.raises(ValueError, match=match):
                mixprec.gemm(a, b)
            with pytest.raises(ValueError, match=match):
                mixprec.gemm_accumulate_(torch.zeros(2, 2), a, b)
