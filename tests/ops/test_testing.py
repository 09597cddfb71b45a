"""mixprec.testing: tolerance, assert_close, sqnr."""

from __future__ import annotations

import math

import pytest
import torch
from cases import FP8, WIDE, for_each, normal
from hypothesis import given
from hypothesis import strategies as st

import mixprec
from mixprec.testing import assert_close, sqnr, tolerance


def in_order(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a @ b, one product after the other into an accumulator of `dtype`: the worst usual order."""
    acc = torch.zeros(a.shape[0], b.shape[1], dtype=dtype)
    for k in range(a.shape[1]):
        acc += (a[:, k : k + 1].float() * b[k : k + 1].float()).to(dtype)
    return acc.float()


@for_each("draw", [torch.randn, torch.rand])
@for_each("out_dtype", WIDE)
@for_each("k", [1, 2, 17, 1024])
def test_fp32_accumulation_passes_and_16_bit_accumulation_fails(
    k: int, out_dtype: torch.dtype, draw: object
) -> None:
    a, b = draw(16, k).bfloat16(), draw(k, 16).bfloat16()
    exact = a.double() @ b.double()
    bound = tolerance(exact, a, b, out_dtype)
    assert (bound.dtype, bound.shape) == (torch.float64, (16, 16))
    assert_close(in_order(a, b, torch.float32).to(out_dtype), exact, bound)
    if out_dtype == torch.float32 and k > 1:
        with pytest.raises(AssertionError, match="exceed the bound"):
            assert_close(in_order(a, b, torch.float16), exact, bound)


def test_the_bound_of_fp8_tensor_cores_holds_and_no_smaller_one_would() -> None:
    """As they compute: random, one-signed and subnormal operands, and what loses most."""
    e4m3, e5m2 = FP8
    for i, (left, right) in enumerate(((e4m3, e4m3), (e4m3, e5m2), (e5m2, e5m2))):
        for size in (1.0, 2.0**-9):
            a, b = (normal(shape, torch.float32, i) * size for shape in ((9, 300), (300, 7)))
            for x, y in ((a.to(left), b.to(right)), (a.abs().to(left), b.abs().to(right))):
                exact = x.double() @ y.double()
                bound = tolerance(exact, x, y, torch.float32, fp8_tensor_core=True)
                for arch in ("ada", "hopper"):
                    with mixprec.simulate(arch):
                        got = mixprec.gemm(x, y, out_dtype=torch.float32)
                    assert_close(got, exact, bound)
    a, b = torch.full((1, 128), 1.875 * 2.0**-6), torch.full((128, 1), 2.0**-8)
    a[0, 0], b[0, 0] = 1.0, 1.0
    a, b = a.to(e4m3), b.to(e4m3)
    exact = a.double() @ b.double()
    with mixprec.simulate("hopper"):
        got = mixprec.gemm(a, b, out_dtype=torch.float32)
    assert got.item() == 1.0
    bound = tolerance(exact, a, b, torch.float32, fp8_tensor_core=True)
    assert_close(got, exact, bound)
    assert 4 * (exact - got).item() > 0.4 * bound.item()
    with pytest.raises(AssertionError, match="exceed the bound"):
        assert_close(got, exact, tolerance(exact, a, b, torch.float32) + 2.0**-12 * exact)
    with pytest.raises(ValueError, match=r"^tolerance: b must be FP8 with fp8_tensor_core, got"):
        tolerance(exact, a, b.half(), torch.float32, fp8_tensor_core=True)


@for_each(
    "actual, expected, match",
    [
        ([1.0, math.nan], [1.0, 2.0], r"NaN at different places: 1 of 2 elements\n  \[1\]:"),
        ([1.0, 2.0], [math.nan, 2.0], r"NaN at different places: 1 of 2"),
        ([math.inf, 2.0], [1.0, 2.0], r"\+Inf at different places"),
        ([math.inf, 2.0], [-math.inf, 2.0], r"\+Inf at different places"),
        ([3e38, 2.0], [-math.inf, 2.0], "-Inf at different places"),
        ([1.0, 2.5], [1.0, 2.0], r"1 of 2 elements exceed the bound; max error 0.5 \(5 x its"),
        ([1.0], [1.0, 2.0], r"shapes differ: actual \(1,\), expected \(2,\)"),
    ],
)
def test_differences_are_found_and_explained(
    actual: list[float], expected: list[float], match: str
) -> None:
    with pytest.raises(AssertionError, match=match):
        assert_close(torch.tensor(actual), torch.tensor(expected), 0.1)


def test_non_finite_values_in_the_same_places_are_close() -> None:
    values = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
    assert_close(values, values.double(), 0.0)
    with pytest.raises(AssertionError, match="1 of 4 elements exceed"):
        assert_close(values, torch.tensor([math.inf, -math.inf, math.nan, 2.0]), 0.5)
    # What fp16 cannot hold must have become Inf, although FP64 holds it.
    assert_close(torch.tensor([math.inf]).half(), torch.tensor([1e5]).double(), 1.0)
    with pytest.raises(AssertionError, match=r"\+Inf at different places"):
        assert_close(torch.tensor([65504.0]).half(), torch.tensor([1e5]).double(), 1e6)


def test_rms_sees_a_small_error_that_is_everywhere() -> None:
    """Truncation stays within one unit, like rounding, but is twice as far off on average."""
    exact = 1 + torch.rand(10_000, dtype=torch.float64)
    bound = 2.0**-7 * exact
    truncated = (exact.float().view(torch.int32) & -(1 << 16)).view(torch.float32)
    assert_close(exact.bfloat16(), exact, bound, rms=0.3 * 2.0**-7)
    assert_close(truncated, exact, bound)
    with pytest.raises(AssertionError, match=r"the rms error exceeds 0.00234; max error"):
        assert_close(truncated, exact, bound, rms=0.3 * 2.0**-7)


@given(st.floats(0.5, 2.0), st.integers(-20, 20))
def test_sqnr_of_a_known_error_at_any_size(relative: float, exponent: int) -> None:
    ref = normal((64,), torch.float64) * 2.0**exponent
    assert sqnr(ref, ref * (1 + relative / 100)) == pytest.approx(40 - 20 * math.log10(relative))


def test_sqnr_edges() -> None:
    x = normal((8,), torch.float32)
    assert sqnr(x, x) == math.inf
    assert sqnr(x, torch.zeros(8)) == pytest.approx(0)
    assert sqnr(torch.zeros(8), x) == -math.inf
    assert math.isnan(sqnr(x, torch.full((8,), math.nan)))
    assert not sqnr(x, torch.full((8,), math.inf)) >= 18  # an overflow passes no bar
    with pytest.raises(ValueError, match=r"sqnr: ref and x must have one shape, got \(8,\)"):
        sqnr(x, x[:4])
