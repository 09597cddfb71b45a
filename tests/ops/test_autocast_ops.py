"""Raw ops inside torch.autocast: products cast their operands, other ops take what they get."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import independent as ind
import pytest
import torch
from cases import FP8, WIDE, for_each, normal
from op_arguments import arguments
from test_global_state import train

import mixprec
from mixprec.ops._dispatch.op import OPS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOW = (BF16, FP16)
M, K, N = 5, 24, 7
PAIRS = (*((a, b) for a in WIDE for b in WIDE), *((a, b) for a in FP8 for b in FP8))
# Scales of one element and of a row each, with more bits than 16-bit formats have: a cast shows.
SCALES = (torch.tensor(1 + 2.0**-20), torch.linspace(0.5, 1.7, N)[None, :])
BIAS = torch.linspace(-1, 1, N) * (1 + 2.0**-20)


def operands(a: torch.dtype, b: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return normal((M, K), FP32, seed=1).to(a), normal((K, N), FP32, seed=2).to(b)


def as_autocast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rule, written down once more."""
    return x if x.dtype in FP8 else x.to(dtype)


# Each way to reach the two ops: (a, b, out_dtype) -> c, as a user would write it.
Call = Callable[[torch.Tensor, torch.Tensor, torch.dtype | None], torch.Tensor]


def public(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
    a_inv, b_inv = SCALES
    return mixprec.gemm(a, b, a_scale_inv=a_inv, b_scale_inv=b_inv, bias=BIAS, out_dtype=out_dtype)


def direct(variant: str, a: torch.Tensor, b: torch.Tensor, out_dtype: Any) -> torch.Tensor:
    op = getattr(torch.ops.mixprec, variant)
    if variant.endswith("_"):
        op(acc := torch.full((M, N), 1 + 2.0**-20), a, b, *SCALES)
        return acc
    return op(a, b, *SCALES, BIAS, out_dtype or FP32, False)


def accumulated(a: torch.Tensor, b: torch.Tensor, out_dtype: Any) -> torch.Tensor:
    acc = torch.full((M, N), 1 + 2.0**-20)
    mixprec.gemm_accumulate_(acc, a, b, a_scale_inv=SCALES[0], b_scale_inv=SCALES[1])
    return acc


RAW = ("gemm", "gemm_reference", "gemm_accumulate_", "gemm_accumulate_reference_")
CALLS: dict[str, Call] = {"gemm": public, "gemm_accumulate_": accumulated}
CALLS |= {f"ops.{variant}": functools.partial(direct, variant) for variant in RAW}


@for_each("out_dtype", [None, *WIDE])
@for_each("dtype", LOW)
@for_each("call", CALLS)
def test_only_the_operands_are_cast(
    call: str, dtype: torch.dtype, out_dtype: torch.dtype | None
) -> None:
    """Every pair of operand dtypes: the bits of the same call, outside, on operands cast by hand.

    Scales, bias and accumulator hold numbers that no 16-bit format does.
    """
    run = CALLS[call]
    for pair in PAIRS:
        a, b = operands(*pair)
        want = run(as_autocast(a, dtype), as_autocast(b, dtype), out_dtype)
        with torch.autocast("cpu", dtype):
            got = run(a, b, out_dtype)
            assert torch.is_autocast_enabled("cpu")
        ind.assert_same_bits(got, want, str(pair))
        assert got.dtype == want.dtype
        if call == "gemm" and out_dtype is None:
            assert got.dtype == (BF16 if pair[0] in FP8 else dtype)


@for_each("call", CALLS)
def test_outside_and_switched_off_nothing_is_cast(call: str) -> None:
    run, half = CALLS[call], operands(FP16, FP16)
    wide = operands(torch.float64, torch.float64)
    want = run(*half, FP32)
    with torch.autocast("cpu", BF16), torch.autocast("cpu", enabled=False):
        ind.assert_same_bits(run(*half, FP32), want)
        with pytest.raises((ValueError, RuntimeError), match="a and b must both be"):
            run(*wide, None)
    with torch.autocast("cpu", BF16):
        assert not torch.equal(run(*half, FP32), want), "the region makes a difference"
    ind.assert_same_bits(run(*half, FP32), want)


@pytest.mark.parametrize(("call", "dtype"), list(zip(CALLS, LOW * 3, strict=True)), ids=str)
def test_compiled(call: str, dtype: torch.dtype) -> None:
    """The region inside the compiled function, and around it."""
    run = CALLS[call]

    def inside(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            return run(a, b, None)

    compiled = torch.compile(inside, backend="aot_eager", fullgraph=True)
    around = torch.compile(lambda a, b: run(a, b, None), backend="aot_eager", fullgraph=True)
    for pair in ((FP32, FP32), (FP16, BF16), (FP8[0], FP8[1])):
        a, b = operands(*pair)
        want = inside(a, b)
        ind.assert_same_bits(compiled(a, b), want, f"inside {pair}")
        with torch.autocast("cpu", dtype):
            ind.assert_same_bits(around(a, b), want, f"around {pair}")
    half = operands(FP16, FP16)  # and once more without the region: compiled anew
    ind.assert_same_bits(around(*half), run(*half, None), "outside")


@for_each("device_type, on", [("cpu", "meta"), ("cuda", "meta"), ("cuda", "cpu")])
def test_another_devices_region_is_none_of_ours(device_type: str, on: str) -> None:
    """As with torch's own ops: torch has no autocast for the meta device."""
    a, b = (x.to(on) for x in operands(FP16, FP16))
    torch.set_autocast_enabled(device_type, True)  # torch.autocast("cuda") refuses without a GPU
    try:
        assert (a @ b).dtype == mixprec.gemm(a, b).dtype == FP16
        assert torch.ops.mixprec.gemm(a, b, None, None, None, FP32, False).dtype == FP32
        mixprec.gemm_accumulate_(torch.zeros((M, N), device=on), a, b)
    finally:
        torch.set_autocast_enabled(device_type, False)


@for_each("quantized", ["fp16", "bf16", "e4m3"])
def test_quantized_operands(quantized: str) -> None:
    """16-bit data is cast like any other, FP8 keeps its format and its scale."""
    a, b = (mixprec.quantize(x, quantized) for x in operands(FP32, FP32))
    scales = {"a_scale_inv": a.scale_inv, "b_scale_inv": b.scale_inv}
    want = mixprec.gemm(as_autocast(a.data, BF16), as_autocast(b.data, BF16), **scales)
    with torch.autocast("cpu", BF16):
        ind.assert_same_bits(mixprec.gemm(a, b), want)


@for_each("dtype", LOW)
@for_each("name", [name for name, op in OPS.items() if not op._operands])
def test_other_ops_take_what_they_are_given(name: str, dtype: torch.dtype) -> None:
    """FP32 numbers that no 16-bit format holds; results and what is written."""

    def longer(x: Any) -> Any:
        if isinstance(x, list):
            return [longer(t) for t in x]
        return x * 1.001 if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    def run(inside: bool) -> list[torch.Tensor]:
        given = arguments(name, FP16 if name == "dequantize" else FP32, "contiguous")
        named = zip(OPS[name].arguments, given, strict=True)
        args = [x if key == "steps" else longer(x) for key, x in named]
        with torch.autocast("cpu", dtype, enabled=inside):
            result = OPS[name](*args)
        results = [result] if isinstance(result, torch.Tensor) else list(result or ())
        flat = [t for x in (*results, *args) for t in (x if isinstance(x, list) else [x])]
        return [t for t in flat if isinstance(t, torch.Tensor)]

    for got, want in zip(run(True), run(False), strict=True):
        ind.assert_same_bits(got, want, name)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Muon"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_scaler_and_optimizer_inside_a_region(dtype: torch.dtype, optimizer: str) -> None:
    """A user may put the whole step into it: no bit of params, FP32 state or loss scale changes."""
    region, kind = (
        functools.partial(torch.autocast, "cpu", dtype),
        getattr(mixprec.optim, optimizer),
    )
    want, got = train(BF16, "bf16", kind), train(BF16, "bf16", kind, region)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
