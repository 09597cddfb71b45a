"""amax, quantize and dequantize in Triton's interpreter, bit for bit the references.

The casts that run here are the integer ones; test_triton_compile.py looks at the rest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import independent as ind
import numpy as np
import pytest
import torch
from cases import (
    FP8,
    LAYOUTS,
    SHAPES,
    WIDE,
    from_bits,
    name,
    normal,
    permuted,
    random_bits,
    transposed,
)
from emulated.ops import OPS, TRITON, launcher
from emulated.triton_interpreter.helpers import INF, NAN, agree, f32, no_warnings

import mixprec
from mixprec.ops._dispatch import backends, self_check
from mixprec.triton_kernels import launch

pytestmark = no_warnings
LOW = (*FP8, torch.float16, torch.bfloat16)
BLOCKS = ("row", "block1x128", "block128x128")


def test_the_interpreter_runs() -> None:
    assert launch.INTERPRETED, "TRITON_INTERPRET=1 must be set before triton is imported"
    assert launch.soft_cast(torch.device("cpu"), torch.float32)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The _triton ops take CPU tensors, which only the interpreter can make of use."""
    registered = torch.library.Library("mixprec", "IMPL")
    for op in TRITON:
        registered.impl(OPS[op].variant_name("triton"), launcher(op), "CPU")
    monkeypatch.setattr(backends, "why_not", lambda *_: None)
    yield
    registered._destroy()


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("op_name", TRITON)
def test_through_the_dispatcher(op_name: str) -> None:
    """As an op of torch, compared on the examples that a GPU would run first."""
    op = OPS[op_name]
    with mixprec.use_backend("triton"):
        assert op.choose("cpu") is op.handle("triton")
        outcome = self_check.compare(op, op.handle("triton"), "cpu")
    assert outcome == {"ok": True, "worst": 0.0, "reason": None}


@pytest.mark.parametrize("dtype", WIDE, ids=name)
def test_amax(dtype: torch.dtype) -> None:
    for shape in (*SHAPES, (4096,), (8191,), (8193,)):
        agree("amax", lambda shape=shape: [normal(shape, dtype)])
    for layout in LAYOUTS:
        agree("amax", lambda layout=layout: [layout(normal((13, 17), dtype))])
    for size, value in itertools.product((1, 4096, 4099), (-100.0, INF, -INF, NAN)):
        for at in (0, -1):
            x = normal((size,), dtype)
            x[at] = value
            agree("amax", lambda x=x: [x])
    both = normal((5000,), dtype)
    both[3], both[4999] = NAN, INF
    agree("amax", lambda: [both])


@pytest.mark.parametrize("to", LOW, ids=name)
def test_quantize_many_patterns(to: torch.dtype) -> None:
    """All 16-bit codes; 2^18 patterns of FP32, of which the C++ casts see all 2^32."""
    every = np.arange(1 << 16, dtype=np.uint16)
    awkward = f32(0.0, -0.0, 1.0, -1.0, 1e-45, 3e38, INF, -INF, NAN)
    inputs = [
        *((from_bits(every, d), (1.0, 3.7, 2.0**120, 2.0**-20)) for d in WIDE[1:]),
        (random_bits(1 << 18, torch.float32), (1.0, 0.3)),
        (awkward, (0.0, -0.0, INF, NAN, 1e-45, 3e38)),
    ]  # fmt: skip
    for x, scales in inputs:
        for scale in scales:
            args = [x, to, f32(scale), False, "tensor", True]
            agree("quantize", lambda args=args: args)


@pytest.mark.parametrize("spec", ind.SPECS, ids=name)
def test_quantize_ties_and_their_neighbours(spec: ind.Spec) -> None:
    ties = ind.midpoints(spec).astype(np.float32)
    near = [ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))]
    x = torch.from_numpy(np.concatenate([*near, *(-n for n in near), [0.0, -0.0]]))
    agree("quantize", lambda: [x.float(), spec.dtype, f32(1.0), False, "tensor", True])


@pytest.mark.usefixtures("poisoned")
def test_quantize_shapes_and_layouts() -> None:
    for shape in (*SHAPES, (8193,), (65, 129), (0, 3)):
        transpose = len(shape) > 1
        for dtype, to, scale, turned, power_of_two in (
            (torch.float32, FP8[0], None, transpose, True),
            (torch.bfloat16, FP8[1], f32(0.7), transpose, True),
            (torch.float16, FP8[0], None, False, False),
            (torch.float32, torch.bfloat16, None, False, True),
            (torch.bfloat16, torch.float16, f32(3.0), transpose, True),
        ):
            args = [normal(shape, dtype), to, scale, turned, "tensor", power_of_two]
            agree("quantize", lambda args=args: args)
    for layout, transpose in itertools.product(LAYOUTS, (False, True)):
        x = layout(normal((13, 17), torch.float32))
        agree("quantize", lambda x=x, t=transpose: [x, FP8[1], None, t, "tensor", True])


@pytest.mark.parametrize("to", FP8, ids=name)
def test_quantize_current_scaling(to: torch.dtype) -> None:
    amaxes = (0.0, 1e-45, 1e-38, 2.0**-118, 1.0, 3.0, 448.0, 449.0, 3.4e38, INF, NAN)
    for amax, power_of_two, transpose in itertools.product(amaxes, (False, True), (False, True)):
        x = normal((9, 70), torch.float32).clamp(-1, 1) * (amax if math.isfinite(amax) else 1)
        x[8, 69] = amax
        args = [x, to, None, transpose, "tensor", power_of_two]
        agree("quantize", lambda args=args: args)


@pytest.mark.parametrize("to", LOW, ids=name)
def test_quantize_with_a_scale_that_is_not_initialised(to: torch.dtype) -> None:
    for shape, transpose in itertools.product(((9, 70), (0, 5)), (False, True)):
        args = [normal(shape, torch.float32), to, f32(0.0), transpose, "tensor", True]
        agree("quantize", lambda args=args: args)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("granularity", BLOCKS)
def test_quantize_by_blocks(granularity: str) -> None:
    for shape in (*SHAPES, (130, 257), (3, 4100), (5, 0)):
        for to, dtype in zip(FP8, (torch.bfloat16, torch.float32), strict=True):
            for transpose in (False, True) if len(shape) > 1 else (False,):
                args = [normal(shape, dtype), to, None, transpose, granularity, dtype.itemsize == 4]
                agree("quantize", lambda args=args: args)


@pytest.mark.parametrize("granularity", BLOCKS)
def test_quantize_by_blocks_of_any_bits(granularity: str) -> None:
    for dtype in WIDE:
        every = random_bits(130 * 272, dtype).view(130, 272)
        finite = torch.where(every.isfinite(), every, torch.zeros((), dtype=dtype))
        finite[:, 5] = finite[7] = finite[:128, :128] = 0
        for x, to in itertools.product((every, finite, permuted(finite)), FP8):
            args = [x, to, None, True, granularity, True]
            agree("quantize", lambda args=args: args)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_dequantize(dtype: torch.dtype) -> None:
    width = np.uint8 if dtype in FP8 else np.uint16
    codes = from_bits(np.arange(np.iinfo(width).max + 1, dtype=width), dtype)
    for scale_inv, to in itertools.product((1.0, 0.37, 2.0**-126, 2.0**100), WIDE):
        agree("dequantize", lambda s=scale_inv, to=to: [codes, f32(s), to])
    for shape in SHAPES:
        x = permuted(normal(shape, torch.float32).to(dtype))
        agree("dequantize", lambda x=x: [x, f32(3.0), torch.bfloat16])
        agree("dequantize", lambda x=x: [x.contiguous(), f32(0.5), torch.float32])


@pytest.mark.parametrize("dtype", LOW, ids=name)
def test_dequantize_by_blocks(dtype: torch.dtype) -> None:
    for shape, scales in (((130, 257), ((130, 1), (130, 3), (2, 3))), ((2, 3, 40), ((6, 1),))):
        data = normal(shape, torch.float32).to(dtype)
        for scale_inv, to in itertools.product([normal(s, torch.float32) for s in scales], WIDE):
            for strides in (scale_inv, transposed(scale_inv)):
                args = [data, strides, to]
                agree("dequantize", lambda args=args: args)
