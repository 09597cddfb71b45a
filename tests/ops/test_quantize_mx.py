"""quantize_mx: block formats, MX and NVFP4, against the same rules in NumPy and other encoders."""

from __future__ import annotations

import itertools
import math

import independent as ind
import independent_mx as mx
import numpy as np
import pytest
import torch
from cases import LAYOUTS, SHAPES, WIDE, Layout, for_each, normal, random_bits

from mixprec.ops._reference.block_formats import BLOCK_FORMATS, SCALE_MODES, name_of, per_byte
from mixprec.ops.quantize_mx import quantize_mx_op as quantize_mx

INF, NAN = math.inf, math.nan
SMALL = [c for c in mx.CASES if c[1] == "rceil"]


def seed_of(value: int) -> torch.Tensor:
    return torch.tensor([value])


def codes(t: torch.Tensor) -> np.ndarray:
    return t.view(torch.uint8).numpy()


def expected(
    values: np.ndarray, fmt: str, mode: str, amax: float, seed: int | None, stream: int
) -> tuple[np.ndarray, np.ndarray, float | None]:
    random = None
    if seed is not None:
        size = mx.BLOCKS[fmt].size
        count = values.shape[0] * -(-values.shape[1] // size) * size
        random = ind.random16(count, seed, 0, 0, stream)
    return mx.quantize(values, fmt, mode, amax, random)


def check(
    x: torch.Tensor, fmt: str, mode: str, transpose: bool = False, seed: int | None = None
) -> tuple[torch.Tensor, ...]:
    """The op on x, after all results are found to be those of the NumPy rules."""
    what = f"{fmt} {mode} {x.dtype} {tuple(x.shape)} {seed}"
    given = None if seed is None else seed_of(seed)
    results = quantize_mx(x, fmt, mode, transpose, given)
    data, data_t, scale, scale_t, of_tensor, amax = results
    assert all(r.is_contiguous() for r in results)
    wide = ind.values(x)
    rows = wide.reshape(math.prod(x.shape[:-1]), x.shape[-1] if x.dim() else 1)
    assert ind.canonical(ind.bits(amax), torch.float32) == ind.canonical(
        np.float32(ind.amax(x)).view(np.uint32), torch.float32
    )
    pairs = [(rows, data.reshape(len(rows), -1) if rows.size else data, scale)]
    pairs += [(rows.T, data_t, scale_t)] if transpose else []
    for stream, (values, got, got_scale) in enumerate(pairs):
        want, want_scale, want_tensor = expected(values, fmt, mode, ind.amax(x), seed, stream)
        np.testing.assert_array_equal(codes(got_scale), want_scale, what)
        assert want_tensor is None or of_tensor.item() == want_tensor, what
        if rows.size:
            np.testing.assert_array_equal(codes(got), want, what)
    shape = x.shape if x.dim() == 0 else (*x.shape[:-1], -(-x.shape[-1] // per_byte(fmt)))
    assert data.shape == torch.Size(shape)
    if not transpose:
        assert (data_t.shape, scale_t.shape) == ((0, 0), (0,))
    elif rows.size == 0:
        assert data_t.shape == (rows.shape[1], -(-rows.shape[0] // per_byte(fmt)))
    assert of_tensor.shape == (() if fmt == "nvfp4" else (0,))
    return results


@for_each("fmt, mode", mx.CASES)
def test_shapes(backend: str, poisoned: None, two_threads: None, fmt: str, mode: str) -> None:
    """Empty, 0-dim, K below a block, odd K, more rows and columns than a tile."""
    turn = mx.CASES.index((fmt, mode))
    for i, shape in enumerate((*SHAPES[turn % 4 :: 4], ((300, 70), (2, 1057))[turn % 2])):
        x = normal(shape, WIDE[(i + turn) % 3], seed=i)
        if x.dim():
            x = x * torch.logspace(-9, 9, shape[-1], base=2).to(x.dtype)
        check(x, fmt, mode, transpose=len(shape) > 1)


@for_each("layout", LAYOUTS)
def test_layouts(backend: str, layout: Layout) -> None:
    for (fmt, mode), shape in zip(mx.CASES, itertools.cycle(((9, 70), (2, 3, 33), (65, 40)))):
        check(layout(normal(shape, torch.bfloat16)), fmt, mode, transpose=True)


def test_large(two_threads: None) -> None:
    for (fmt, mode), shape in zip(SMALL, itertools.cycle(((521, 523), (3, 40_001)))):
        check(normal(shape, torch.float32), fmt, mode, transpose=True)
        check(normal((300, 64), torch.float32), fmt, mode, True, seed=3 + 2**32)


@for_each("fmt, mode", mx.CASES)
def test_any_bits(backend: str, fmt: str, mode: str) -> None:
    """10^5 random patterns in blocks of similar exponents, with NaN and Inf in some."""
    pattern = random_bits(1 << 17, torch.float32, seed=len(fmt)).view(-1, 32)
    exponents = torch.randint(0, 256, (len(pattern), 1), generator=torch.Generator())
    spread = torch.randint(0, 12, pattern.shape, generator=torch.Generator())
    field = (exponents - spread).clamp(0, 255).int() << 23
    bits = (pattern.view(torch.int32) & ~0x7F800000) | field
    for values in (bits.view(torch.float32), pattern):
        check(values, fmt, mode)
        check(torch.where(values.isfinite(), values, 0.0).view(-1, 128), fmt, mode)


@for_each("fmt, mode", mx.CASES)
def test_ties_and_their_neighbours_at_every_scale(backend: str, fmt: str, mode: str) -> None:
    """All midpoints of two codes and the FP32 numbers beside them, in blocks with every X."""
    spec, size = mx.BLOCKS[fmt]
    ties = ind.midpoints(spec)[:-1]
    if fmt == "nvfp4":  # the scale of the first block is 448, so that 1 / S is its unit
        ties = np.append(ties, [spec.max])
    rows = -(-len(ties) // (size - 1))
    ties = np.resize(ties, (rows, size - 1))
    exponents = np.arange(-127, 128 - int(math.log2(spec.max)))[:, None, None]
    centre = np.ldexp(ties, exponents).astype(np.float32)
    for near in (
        centre,
        np.nextafter(centre, np.float32(0)),
        np.nextafter(centre, np.float32(INF)),
    ):
        largest = np.ldexp(spec.max, exponents).astype(np.float32).repeat(rows, 1)
        signs = np.resize(np.float32([1, -1, -1]), near.shape)
        x = torch.from_numpy(np.concatenate([largest, near * signs], -1))
        for part in x.view(-1, rows * size).split(16) if fmt == "nvfp4" else (x,):
            check(part.reshape(-1, size), fmt, mode)


@for_each("fmt, mode", mx.CASES)
def test_amax_at_the_boundaries_of_scales(backend: str, fmt: str, mode: str) -> None:
    """Every exponent, with the fractions at which one of the modes takes the next scale."""
    spec, size = mx.BLOCKS[fmt]
    fractions = {1.0, 2 - 2.0**-23, 2 * float(np.frexp(spec.max)[0])}
    fractions |= {2 - 2.0 ** -(p + 1) for p in range(5)}
    near = np.float32(sorted(fractions))
    near = np.concatenate([near, np.nextafter(near, np.float32(0)), np.nextafter(near, near + 1)])
    amax = np.ldexp(near.astype(np.float64), np.arange(-130, 128)[:, None]).ravel()
    amax = amax[amax <= np.finfo(np.float32).max].astype(np.float32)
    x = torch.zeros(len(amax), size)
    x[:, 3], x[:, 5] = torch.from_numpy(amax), torch.from_numpy(-amax) / 3
    check(x, fmt, mode)
    for i in range(0, len(amax), 999):
        check(x[i : i + 1], fmt, mode)  # which is the tensor's amax too


@for_each("fmt, mode", mx.CASES)
def test_special_values(backend: str, fmt: str, mode: str) -> None:
    size, largest = mx.BLOCKS[fmt].size, torch.finfo(torch.float32).max
    for bad, at in itertools.product((INF, -INF, NAN), (0, size - 1, size, 3 * size + 4)):
        x = normal((3, 3 * size + 5), torch.float32)
        plain = check(x, fmt, mode, transpose=True) if fmt != "nvfp4" else None
        x[1, at] = bad
        _, _, scale, scale_t, *_ = results = check(x, fmt, mode, transpose=True)
        nan = 0x7F if fmt == "nvfp4" else 0xFF
        assert (codes(scale) == nan).sum() == (codes(scale_t) == nan).sum() == 1
        assert plain is None or torch.equal(results[2][0], plain[2][0])
    for value in (0.0, -0.0, 1e-45, -1e-40, 2.0**-126, largest, -largest, 448.0, 1.0):
        results = check(torch.full((2, size + 3), value), fmt, mode, transpose=True)
        assert value != 0 or (codes(results[2]) == 0).all()
    mixed = torch.tensor([largest, 1e-45, -0.0, 2.0**-130, -largest / 3, 1.0, 0.0, -1e-38])
    check(mixed.repeat(9), fmt, mode)


@for_each("fmt, mode", mx.CASES)
def test_stochastic_rounding(backend: str, poisoned: None, fmt: str, mode: str) -> None:
    for seed, shape in ((0, (3, 41)), (2**40 + 7, (35, 33)), (2**63 - 1, (7,)), (1, (0, 5))):
        for dtype in WIDE:
            check(normal(shape, dtype, seed=3), fmt, mode, len(shape) > 1, seed)
    x = normal((2, 64), torch.float32)
    x[0, 3], x[1, 40] = INF, 1e-30
    check(x, fmt, mode, True, 5)


@for_each("fmt", BLOCK_FORMATS)
def test_unbiased(fmt: str) -> None:
    """The mean of 10^6 draws; the largest element, which is exact, fixes the scale."""
    spec, size = mx.BLOCKS[fmt]
    table = ind.decode_table(spec)
    for i, part in enumerate((0.0007, 0.25, 0.5, 0.9)):
        low = table[[0, 1, spec.max_code - 1][i % 3]]
        high = table[int(np.flatnonzero(table == low)[0]) + 1]
        x = torch.full((1 << 20,), low + part * (high - low)).view(-1, size)
        x[:, 0] = spec.max
        if fmt == "nvfp4":
            x *= 448  # the scale of the tensor is then 1
        data, _, scale, *_ = quantize_mx(x, fmt, "rceil", False, seed_of(i))
        drawn = codes(data)
        if spec.bits == 4:
            drawn = np.stack([drawn & 15, drawn >> 4], -1).reshape(-1, size)
        values = table[drawn[:, 1:]]
        assert len(np.unique(codes(scale))) == 1
        assert set(np.unique(values)) <= {low, high}
        up = values == high
        exact = (x[0, 1].item() / (448 if fmt == "nvfp4" else 1) - low) / (high - low)
        deviation = math.sqrt(exact * (1 - exact) / up.size)
        assert abs(up.mean() - exact) < 4 * deviation + 2.0**-16


@for_each("fmt", [f for f in BLOCK_FORMATS if f != "nvfp4"])
def test_elements_and_scales_equal_those_of_ml_dtypes_and_gfloat(fmt: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    gfloat = pytest.importorskip("gfloat")
    spec, size = mx.BLOCKS[fmt]
    suffix = "fn" if spec.name != "e5m2" else ""
    theirs = getattr(ml_dtypes, f"float{spec.bits}_{spec.name}{suffix}")
    form = getattr(__import__("gfloat.formats").formats, f"format_info_ocp_{spec.name}")
    x = normal((400, size), torch.float64).float() * torch.logspace(-100, 100, 400, base=2)[:, None]
    for mode in SCALE_MODES:
        data, _, scale, *_ = quantize_mx(x, fmt, mode, False, None)
        y = np.ldexp(x.double().numpy(), 127 - codes(scale).astype(int))
        y = np.clip(y, -spec.max, spec.max)
        want = join_codes(y.astype(theirs).view(np.uint8), spec)
        np.testing.assert_array_equal(codes(data), want)
        rounded = gfloat.round_ndarray(form, y, sat=True)
        want = join_codes(gfloat.encode_ndarray(form, rounded).astype(np.uint8), spec)
        np.testing.assert_array_equal(codes(data), want)
        if mode == "floor":
            emax = int(math.log2(spec.max))
            largest = [gfloat.compute_scale_amax(emax, row) for row in x.double().numpy()]
            np.testing.assert_array_equal(np.log2(largest) + 127, codes(scale)[:, 0])


def join_codes(values: np.ndarray, spec: ind.Spec) -> np.ndarray:
    return mx.join(values & 2 * spec.sign_bit - 1, spec)


def test_names() -> None:
    for name, block in BLOCK_FORMATS.items():
        assert block.element.name == mx.BLOCKS[name].spec.name
        assert block.block == mx.BLOCKS[name].size
        assert name_of(block.element, "nvfp4" if block.nvfp4 else "mx") == name
        assert name_of(block.element, "tensor") is None
