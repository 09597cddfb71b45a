"""simulate for block formats and for MI300, against the published steps in exact fractions.

The formulas are those of arXiv 2511.10909, written again; no GPU has measured them.
"""

from __future__ import annotations

import math
from fractions import Fraction

import independent as ind
import independent_mx as mx
import numpy as np
import pytest
import torch
from cases import for_each, normal
from test_simulate import of_sizes

import mixprec

F = Fraction
SPECS = {**{s.name: s for s in ind.SMALL_SPECS}, "e4m3": ind.E4M3, "e5m2": ind.E5M2}
Numbers = list[float]


def power(x: float, least: int) -> int:
    return max(math.frexp(x)[1] - 1, least)


def least_of(spec: ind.Spec) -> int:
    return 1 - spec.bias


def toward_zero(x: F) -> float:
    """24 bits of x, which is in FP32's range."""
    if x == 0:
        return 0.0
    unit = F(2) ** (max(math.frexp(float(x))[1], -125) - 24)
    return float(int(x / unit) * unit)


def fused(terms: list[tuple[F, int]], c: float, bits: int, least: int) -> float:
    """c + terms with these exponents."""
    tops = [e for x, e in terms] + ([power(c, -126)] if c else [])
    unit = F(2) ** (max([least, *tops]) - bits)
    return toward_zero((int(F(c) / unit) + sum(int(x / unit) for x, _ in terms)) * unit)


def of_mx(a: Numbers, b: Numbers, scales: list[F], least: tuple[int, int]) -> float:
    """Steps of 32; scales: of each block of 32, of both."""
    c = 0.0
    for k, s in enumerate(scales):
        e = math.frexp(float(s))[1] - 1
        part = zip(a[32 * k : 32 * k + 32], b[32 * k : 32 * k + 32], strict=True)
        terms = [(F(x) * F(y) * s, power(x, least[0]) + power(y, least[1]) + e)
                 for x, y in part if x and y]  # fmt: skip
        c = fused(terms, c, 25, -133)
    return c


def of_fp4(a: Numbers, b: Numbers, scales: list[F], exponents: list[int]) -> float:
    """Steps of 64; scales: of each block of 16, of both, and the sum of their exponents."""
    c = 0.0
    for start in range(0, len(a), 64):
        terms = []
        for k in range(start, min(start + 64, len(a)), 16):
            pairs = [(F(x), F(y)) for x, y in zip(a[k : k + 16], b[k : k + 16], strict=True)]
            if any(x and y for x, y in pairs):
                total = sum(x * y for x, y in pairs)
                terms.append((total * scales[k // 16], exponents[k // 16]))
        c = fused(terms, c, 35, -139)
    return c


def of_mi300(a: Numbers, b: Numbers, least: tuple[int, int], parts: int) -> float:
    c = 0.0
    for k in range(0, len(a), 8 * parts):
        sums, tops = [], []
        for p in range(k, k + parts):
            part = slice(p, k + 8 * parts, parts)
            pairs = [(x, y) for x, y in zip(a[part], b[part], strict=True) if x and y]
            exponents = [power(x, least[0]) + power(y, least[1]) for x, y in pairs]
            tops.append(max(exponents, default=-999))
            unit = F(2) ** (tops[-1] - 24)
            sums.append(sum(int(F(x) * F(y) / unit) for x, y in pairs) * unit)
        of_c = power(c, -126) if c else -126
        unit = F(2) ** (max(tops) - 24)
        dot = sum(math.floor(x / unit) * unit for x in sums)
        high = max(*tops, of_c)
        if parts == 2 and of_c < high - 25:
            c = 0.0
        unit, wide = F(2) ** (high - 24), F(2) ** (high - 32)
        total = math.floor(dot / wide) * wide + math.floor(F(c) / unit) * unit
        if total:
            wide = F(2) ** (power(float(total), -126) - 31)
            total = math.floor(total / wide) * wide
        c = float(np.float32(float(total)))
    return c


def elements(q: mixprec.Quantized, spec: ind.Spec, columns: int) -> np.ndarray:
    codes = q.data.view(torch.uint8).numpy()
    if spec.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)[:, :columns]
    return ind.decode_table(spec)[codes]


PAIRS = [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e2m1", "e5m2"), ("e3m2", "e2m3"), ("e2m1", "e2m1")]
KINDS = [*((pair, "mx") for pair in PAIRS), (("e2m1", "e2m1"), "nvfp4")]


@for_each("pair, kind", KINDS)
def test_blackwell_multiplies_blocks(pair: tuple[str, str], kind: str) -> None:
    for spread, k in ((0, 150), (8, 128), (40, 64)):
        x, w = (of_sizes((9, k), torch.float32, spread, seed) for seed in (1, 2))
        x[0, :16], w[1] = 0.0, 0.0
        qs = [mixprec.quantize(t, f, granularity=kind) for t, f in zip((x, w), pair, strict=True)]
        with mixprec.simulate("blackwell"):
            got = mixprec.gemm(qs[0], qs[1].t(), out_dtype=torch.float32)
            with mixprec.use_backend("reference"):
                ind.assert_same_bits(mixprec.gemm(qs[0], qs[1].t(), out_dtype=torch.float32), got)
        specs = [SPECS[f] for f in pair]
        values = [elements(q, spec, k) for q, spec in zip(qs, specs, strict=True)]
        codes = [q.scale_inv.view(torch.uint8).numpy() for q in qs]
        table = ind.decode_table(ind.E4M3) if kind == "nvfp4" else 2.0 ** (np.arange(256.0) - 127)
        least = least_of(ind.E4M3) if kind == "nvfp4" else -127
        scales = [[[float(s) for s in row] for row in table[c]] for c in codes]
        size, is_fp4 = mx.BLOCKS["nvfp4" if kind == "nvfp4" else "mxfp4"].size, pair == PAIRS[-1]
        want = torch.empty_like(got)
        for i in range(9):
            for j in range(9):
                a, b = values[0][i].tolist(), values[1][j].tolist()
                padding = [0.0] * (-k % 64)
                both = list(zip(scales[0][i], scales[1][j], strict=True))
                both += [(1.0, 1.0)] * ((k + len(padding)) // size - len(both))
                a, b, s = a + padding, b + padding, [F(x) * F(y) for x, y in both]
                if is_fp4:
                    e = [power(x, least) + power(y, least) for x, y in both]
                    each = [i for i in range(len(s)) for _ in range(size // 16)]
                    c = of_fp4(a, b, [s[i] for i in each], [e[i] for i in each])
                else:
                    c = of_mx(a, b, s, (least_of(specs[0]), least_of(specs[1])))
                want[i, j] = c
        for q in qs:
            want = want if q.tensor_scale_inv is None else want * q.tensor_scale_inv
        ind.assert_same_bits(got, want)


@for_each("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_mi300(dtype: torch.dtype) -> None:
    spec = ind.BY_DTYPE[dtype]
    for spread in (0, 6, 12):
        a, b = (of_sizes((9, 48), dtype, spread, seed) for seed in (3, 4))
        with mixprec.simulate("MI300X"):
            got = mixprec.gemm(a, b.t(), out_dtype=torch.float32)
        parts, least = 2 if spec.bits == 8 else 1, (least_of(spec),) * 2
        rows = [[of_mi300(x, y, least, parts) for y in b.double().tolist()]
                for x in a.double().tolist()]  # fmt: skip
        ind.assert_same_bits(got, torch.tensor(rows))


def test_scales_that_no_tensor_core_reads() -> None:
    q = mixprec.quantize(torch.ones(4, 64), "e2m1", granularity="nvfp4/ue5m3")
    with mixprec.simulate("blackwell"), pytest.raises(ValueError, match="have no instruction for"):
        mixprec.gemm(q, q.t())


def test_nan_and_overflow_of_blocks() -> None:
    x = normal((4, 64), torch.float32)
    x[1, 5], x[2], x[3] = math.inf, 2.0**126, -(2.0**126)
    for fmt, kind in (("e4m3", "mx"), ("e2m1", "mx"), ("e2m1", "nvfp4")):
        q = mixprec.quantize(x if kind == "mx" else x[:2], fmt, granularity=kind)
        with mixprec.simulate("blackwell"):
            y = mixprec.gemm(q, q.t(), out_dtype=torch.float32)
        assert (y[1].view(torch.int32) == 0x7FFFFFFF).all()
        if kind == "mx":
            assert y[2:, 2].tolist() == [math.inf, -math.inf]
            assert y[0, 0].isfinite()
