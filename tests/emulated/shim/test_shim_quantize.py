"""quantize and dequantize of csrc/cuda on the CPU, bit for bit the references."""

from __future__ import annotations

import independent as ind
import pytest
import torch
from cases import FP8, WIDE, name, normal, random_bits
from emulated.ops import reference
from emulated.shim import runner
from emulated.shim.helpers import CHUNK, LONG, SIZES, at_offset

from mixprec.ops._dispatch import scale_layout

LOW = (*FP8, torch.float16, torch.bfloat16)
SHAPES = (
    (0, 5), (5, 0), (1, 1), (1, 129), (131, 1), (7, 13), (16, 16), (64, 64), (63, 65), (128, 128),
    (2, 3, 48), (130, 272), (257, 129),
)  # fmt: skip
PARTS = ("data", "data_t", "scale_inv", "scale_inv_t", "amax")
BLOCKS = ("row", "block1x128", "block128x128")


def check_quantize(
    x: torch.Tensor, dtype: torch.dtype, scale: float | None, transpose: bool, offset: int = 0,
    power_of_two_scale: bool = True, granularity: str = "tensor", sms: int = 2,
) -> None:  # fmt: skip
    given = None if scale is None else torch.tensor(scale)
    args = (x, dtype, given, transpose, granularity, power_of_two_scale)
    got, want = runner.quantize(*args, offset=offset, sms=sms), reference("quantize")(*args)
    for part, one, two in zip(PARTS, got, want, strict=True):
        ind.assert_same_bits(one, two, f"{part} of {tuple(x.shape)} by {granularity}")


@pytest.mark.parametrize("dtype", LOW, ids=name)
@pytest.mark.parametrize("x_dtype", WIDE, ids=name)
def test_quantize(x_dtype: torch.dtype, dtype: torch.dtype) -> None:
    for i, shape in enumerate(SHAPES):
        x = normal(shape, x_dtype, seed=i)
        for transpose in (False, True):
            check_quantize(x, dtype, None, transpose)
            check_quantize(x, dtype, 3.0, transpose)
            check_quantize(x, dtype, 0.0, transpose)  # not initialised
        # Input and output on boundaries or not, each on its own.
        check_quantize(at_offset(x, 1), dtype, 0.5, i % 2 == 0)
        check_quantize(x, dtype, None, i % 2 == 1, offset=1, power_of_two_scale=False)
    for n in (CHUNK + 1, LONG):  # several turns of each block
        check_quantize(at_offset(normal((n,), x_dtype), 2), dtype, None, False)


@pytest.mark.parametrize("dtype", LOW, ids=name)
@pytest.mark.parametrize("x_dtype", WIDE, ids=name)
def test_quantize_of_any_bits(x_dtype: torch.dtype, dtype: torch.dtype) -> None:
    every = random_bits(1 << 14, x_dtype).view(128, 128)
    finite = torch.where(every.isfinite(), every, torch.zeros((), dtype=x_dtype))
    for scale in (None, 1.0, 2.0**-20, 2.0**100):
        check_quantize(every, dtype, scale, True)
        check_quantize(finite, dtype, scale, False)


# Long rows take a block each, short ones a warp; several tiles in both directions.
BLOCK_SHAPES = (*SHAPES, (9,), (), (11, 1040), (3, 2049))


@pytest.mark.parametrize("granularity", BLOCKS)
@pytest.mark.parametrize("dtype", FP8, ids=name)
@pytest.mark.parametrize("x_dtype", WIDE, ids=name)
def test_quantize_by_blocks(x_dtype: torch.dtype, dtype: torch.dtype, granularity: str) -> None:
    for i, shape in enumerate(BLOCK_SHAPES):
        x = normal(shape, x_dtype, seed=i)
        if x.dim():
            x = x * torch.logspace(-9, 9, shape[-1], base=2).to(x_dtype)
        for transpose in (False, True) if x.dim() > 1 else (False,):
            check_quantize(x, dtype, None, transpose, granularity=granularity)
        moved, transpose = at_offset(x, 1), x.dim() > 1 and i % 2 == 0
        check_quantize(moved, dtype, None, transpose, 0, False, granularity, sms=1)
        check_quantize(x, dtype, None, x.dim() > 1, 1, i % 2 == 1, granularity)


@pytest.mark.parametrize("granularity", BLOCKS)
@pytest.mark.parametrize("x_dtype", WIDE, ids=name)
def test_quantize_by_blocks_of_any_bits(x_dtype: torch.dtype, granularity: str) -> None:
    every = random_bits(130 * 272, x_dtype).view(130, 272)
    finite = torch.where(every.isfinite(), every, torch.zeros((), dtype=x_dtype))
    finite[:, 5] = finite[7] = finite[:128, :128] = 0
    for x in (every, finite):
        for dtype in FP8:
            check_quantize(x, dtype, None, True, granularity=granularity)
            check_quantize(x, dtype, None, False, 0, False, granularity)


@pytest.mark.parametrize("dtype", WIDE, ids=name)
@pytest.mark.parametrize("data_dtype", LOW, ids=name)
def test_dequantize(data_dtype: torch.dtype, dtype: torch.dtype) -> None:
    for n in (*SIZES, LONG):
        data = random_bits(n, data_dtype, seed=n)
        for offset, out_offset in ((0, 0), (0, 1), (1, 1)):
            moved, scale_inv = at_offset(data, offset), torch.tensor(0.3)
            got = runner.dequantize(moved, scale_inv, dtype, offset=out_offset)
            ind.assert_same_bits(got, reference("dequantize")(data, scale_inv, dtype), f"of {n}")


@pytest.mark.parametrize("granularity", BLOCKS)
@pytest.mark.parametrize("dtype", WIDE, ids=name)
@pytest.mark.parametrize("data_dtype", LOW, ids=name)
def test_dequantize_by_blocks(
    data_dtype: torch.dtype, dtype: torch.dtype, granularity: str
) -> None:
    for i, shape in enumerate((*BLOCK_SHAPES, (257, 400))):
        data = normal(shape, torch.float32, seed=i).to(data_dtype)
        rows, cols = scale_layout.as_matrix(data.shape)
        scales = normal(scale_layout.scale_shape(granularity, rows, cols), torch.float32).abs()
        for offset, out_offset in ((0, 0), (0, 1), (1, 1)):
            for scale_inv in (scales, scales.t().contiguous().t()):
                got = runner.dequantize(
                    at_offset(data, offset), scale_inv, dtype, offset=out_offset
                )
                want = reference("dequantize")(data, scale_inv, dtype)
                ind.assert_same_bits(got, want, f"of {shape} by {granularity}")
