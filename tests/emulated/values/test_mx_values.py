"""quantize_mx and dequantize_mx, bit for bit the references."""

from __future__ import annotations

import math

import independent as ind
import numpy as np
import pytest
import torch
from cases import LAYOUTS, WIDE, Layout, name, normal, random_bits
from emulated.agreement import Agreement
from independent_mx import BLOCKS

from mixprec.ops._reference.block_formats import BLOCK_FORMATS, SCALE_MODES, sizes

# Around runs of 16, blocks, and tiles.
SHAPES = ((), (0,), (0, 5), (5, 0), (1,), (17,), (1, 33), (33, 1), (2, 3, 47), (64, 64), (65, 129))
LARGE = ((131, 656), (130, 272), (300, 70), (3, 40_001))
PLAIN = False, True  # scales in rows, with amax
SEED = torch.tensor([2**40 + 7])
SEEDS = (None, SEED, torch.tensor([0]), None, torch.tensor([2**63 - 1]))

every_dtype = pytest.mark.parametrize("dtype", WIDE, ids=name)
every_format = pytest.mark.parametrize("fmt", BLOCK_FORMATS)


def modes(fmt: str) -> tuple[str, ...]:
    return ("rceil",) if BLOCK_FORMATS[fmt].nvfp4 else SCALE_MODES


def round_trip(agree: Agreement, x: torch.Tensor, fmt: str, i: int, out: torch.dtype) -> None:
    """Both ways in; back from the results of the reference."""
    for j, mode in enumerate(agree.some(modes(fmt), i)):
        args = [x, fmt, mode, x.dim() > 1 and i % 4 < 3, SEEDS[(i + j) % 5]]
        args += [(i + j) % 2 == 0, (i + j) % 3 > 0]
        x, *_ = agree("quantize_mx", args)
    data, _, scale_inv, _, tensor_inv, _ = agree.want("quantize_mx")(
        x, fmt, mode, False, None, *PLAIN
    )
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
                agree("quantize_mx", [x, fmt, mode, True, seed, i % 2 == 0, True])
    for i, value in enumerate((1e-45, -1e-40, 2.0**-126, 448.0, limits.max, -limits.max)):
        x = torch.full((2, BLOCK_FORMATS[fmt].block + 3), value).to(dtype)  # the only one
        for seed in agree.some((None, SEED), i):
            agree("quantize_mx", [x, fmt, "rceil", True, seed, *PLAIN])


@every_format
def test_mx_ties_and_their_neighbours(agree: Agreement, fmt: str) -> None:
    """Of every element and at every scale (of nvfp4 with the scale 448 of the block); and so are
    amaxes around every boundary of the scales."""
    (element, block), pad = BLOCKS[fmt], torch.nn.functional.pad
    codes = ind.decode_table(element)[: element.max_code + 1]
    points = torch.from_numpy(np.concatenate([ind.midpoints(element)[:-1], codes]))
    exponents = range(-130, 128 - int(math.log2(element.max)))
    for exponent in (
        exponents if agree.quick else (*exponents[:5], *exponents[4::17], exponents[-1])
    ):
        exact = (points * 2.0**exponent).float()
        up, down = (torch.nextafter(exact, torch.tensor(to)) for to in (math.inf, 0.0))
        near = torch.cat([exact, up, down])
        rows = torch.cat([near, -near])
        padded = pad(rows, (0, -rows.numel() % (block - 1))).view(-1, block - 1)
        x = pad(padded, (1, 0), value=element.max * 2.0**exponent)
        agree("quantize_mx", [x, fmt, "rceil", False, None, *PLAIN])
        if not BLOCK_FORMATS[fmt].nvfp4:  # other powers of two give the same
            near = near[near.double() > element.max / 2 * 2.0**exponent]
        scales = pad(near, (0, -near.numel() % 4)).view(-1, 4)
        one_a_block = pad(scales[..., None], (0, block - 1)).flatten(1)
        for mode in modes(fmt):
            agree("quantize_mx", [one_a_block, fmt, mode, False, None, *PLAIN])
        if BLOCK_FORMATS[fmt].nvfp4:  # whose scales are rounded up then
            agree("quantize_mx", [one_a_block, fmt, "rceil", False, SEED, *PLAIN])
        agree("quantize_mx", [one_a_block[-1:, -block:], fmt, "rceil", False, None, *PLAIN])


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_mx_layouts(agree: Agreement, layout: Layout) -> None:
    for fmt in agree.some(tuple(BLOCK_FORMATS), LAYOUTS.index(layout)):
        x = layout(normal((37, 70), torch.bfloat16))
        agree("quantize_mx", [x, fmt, "rceil", True, None, True, True])
        data, _, scale_inv, *_ = agree.want("quantize_mx")(x, fmt, "rceil", False, None, *PLAIN)
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
            for given in (None, 0.37, 1.0, 3e-38, 2.0**-126, 1e36) if block.nvfp4 else (None,):
                tensor = None if given is None else torch.tensor(given)
                scales = scale_inv.view(torch.float8_e4m3fn) if block.nvfp4 else scale_inv
                agree("dequantize_mx", [data[rows], scales[rows], tensor, fmt, k, out])
