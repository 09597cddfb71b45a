"""amax, quantize and dequantize, bit for bit the references."""

from __future__ import annotations

import itertools
import math

import independent as ind
import numpy as np
import pytest
import torch
from cases import FP8, LAYOUTS, SHAPES, WIDE, Layout, from_bits, name, normal, random_bits
from emulated.agreement import Agreement

INF, NAN = math.inf, math.nan
LOW = (*FP8, torch.float16, torch.bfloat16)
# Around the blocks of Triton's kernels, the chunks of ours, and the tiles of both.
LENGTHS = ((4096,), (4097,), (8191,), (8193,), (32767,), (32768,), (32769,), (98309,), (300_001,))
TILED = ((65, 129), (131, 1), (130, 140), (130, 272), (257, 129), (133, 517), (517, 1031))
BLOCKS = ("row", "block1x128", "block128x128")
# A row takes a block of threads, or a warp if it is short.
BLOCKED = ((9,), (5, 0), (3, 2049), (3, 9000), (11, 1040), (256, 4096), *TILED)

every_dtype = pytest.mark.parametrize("dtype", WIDE, ids=name)
every_low = pytest.mark.parametrize("low", LOW, ids=name)
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=name)


def f32(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


@every_layout
@every_dtype
def test_amax_and_quantize(agree: Agreement, dtype: torch.dtype, layout: Layout) -> None:
    turn = LAYOUTS.index(layout)
    few = SHAPES if agree.quick else SHAPES[turn % 2 :: 2]
    shapes = agree.affordable((*few, *LENGTHS, (9, 70), (16, 16), *TILED))
    for i, shape in enumerate(shapes, start=turn):
        x, matrix = layout(normal(shape, dtype, seed=i)), len(shape) > 1
        agree("amax", [x])
        for low in agree.some(LOW, i) if math.prod(shape) < 1 << 15 else (LOW[i % len(LOW)],):
            for scale, transpose in ((None, i % 2 == 0), (f32(3.7), i % 2 == 1), (f32(0.0), True)):
                args = [x, low, scale, matrix and transpose, "tensor", i % 3 > 0]
                agree("quantize", args)


@every_dtype
def test_amax_of_one_large_or_bad_element_anywhere(agree: Agreement, dtype: torch.dtype) -> None:
    sizes = (1, 4096, 4099, *(n for (n,) in agree.affordable(((98309,),))))
    places = itertools.product(sizes, (-100.0, INF, -INF, NAN), (0, 0.5, 1))
    for size, value, at in places:
        x = normal((size,), dtype)
        x[int(at * (size - 1))] = value
        agree("amax", [x])
    x[3] = INF  # and the last one is NaN
    agree("amax", [x])
    for code in random_bits(40, dtype):
        agree("amax", [code])


@every_low
@every_dtype
def test_quantize_of_every_kind_of_number(
    agree: Agreement, dtype: torch.dtype, low: torch.dtype
) -> None:
    """All codes of 16 bits; 2^16 of FP32, of which the C++ casts see all 2^32. A given scale that
    is out of range gives NaN."""
    every = random_bits(1 << 16, dtype)
    if dtype.itemsize == 2:
        every = from_bits(np.arange(1 << 16, dtype=np.uint16), dtype)
    for scale in (1.0, 3.7, 2.0**-20, 2.0**-10, 2.0**20, 2.0**120):
        agree("quantize", [every, low, f32(scale), False, "tensor", True])
    finite = torch.where(every.isfinite(), every, 0)
    for power_of_two in (False, True):
        agree("quantize", [finite.view(256, 256), low, None, True, "tensor", power_of_two])
    awkward = torch.tensor([[0.0, -0.0, 1.0], [-1.0, 1e-45, 3e38], [INF, -INF, NAN]]).to(dtype)
    scales = (0.0, -0.0, -2.0, INF, -INF, NAN, 1e-45, 2.0**-127, 2.0**127, 3e38)
    for x, scale, t in itertools.product((awkward, awkward[:1]), scales, (False, True)):
        agree("quantize", [x, low, f32(scale), t, "tensor", True])


@pytest.mark.parametrize("spec", ind.SPECS, ids=name)
def test_quantize_ties_and_their_neighbours(agree: Agreement, spec: ind.Spec) -> None:
    """And what is next to each code, the limits of FP32, and products that are near them."""
    codes = ind.decode_table(spec)[: spec.max_code + 1]
    points = [*ind.midpoints(spec), *codes, 1e-45, 2.0**-126, 3.4028234663852886e38, INF]
    for scale in (1.0, 2.0**-10, 3.0, 0.1, 2.0**126, 2.0**-126, 1e30, 1e-30):
        with np.errstate(over="ignore"):
            exact = (np.array(points) / scale).astype(np.float32)
            near = [exact, *(np.nextafter(exact, np.float32(to)) for to in (0, INF))]
        x = torch.from_numpy(np.concatenate([*near, *(-n for n in near)]))
        agree("quantize", [x, spec.dtype, f32(scale), False, "tensor", True])


@pytest.mark.parametrize("low", FP8, ids=name)
def test_quantize_with_current_scaling(agree: Agreement, low: torch.dtype) -> None:
    """Whatever the amax is, and wherever."""
    amaxes = (0.0, 1e-45, 1e-38, 2.0**-118, 1.0, 3.0, 448.0, 449.0, 3.4e38, INF, NAN)
    cases = itertools.product(amaxes, (False, True), (False, True))
    for i, (amax, power_of_two, transpose) in enumerate(cases):
        x = normal((9, 70), torch.float32).clamp(-1, 1) * (amax if math.isfinite(amax) else 1)
        x.view(-1)[-1 - 83 * i % 630] = -amax
        agree("quantize", [x, low, None, transpose, "tensor", power_of_two])


@pytest.mark.parametrize("granularity", BLOCKS)
@every_dtype
def test_quantize_by_blocks(agree: Agreement, dtype: torch.dtype, granularity: str) -> None:
    """Magnitudes that differ between blocks, any bits, and finite ones with blocks of zeros."""
    shapes = agree.affordable((*SHAPES, *BLOCKED))
    if agree.most < LENGTHS[-2][0]:  # a row takes the interpreter 3 ms
        rows = [math.prod(shape[:-1]) for shape in shapes]
        shapes = [s for s, n in zip(shapes, rows, strict=True) if n < 300][WIDE.index(dtype) :: 3]
    for i, shape in enumerate(shapes):
        x, bits = normal(shape, dtype, seed=i), random_bits(math.prod(shape), dtype, seed=i)
        if x.dim():
            x = x * torch.logspace(-9, 9, shape[-1], base=2).to(dtype)
        finite = torch.where(bits.isfinite(), bits, 0).view(shape)
        if x.dim() == 2:
            finite[:, 5:6] = finite[7:8] = finite[:128, :128] = 0
        kinds = agree.some((x, bits.view(shape), finite), i + WIDE.index(dtype))
        for values, low in itertools.product(kinds, agree.some(FP8, i)):
            for transpose in agree.some((False, True), i // 2) if x.dim() > 1 else (False,):
                agree("quantize", [values, low, None, transpose, granularity, i % 2 == 0])


@every_layout
def test_quantize_by_blocks_of_any_layout(agree: Agreement, layout: Layout) -> None:
    for shape, granularity in itertools.product(((130, 272), (65, 129)), BLOCKS):
        x = layout(normal(shape, torch.bfloat16))
        agree("quantize", [x, torch.float8_e4m3fn, None, True, granularity, True])


@every_layout
@every_low
def test_dequantize(agree: Agreement, low: torch.dtype, layout: Layout) -> None:
    shapes = agree.affordable((*SHAPES, *LENGTHS))
    for i, shape in enumerate(shapes, start=LAYOUTS.index(layout)):
        x = layout(normal(shape, torch.float32, seed=i).to(low))
        for out in agree.some(WIDE, i):
            agree("dequantize", [x, f32(0.3), out])


@every_low
def test_dequantize_of_every_code(agree: Agreement, low: torch.dtype) -> None:
    width = np.uint8 if low in FP8 else np.uint16
    codes = from_bits(np.arange(np.iinfo(width).max + 1, dtype=width), low)
    for scale_inv, out in itertools.product((1.0, 0.37, 2.0**-126, 2.0**100), WIDE):
        agree("dequantize", [codes, f32(scale_inv), out])


@every_low
def test_dequantize_by_blocks(agree: Agreement, low: torch.dtype) -> None:
    """Scales per row and chunk, row and block, block; in rows and in columns."""
    few = ((1, 1), (0, 5), (5, 0), (300,), (2, 3, 40), (130, 257), (3, 2049))
    for i, shape in enumerate(agree.affordable((*few, *TILED))):
        data = LAYOUTS[i % len(LAYOUTS)](normal(shape, torch.float32).to(low))
        rows, cols = math.prod(shape[:-1]), shape[-1]
        across = -(-cols // 128)
        for scales in ((rows, 1), (rows, across), (-(-rows // 128), across)):
            scale_inv = normal(scales, torch.float32)
            for out in agree.some(WIDE, cols):
                agree("dequantize", [data, scale_inv, out])
                agree("dequantize", [data, scale_inv.t().contiguous().t(), out])
