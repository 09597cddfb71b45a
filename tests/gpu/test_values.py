"""Every op on the GPU gives the bits that the CPU kernels give, over layouts and dtypes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import (
    FP8,
    GRADS,
    LAYOUTS,
    SHAPES,
    WIDE,
    WRITABLE,
    Layout,
    name,
    normal,
    random_bits,
    random_list,
)
from on_gpu import FAKE_DEVICE, affordable, assert_same

from mixprec.ops._dispatch import self_check
from mixprec.ops._dispatch.op import OPS

LOW = (*FP8, torch.float16, torch.bfloat16)
LONG = 9_601 if FAKE_DEVICE else 300_001  # several chunks, an odd end


def scalar(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype)


@pytest.mark.parametrize("op", OPS)
def test_self_test(op: str, kernels: str, device: torch.device) -> None:
    reason = OPS[op].why_not(kernels, device.type)
    if reason is not None:
        pytest.skip(f"{op} on {kernels}: {reason}")
    outcome = self_check.compare(OPS[op], OPS[op].choose(device.type), device.type)
    assert outcome == {"ok": True, "worst": 0.0, "reason": None}, outcome


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
@pytest.mark.parametrize("dtype", WIDE, ids=name)
def test_amax_and_quantize(
    kernels: str, device: torch.device, dtype: torch.dtype, layout: Layout
) -> None:
    for i, shape in enumerate(affordable((*SHAPES, (LONG,), (517, 1031), (133, 517)))):
        x = layout(normal(shape, dtype, seed=i))
        assert_same("amax", [x], device)
        for low in LOW:
            transpose = x.dim() >= 2 and i % 2 == 0
            assert_same("quantize", [x, low, None, transpose, "tensor", True], device)
            assert_same("quantize", [x, low, scalar(3.7), False, "tensor", True], device)


@pytest.mark.parametrize("dtype", WIDE, ids=name)
def test_quantize_of_every_kind_of_number(
    kernels: str, device: torch.device, dtype: torch.dtype
) -> None:
    x = random_bits(1 << 16, dtype)
    finite = torch.where(torch.isfinite(x), x, 0)
    for low in LOW:
        for scale in (1.0, 2.0**-10, 3.0, 2.0**20):
            assert_same("quantize", [x, low, scalar(scale), False, "tensor", True], device)
        assert_same("quantize", [finite, low, None, False, "tensor", False], device)


BLOCKS = ("row", "block1x128", "block128x128")
BLOCK_SHAPES = affordable(
    (*SHAPES, (5, 0), (517, 1031), (256, 4096), (1000, 272), (133, 140), (3, 9000)), most=2**15
)


@pytest.mark.parametrize("granularity", BLOCKS)
@pytest.mark.parametrize("dtype", WIDE, ids=name)
def test_quantize_by_blocks(
    kernels: str, device: torch.device, dtype: torch.dtype, granularity: str
) -> None:
    for i, shape in enumerate(BLOCK_SHAPES):
        x = normal(shape, dtype, seed=i)
        bits = random_bits(x.numel(), dtype, seed=i).view(shape)
        finite = torch.where(bits.isfinite(), bits, torch.zeros((), dtype=dtype))
        for low in FP8:
            for transpose in (False, True) if x.dim() >= 2 else (False,):
                for values in (x, bits, finite):
                    args = [values, low, None, transpose, granularity, i % 2 == 0]
                    assert_same("quantize", args, device)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_quantize_by_blocks_of_any_layout(
    kernels: str, device: torch.device, layout: Layout
) -> None:
    for shape in ((130, 272), (65, 129)):
        for granularity in BLOCKS:
            x = layout(normal(shape, torch.bfloat16))
            args = [x, torch.float8_e4m3fn, None, x.dim() >= 2, granularity, True]
            assert_same("quantize", args, device)


@pytest.mark.parametrize("low", LOW, ids=name)
def test_quantize_with_a_scale_that_is_not_initialised(
    kernels: str, device: torch.device, low: torch.dtype
) -> None:
    for shape in affordable(((0, 5), (33, 70), (517, 1031))):
        for transpose in (False, True):
            x = normal(shape, torch.bfloat16)
            assert_same("quantize", [x, low, scalar(0.0), transpose, "tensor", True], device)


@pytest.mark.parametrize("low", LOW, ids=name)
def test_dequantize_by_blocks(kernels: str, device: torch.device, low: torch.dtype) -> None:
    for rows, cols in affordable(((130, 257), (517, 1031), (256, 4096))):
        data = normal((rows, cols), torch.float32).to(low)
        blocks = -(-rows // 128), -(-cols // 128)
        for shape in ((rows, 1), (rows, blocks[1]), blocks):
            scale_inv = normal(shape, torch.float32)
            for out in WIDE:
                assert_same("dequantize", [data, scale_inv, out], device)
                assert_same("dequantize", [data, scale_inv.t().contiguous().t(), out], device)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
@pytest.mark.parametrize("low", LOW, ids=name)
def test_dequantize(kernels: str, device: torch.device, low: torch.dtype, layout: Layout) -> None:
    for i, shape in enumerate((*SHAPES, (LONG,))):
        x = layout(normal(shape, torch.float32, seed=i).to(low))
        for out in WIDE:
            assert_same("dequantize", [x, scalar(0.3), out], device)


def gradient_lists() -> Iterator[list[torch.Tensor]]:
    rng = random.Random(0)
    yield []
    for count in (1, 3, 60) if FAKE_DEVICE else (1, 3, 60, 1500):
        yield random_list(rng, count)
    for layout in WRITABLE:
        yield [layout(normal(shape, d, seed=7)) for shape in SHAPES for d in GRADS]
    for bad in (math.inf, -math.inf, math.nan):
        for at in (0, LONG // 2, -1):
            grads = [normal((n,), d, seed=n) for n in (LONG, 5) for d in GRADS]
            grads[at % len(grads)][at] = bad
            yield grads
    for dtype in GRADS:
        yield [random_bits(LONG // 3, dtype), torch.zeros(0, dtype=dtype)]


def test_unscale_and_grad_stats(kernels: str, device: torch.device) -> None:
    for grads in gradient_lists():
        for inv_scale in (2.0**-7, 0.3, 2.0**3):
            counts = torch.full((len(grads), 4), -1)
            inv, flag = scalar(inv_scale), scalar(0.0)
            assert_same("unscale_", [grads, inv, flag, None], device)
            assert_same("unscale_", [grads, inv, flag, counts], device)
            sums = torch.full((len(grads),), -1.0, dtype=torch.float64)
            near = lambda t: t.dtype == torch.float64 and t.shape == sums.shape  # noqa: E731, B023
            assert_same("grad_stats_", [grads, inv, flag, sums, counts], device, near)


STEP_SHAPES = ((0,), (1,), (7,), (33, 5), (1009,), (LONG,))


def step_rows() -> Iterator[tuple[torch.dtype, torch.dtype, torch.dtype, str, bool]]:
    """param, grad, moments, master, stochastic"""
    for param in GRADS:
        for grad in WIDE if param != torch.float64 else (torch.float64,):
            states = (torch.float32, torch.bfloat16) if param != torch.float64 else (param,)
            for state in states:
                masters = ["none"] + (["fp32"] if param in WIDE[1:] else [])
                masters += ["remainder"] if param == torch.bfloat16 else []
                for master in masters:
                    yield param, grad, state, master, False
                if param == torch.bfloat16:
                    yield param, grad, state, "none", True


def step_lists(
    param: torch.dtype, grad: torch.dtype, state: torch.dtype, master: str, layout: Layout
) -> tuple[list[torch.Tensor], ...]:
    real = torch.float64 if param == torch.float64 else torch.float32
    truth = [normal(shape, real, seed=i) for i, shape in enumerate(STEP_SHAPES)]
    params = [layout(x.to(param)) for x in truth]
    grads = [layout(normal(x.shape, grad, seed=20 + i)) for i, x in enumerate(truth)]
    m = [layout(normal(x.shape, state, seed=40 + i)) for i, x in enumerate(truth)]
    v = [layout(normal(x.shape, real, seed=60 + i).square().to(state)) for i, x in enumerate(truth)]
    masters = []
    if master == "fp32":
        masters = [layout(x) for x in truth]
    elif master == "remainder":
        bits = [torch.randint(-(2**15), 2**15, x.shape, dtype=torch.int16) for x in truth]
        masters = [b.clone() for b in bits]
    return params, grads, m, v, masters


def shared(stochastic: bool, found_inf: float, lr: float | None) -> list[Any]:
    lr_tensor = None if lr is None else scalar(lr, torch.float64)
    flags = [scalar(0.25), scalar(0.7), scalar(found_inf)]
    return [False, 2.5, stochastic, 2**40 + 3, list(range(len(STEP_SHAPES))), lr_tensor, *flags]


@pytest.mark.parametrize("layout", [WRITABLE[0], WRITABLE[2], WRITABLE[6]], ids=name)
@pytest.mark.parametrize("row", list(step_rows()), ids=name)
def test_updates(kernels: str, device: torch.device, row: Any, layout: Layout) -> None:
    *dtypes, master, stochastic = row
    params, grads, m, v, masters = step_lists(*dtypes, master, layout)
    steps = torch.tensor([0.0, 3.0, 1.0, 100.0, 7.0, 1999.0])
    for found_inf in (0.0, 1.0):
        for decoupled in (True, False):
            numbers = [1e-3, 0.9, 0.999, 1e-8, 1e-2, decoupled]
            lists = [params, grads, m, v, masters, steps]
            tail = shared(stochastic, found_inf, 3e-3 if decoupled else None)
            assert_same("adamw_", [*lists, *numbers, *tail], device)
        for momentum, nesterov in ((0.0, False), (0.9, False), (0.9, True)):
            numbers = [0.1, momentum, 0.0 if nesterov else 0.2, 1e-2, nesterov]
            lists = [params, grads, m if momentum else [], masters, steps]
            tail = shared(stochastic, found_inf, None)
            assert_same("sgd_", [*lists, *numbers, *tail], device)


def test_many_tensors_take_several_launches(kernels: str, device: torch.device) -> None:
    count = 2000
    params = [normal((i % 37,), torch.bfloat16, seed=i) for i in range(count)]
    grads = [normal(p.shape, torch.bfloat16, seed=i + 1) for i, p in enumerate(params)]
    m, v = ([torch.zeros(p.shape) for p in params] for _ in range(2))
    masters = [p.float() for p in params]
    tail = shared(False, 0.0, None)
    tail[4] = []
    numbers = [1e-3, 0.9, 0.999, 1e-8, 1e-2, True]
    steps = torch.arange(float(count))
    assert_same("adamw_", [params, grads, m, v, masters, steps, *numbers, *tail], device)
    found_inf, counts = scalar(0.0), torch.zeros((count, 4), dtype=torch.int64)
    sums = torch.zeros(count, dtype=torch.float64)
    near = lambda t: t.dtype == torch.float64  # noqa: E731
    assert_same("grad_stats_", [grads, None, found_inf, sums, counts], device, near)
