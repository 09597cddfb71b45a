"""quantize_mx and dequantize_mx, bit for bit the references."""

from __future__ import annotations

import math

import pytest
import torch
from cases import LAYOUTS, WIDE, Layout, name, normal, random_bits
from emulated.agreement import Agreement

from mixprec.ops._reference.block_formats import BLOCK_FORMATS, SCALE_MODES, sizes

# Around runs of 16, blocks, and tiles.
SHAPES = ((), (0,), (0, 5), (5, 0), (1,), (17,), (1, 33), (33, 1), (2, 3, 47), (64, 64), (65, 129))
LARGE = ((131, 656), (130, 272))
SEED = torch.tensor([2**40 + 7])

every_dtype = pytest.mark.parametrize("dtype", WIDE, ids=name)
every_format = pytest.mark.parametrize("fmt", BLOCK_FORMATS)


def modes(fmt: str) -> tuple[str, ...]:
    return ("rceil",) if BLOCK_FORMATS[fmt].nvfp4 else SCALE_MODES


def round_trip(agree: Agreement, x: torch.Tensor, fmt: str, i: int, out: torch.dtype) -> None:
    """Both ways in; back from the results of the reference."""
    for j, mode in enumerate(agree.some(modes(fmt), i)):
        seed = SEED + i if (i + j) % 3 == 0 else None
        x, *_ = agree("quantize_mx", [x, fmt, mode, x.dim() > 1 and i % 4 < 3, seed])
    data, _, scale_inv, _, tensor_inv, _ = agree.want("quantize_mx")(x, fmt, mode, False, None)
    tensor = tensor_inv if BLOCK_FORMATS[fmt].nvfp4 and i % 2 else None
    agree("dequantize_mx", [data, scale_inv, tensor, fmt, x.shape[-1] if x.dim() else 1, out])


@every_format
@every_dtype
def test_mx_shapes(agree: Agreement, dtype: torch.dtype, fmt: str) -> None:
    first = list(BLOCK_FORMATS).index(fmt) + WIDE.index(dtype)
    for i, shape in enumerate(agree.affordable((*SHAPES, *LARGE)), start=first):
        x = normal(shape, dtype, seed=i)
        if x.dim():
            x = x * torch.logspace(-9, 9, shape[-1], base=2).to(dtype)
        round_trip(agree, x, fmt, i, WIDE[i % 3])


@every_format
@every_dtype
def test_mx_of_every_kind_of_number(agree: Agreement, dtype: torch.dtype, fmt: str) -> None:
    """Any bits, mostly blocks with NaN; blocks of one binade; the largest and the least; zeros."""
    bad = random_bits(96 * 80, dtype).view(96, 80)
    finite = torch.where(bad.isfinite(), bad, 0)
    limits = torch.finfo(dtype)
    special = finite.flatten().sort().values.view(96, 80).clone()
    special[:5], special[5:40, :40] = limits.smallest_normal / 4, -0.0
    special[60, 3], special[61, 40], special[70, 79] = math.nan, -math.inf, limits.max
    for i, x in enumerate((bad, finite, special, finite * 0, finite.clamp(-1, 1) * 1e-3)):
        for seed in agree.some((None, SEED), i):
            for mode in agree.some(modes(fmt), i):
                agree("quantize_mx", [x, fmt, mode, True, seed])


@every_format
def test_mx_ties_and_their_neighbours(agree: Agreement, fmt: str) -> None:
    """Of every element, in blocks whose scale is 1 or, of nvfp4, 448; and so are amaxes around
    every boundary of the scales."""
    element = BLOCK_FORMATS[fmt].element
    codes = torch.arange(1 << element.bits).to(torch.uint8)
    values = codes.view(element.dtype).float() if element.bits == 8 else None
    if values is None:
        steps = torch.arange(0.0, 2 * element.max / element.smallest_subnormal)
        values = steps * element.smallest_subnormal / 2
    values = values[values.isfinite()].abs().clamp(max=element.max).unique()
    ties = (values[1:] + values[:-1]) / 2
    up = torch.nextafter(ties, torch.tensor(math.inf))
    near = torch.cat([ties, up, torch.nextafter(ties, torch.tensor(0.0)), values])
    rows = torch.cat([near, -near])
    block = BLOCK_FORMATS[fmt].block
    padded = torch.nn.functional.pad(rows, (0, -rows.numel() % (block - 1))).view(-1, block - 1)
    x = torch.nn.functional.pad(padded, (1, 0), value=element.max)
    agree("quantize_mx", [x, fmt, "rceil", False, None])
    amaxes = torch.cat([near, near * 2.0**-130, near * 2.0**110])
    scales = torch.nn.functional.pad(amaxes, (0, -amaxes.numel() % 4)).view(-1, 4)
    for mode in modes(fmt):
        one_a_block = torch.nn.functional.pad(scales[..., None], (0, block - 1)).flatten(1)
        agree("quantize_mx", [one_a_block, fmt, mode, False, None])


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_mx_layouts(agree: Agreement, layout: Layout) -> None:
    for fmt in agree.some(tuple(BLOCK_FORMATS), LAYOUTS.index(layout)):
        x = layout(normal((37, 70), torch.bfloat16))
        agree("quantize_mx", [x, fmt, "rceil", True, None])
        data, _, scale_inv, *_ = agree.want("quantize_mx")(x, fmt, "rceil", False, None)
        stored = layout(data.view(torch.uint8)).view(data.dtype)
        agree("dequantize_mx", [stored, scale_inv, None, fmt, 70, torch.bfloat16])


@every_format
def test_mx_of_every_code_and_scale(agree: Agreement, fmt: str) -> None:
    """256 rows with every scale, each with all codes; sizes that are no multiple of a run."""
    block, columns = BLOCK_FORMATS[fmt], 512 if BLOCK_FORMATS[fmt].element.bits == 4 else 256
    for i, k in enumerate((columns, columns - 1)):
        size, across = sizes(fmt, k)
        data = torch.arange(size).to(torch.uint8).repeat(256, 1).view(block.element.dtype)
        scale_inv = (torch.arange(256)[:, None] + torch.arange(across) * 37).to(torch.uint8)
        rows = slice(None, None, 1 if agree.most > 1 << 16 else 5)
        for out in agree.some(WIDE, i):
            for tensor in (None, torch.tensor(0.37)) if block.nvfp4 else (None,):
                scales = scale_inv.view(torch.float8_e4m3fn) if block.nvfp4 else scale_inv
                agree("dequantize_mx", [data[rows], scales[rows], tensor, fmt, k, out])
