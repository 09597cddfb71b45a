"""quantize_nf4 and dequantize_nf4: what bitsandbytes 0.50.2 made of the same weights."""

from __future__ import annotations

import math

import independent as ind
import numpy as np
import pytest
import torch
from cases import LAYOUTS, WIDE, Layout, for_each, name, normal, random_bits
from emulated.agreement import Agreement
from nf4_cases import CASES, FILE, raw

from mixprec.ops._dispatch.op import OPS
from mixprec.ops.nf4 import VALUES, Nf4, dequantize_nf4, dynamic_map, nf4_sizes, quantize_nf4

MEASURED = np.load(FILE)


@pytest.mark.parametrize("case", CASES)
def test_bits_of_bitsandbytes(backend: str, case: str) -> None:
    w = CASES[case]
    q = quantize_nf4(w)
    decoded = dequantize_nf4(q, w.shape, w.dtype)
    assert (decoded.shape, decoded.dtype) == (w.shape, w.dtype)
    for part, got in {**q._asdict(), "decoded": decoded}.items():
        np.testing.assert_array_equal(raw(got), MEASURED[f"{case}/{part}"], f"{case}: {part}")


def test_by_hand(backend: str) -> None:
    w = torch.tensor([[2.0, -2.0, 0.0, 0.25, 1.0]])
    codes, absmax, *nothing = quantize_nf4(w, double_quant=False)
    # 0.125 is nearer to 0.1609 than to 0.0796; 0.5 to 0.4407 than to 0.5626; 7 stands for 0
    assert codes.tolist() == [0xF0, 0x79, 0xC7]
    assert (absmax.tolist(), nothing) == ([2.0], [None, None])
    back = dequantize_nf4(Nf4(codes, absmax, None, None), w.shape)
    assert back[0].tolist() == pytest.approx([2 * VALUES[i] for i in (15, 0, 7, 9, 12)], rel=1e-7)

    scales = quantize_nf4(torch.tensor([[1.0] * 64 + [0.5] * 64]))
    assert scales.offset == 0.75
    assert (scales.nested_absmax.tolist(), scales.absmax.tolist()) == ([0.25], [255, 0])
    assert dynamic_map()[0] == pytest.approx(-0.99297, abs=1e-5)  # the map has no -1
    want = torch.tensor([1.0] * 64 + [0.75 - 0.25 * 0.99297] * 64)
    torch.testing.assert_close(dequantize_nf4(scales, (128,)), want, rtol=0, atol=1e-5)


def test_maps() -> None:
    values = dynamic_map()
    assert len(values) == 256
    assert list(values) == sorted(set(values))
    assert (values[127], values[-1]) == (0.0, 1.0)
    assert [-x for x in reversed(values[:127])] == list(values[128:255])
    assert values[128] == pytest.approx(0.55e-6)
    assert values[254] == pytest.approx(1 - 0.9 / 128)
    # Quantiles of the normal distribution (QLoRA, appendix E), for 1 - 0.9677083 in each tail.
    normal_of = torch.distributions.Normal(0.0, 1.0).icdf
    positive = normal_of(torch.linspace(0.9677083, 0.5, 9, dtype=torch.float64)[:-1])
    negative = -normal_of(torch.linspace(0.9677083, 0.5, 8, dtype=torch.float64)[:-1])
    found = torch.cat([positive, torch.zeros(1), negative]).sort().values
    want = torch.tensor(VALUES, dtype=torch.float64)
    torch.testing.assert_close(found / found.max(), want, rtol=0, atol=1e-6)


@pytest.fixture
def agree(poisoned: None, two_threads: None) -> Agreement:
    return Agreement(lambda op: OPS[op].handle("cpp"))


@for_each("dtype", WIDE)
def test_kernels_agree(agree: Agreement, dtype: torch.dtype) -> None:
    """Any bits, NaN included; blocks, pieces of 16,384 elements and their ends; any scales."""
    shapes = ((0,), (1,), (63,), (64,), (65,), (3, 127), (257, 64), (16385,), (32767,))
    for i, shape in enumerate(shapes):
        n = torch.Size(shape).numel()
        bits = random_bits(n, dtype, seed=i).view(shape)
        for w in (normal(shape, dtype, seed=i), bits, bits.masked_fill(~bits.isfinite(), 0.0)):
            agree("quantize_nf4", [w])
        size, blocks, nested = nf4_sizes(n)
        codes = random_bits(size, torch.uint8, seed=i)
        absmax = random_bits(blocks, torch.float32, seed=i)
        agree("dequantize_nf4", [codes, absmax, None, None, list(shape), dtype])
        of_scales = random_bits(blocks, torch.uint8, seed=i)
        outer = normal((nested,), torch.float32, seed=i)
        args = [codes, of_scales, outer, torch.tensor(0.3), list(shape), dtype]
        agree("dequantize_nf4", args)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_layouts(agree: Agreement, layout: Layout) -> None:
    agree("quantize_nf4", [layout(normal((13, 37), torch.bfloat16))])


def test_what_is_refused() -> None:
    for bad in (math.nan, math.inf):
        w = torch.ones(3, 64)
        w[1, 5] = bad
        for double_quant in (True, False):
            with pytest.raises(ValueError, match="w must be finite, got Inf or NaN"):
                quantize_nf4(w, double_quant)
    large = torch.full((4, 64), 3e38)
    with pytest.raises(ValueError, match="overflows FP32, which double_quant=False does not need"):
        quantize_nf4(large)
    q = quantize_nf4(large, double_quant=False)
    assert torch.equal(dequantize_nf4(q, (4, 64)), large)
    assert [t.numel() for t in quantize_nf4(torch.ones(0, 5))] == [0, 0, 0, 1]
    assert dequantize_nf4(quantize_nf4(torch.ones(0, 5)), (0, 5)).shape == (0, 5)


@for_each(
    "changes, shape, message",
    [
        ({}, (5, 64), r"codes must have shape .*\(5, 64\) = \(160,\), got \(128,\)"),
        ({}, (-4, 64), "shape must have no negative size"),
        ({"absmax": torch.ones(4)}, (4, 64), "absmax must have dtype uint8, got torch.float32"),
        ({"absmax": torch.ones(5).byte()}, (4, 64), r"absmax must have shape .* got \(5,\)"),
        ({"offset": None}, (4, 64), "nested_absmax and offset must be given both or not at all"),
        ({"offset": torch.ones(2)}, (4, 64), "offset must hold one float32"),
        ({"nested_absmax": torch.ones(2)}, (4, 64), r"nested_absmax must have shape .* \(1,\)"),
        ({"codes": torch.ones(128)}, (4, 64), "codes must have dtype uint8"),
    ],
)
def test_wrong_arguments(
    backend: str, changes: dict[str, torch.Tensor | None], shape: tuple[int, ...], message: str
) -> None:
    q = quantize_nf4(torch.ones(4, 64))
    with pytest.raises(ValueError, match=message):
        dequantize_nf4(q._replace(**changes), shape)
    with pytest.raises(ValueError, match="dtype must be float32, bfloat16 or float16"):
        dequantize_nf4(q, (4, 64), torch.float64)


def test_bits_an_element() -> None:
    w = normal((256, 512), torch.float32)
    for double_quant, bits, sqnr in ((True, 4.127, 20.4), (False, 4.5, 20.4)):
        q = quantize_nf4(w, double_quant)
        stored = 8 * sum(t.nbytes for t in q if t is not None) / w.numel()
        assert stored == pytest.approx(bits, abs=5e-4)
        noise = dequantize_nf4(q, w.shape) - w
        assert 10 * torch.log10(w.square().mean() / noise.square().mean()) > sqnr
    ind.assert_same_bits(dequantize_nf4(q, w.shape, torch.bfloat16),
                         dequantize_nf4(q, w.shape).bfloat16())  # fmt: skip
