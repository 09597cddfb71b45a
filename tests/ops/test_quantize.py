"""quantize: the cast rule bit by bit, amax from the same pass, the scale, the transpose."""

from __future__ import annotations

import math

import independent as ind
import numpy as np
import torch
from cases import (
    LARGE,
    LAYOUTS,
    SHAPES,
    WIDE,
    Layout,
    for_each,
    from_bits,
    normal,
    pairwise,
    random_bits,
    transposed,
)

import mixprec
from mixprec import Quantized

# Exact, inexact, and so large or small that x * scale overflows to Inf or underflows to 0.
SCALES = (1.0, 2.0**-10, 3.0, 0.1, 2.0**126, 2.0**-126, 1e30, 1e-30)


def check(
    q: Quantized, x: torch.Tensor, spec: ind.Spec, scale: float, transpose: bool = False
) -> None:
    """Every field of q against the definition, bit for bit."""
    want = ind.cast(x, scale, spec)
    assert (q.fmt.name, q.granularity) == (spec.name, "tensor")
    assert q.data.dtype == spec.dtype
    assert q.data.is_contiguous()
    ind.assert_bits(q.data, want, f"data of {spec.name}, scale {scale}")
    for got, value in ((q.amax, ind.amax(x)), (q.scale_inv, np.float32(1) / np.float32(scale))):
        assert got.shape == ()
        ind.assert_bits(got, ind.narrow(np.array(value), torch.float32), "amax or scale_inv")
    assert q.scale_inv_t is None
    if not transpose:
        assert q.data_t is None
        return
    assert q.data_t is not None
    assert q.data_t.is_contiguous()
    assert q.data_t.dtype == spec.dtype
    rows = math.prod(x.shape[:-1])
    ind.assert_bits(q.data_t, want.reshape(rows, x.shape[-1]).T, "data_t")


def current_scale(x: torch.Tensor, spec: ind.Spec, *, power_of_two: bool = True) -> float:
    if spec.bits == 16:
        return 1.0
    return ind.scale_of(ind.amax(x), spec.max, power_of_two=power_of_two)


def neighbours_of_ties(spec: ind.Spec) -> torch.Tensor:
    """Each fp32 tie between two codes with the patterns just below and above it, both signs."""
    ties = ind.midpoints(spec).astype(np.float32).view(np.uint32).astype(np.int64)
    around = np.concatenate([ties - 1, ties, ties + 1]).clip(0, 0x7FFFFFFF)
    return from_bits(np.concatenate([around, around | 0x80000000]).astype(np.uint32), torch.float32)


def boundaries(spec: ind.Spec) -> torch.Tensor:
    """Zeros, subnormals, every code's value, overflow thresholds, Inf, NaN payloads; both signs."""
    with np.errstate(invalid="ignore"):
        exact = ind.decode_table(spec).astype(np.float32).view(np.uint32)
    special = [0, 1, 2, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000]
    special += [0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF, 0x7F80FFFF, 0x7F810000]
    special += [int(np.float32(spec.max).view(np.uint32)) + i for i in range(-3, 4)]
    pattern = np.array([p | sign for p in special for sign in (0, 0x80000000)], np.uint32)
    return from_bits(np.concatenate([exact, pattern]), torch.float32)


@for_each("scale", SCALES)
@for_each("spec", ind.SPECS)
def test_cast_of_ties_boundaries_and_random_patterns(
    backend: str, poisoned: None, spec: ind.Spec, scale: float
) -> None:
    x = torch.cat([neighbours_of_ties(spec), boundaries(spec)])
    if scale == 1.0:
        x = torch.cat([x, random_bits(1 << 20, torch.float32)])
    else:  # patterns whose product lands on and around the ties, and random ones
        with np.errstate(over="ignore", invalid="ignore"):
            near = (ind.values(x) / scale).astype(np.float32).view(np.uint32)
        x = torch.cat([from_bits(near, torch.float32), x, random_bits(1 << 15, torch.float32)])
    check(mixprec.quantize(x, spec.dtype, scale=scale), x, spec, scale)


@for_each("dtype", [torch.float16, torch.bfloat16])
@for_each("spec", ind.SPECS)
def test_cast_of_every_16_bit_pattern(backend: str, spec: ind.Spec, dtype: torch.dtype) -> None:
    x = from_bits(np.arange(1 << 16, dtype=np.uint16), dtype)
    for scale in SCALES:
        check(mixprec.quantize(x, spec.dtype, scale=scale), x, spec, scale)


@for_each("tail", [0, 1, 7, 15, 31])
def test_a_code_does_not_depend_on_its_position(backend: str, tail: int) -> None:
    """Vector body and scalar tail round alike."""
    for spec in ind.SPECS:
        ties = neighbours_of_ties(spec)[:: 3 if spec.bits == 8 else 997][:40]
        for value in ties[::4]:
            codes = ind.bits(mixprec.quantize(value.repeat(64 + tail), spec.dtype, scale=1.0).data)
            assert (codes == codes[0]).all(), f"{spec.name}: {value.item()} at {np.diff(codes)}"


def test_the_rule_in_plain_numbers(backend: str) -> None:
    """A few cases that a reader can check by eye."""
    inf, nan = math.inf, math.nan
    cases = {
        ("e4m3", 1.0): [(448.0, 0x7E), (449.0, 0x7E), (1e30, 0x7E), (-1e30, 0xFE), (inf, 0x7F)],
        ("e4m3", 2.0**120): [(3e38, 0x7E), (-3e38, 0xFE), (inf, 0x7F), (nan, 0x7F), (-0.0, 0x80)],
        ("e5m2", 1.0): [(57344.0, 0x7B), (61440.0, 0x7B), (-1e9, 0xFB), (inf, 0x7C), (-inf, 0xFC)],
        ("e5m2", 2.0**120): [(3e38, 0x7B), (-3e38, 0xFB), (inf, 0x7C), (nan, 0x7F), (0.0, 0x00)],
        ("fp16", 1.0): [(65504.0, 0x7BFF), (65519.0, 0x7BFF), (65520.0, 0x7C00), (-inf, 0xFC00)],
        ("bf16", 1.0): [(3.4e38, 0x7F80), (1.00390625, 0x3F80), (1.01171875, 0x3F82)],
        ("e4m3", 2.0): [(2.0**-11, 0x00), (2.0**-11 * 1.001, 0x01), (1.5 * 2.0**-9, 0x03)],
    }
    for (fmt, scale), pairs in cases.items():
        x = torch.tensor([value for value, _ in pairs])
        got = ind.bits(mixprec.quantize(x, fmt, scale=scale).data)
        is_nan = np.isnan(ind.values(x))
        want = np.array([code for _, code in pairs], got.dtype)
        assert np.array_equal(got[~is_nan], want[~is_nan]), (fmt, scale, got)
        assert np.isnan(ind.decode_table(getattr(ind, fmt.upper()))[got[is_nan]]).all()


@for_each("layout, spec, dtype", pairwise(LAYOUTS, ind.SPECS, WIDE))
def test_shapes_and_layouts(
    backend: str, poisoned: None, spec: ind.Spec, dtype: torch.dtype, layout: Layout
) -> None:
    for i, shape in enumerate(SHAPES):
        x = layout(normal(shape, dtype, seed=i))
        before, transpose = ind.bits(x), x.dim() >= 2
        check(mixprec.quantize(x, spec.dtype), x, spec, current_scale(x, spec))
        q = mixprec.quantize(x, spec.dtype, scale=37.0, transpose=transpose)
        check(q, x, spec, 37.0, transpose)
        assert np.array_equal(ind.bits(x), before), "quantize wrote to its input"


@for_each("dtype", WIDE)
@for_each("spec", ind.SPECS)
def test_large(poisoned: None, two_threads: None, spec: ind.Spec, dtype: torch.dtype) -> None:
    x = random_bits(521 * 523, dtype).view(521, 523)
    for y in (x, x.t(), x[:, 5:520], normal((521, 523), dtype)):
        want = current_scale(y, spec)
        check(mixprec.quantize(y, spec.dtype, transpose=True), y, spec, want, True)
    flat = normal(LARGE[1], dtype)
    first, again = (mixprec.quantize(flat, spec.dtype, scale=2.0) for _ in range(2))
    check(first, flat, spec, 2.0)
    ind.assert_same_bits(first.data, again.data, "second run")


@for_each("transpose", [False, True])
@for_each("at", [0, 1, 62, 63, 64 * 65 - 1, 2080])
def test_amax_reads_every_element_whatever_the_scale(
    backend: str, at: int, transpose: bool
) -> None:
    x = normal((64, 65), torch.float32)
    x.view(-1)[at] = -77.0
    for y in (x, transposed(x), x[:, :64] if at % 65 < 64 else x[:, 1:]):
        for scale in (None, 1e-20):
            assert mixprec.quantize(y, "e5m2", scale, transpose).amax.item() == 77.0


LARGEST = (3e38, 3.4028234663852886e38, math.inf, math.nan)


@for_each("power_of_two", [True, False])
@for_each("value", [0.0, 2.0**-149, 2.0**-126, 1e-38, 1e-30, 0.1, 1.0, 448.0, 449.0, *LARGEST])
@for_each("spec", ind.SPECS)
def test_scale_edges(backend: str, spec: ind.Spec, value: float, power_of_two: bool) -> None:
    x = torch.tensor([[0.0, -value], [value / 3, 0.0]])
    want = current_scale(x, spec, power_of_two=power_of_two)
    q = mixprec.quantize(x, spec.dtype, transpose=True, power_of_two_scale=power_of_two)
    check(q, x, spec, want, True)
    if value == 0:
        assert (mixprec.dequantize(q) == 0).all(), "zeros must not become 0 * Inf"


def test_scale_as_number_and_as_tensor_agree(backend: str) -> None:
    x = normal((5, 7), torch.float32)
    for scale in (12.5, torch.tensor(12.5), torch.tensor([12.5])):
        check(mixprec.quantize(x, "e4m3", scale), x, ind.E4M3, 12.5)


@for_each("zero", [0.0, -0.0])
@for_each("spec", ind.SPECS)
def test_a_scale_that_holds_0_is_not_initialised(backend: str, spec: ind.Spec, zero: float) -> None:
    inputs = [normal((5, 7), torch.float32), torch.zeros(3, 2), torch.ones(0, 4)]
    inputs.append(torch.tensor([[1.0, math.inf], [2.0, 3.0]]))
    for x in inputs:
        for shape in ((), (1,)):
            for power_of_two in (True, False):
                given = torch.full(shape, zero)
                q = mixprec.quantize(x, spec.dtype, given, True, power_of_two_scale=power_of_two)
                check(q, x, spec, current_scale(x, spec, power_of_two=power_of_two), True)
                assert given.item() == 0, "quantize wrote to the scale"
    assert torch.copysign(torch.ones(()), given).item() == math.copysign(1, zero)


def test_one_compiled_function_reads_the_scale_of_each_call(
    backend: str, fresh_compiler: None
) -> None:
    def step(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = mixprec.quantize(x, "e4m3", scale)
        return q.scale_inv, mixprec.dequantize(q)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    x, scale = torch.full((3, 4), 7.0), torch.zeros(())
    assert compiled(x, scale)[0].item() == 2.0**-6  # not initialised: 448 / 7 = 64
    assert compiled(x, scale.fill_(2.0))[0].item() == 0.5
    assert torch.equal(compiled(x, scale)[1], x)
    assert compiled(x, scale.fill_(-2.0))[1].isnan().all(), "the sign is lost"


@for_each("fmt", ["e4m3", "e5m2", "bf16"])
@for_each("scale", [-2.0, math.inf, -math.inf, math.nan, 2.0**127, 2.0**-127])
def test_a_scale_out_of_range_is_nan_everywhere(backend: str, scale: float, fmt: str) -> None:
    """Nobody may read the scale before the kernel does."""
    x = torch.tensor([[1.0, -2.0], [0.0, 448.0]])
    given = torch.tensor(scale)
    data, data_t, scale_inv, _, amax = torch.ops.mixprec.quantize(
        x, mixprec.formats.parse(fmt).dtype, given, True, "tensor", True
    )
    assert data.float().isnan().all()
    assert data_t.float().isnan().all()
    assert scale_inv.isnan()
    assert amax == 448.0
