"""The GPU's conversion instructions, as the PTX manual has them, give the bits of the C++ casts;
activations of numbers in a range, with divisions made of a reciprocal, those of FP32."""

from __future__ import annotations

import ctypes
import struct
from functools import cache

import pytest
from emulated.shim import runner

INSTRUCTIONS = ("bf16x2", "f16x2", "e4m3x4", "e5m2x4", "e2m1x8")
PATTERNS = 1 << 32
KINDS = {"silu": 87.0, "gelu": 13.0, "gelu_tanh": 9.5}  # activation_near

every_instruction = pytest.mark.parametrize("instruction", INSTRUCTIONS)
every_kind = pytest.mark.parametrize("kind", KINDS)


@cache
def library() -> ctypes.CDLL:
    words = ["-O2", "-shared", runner.SCHEDULER, runner.HERE / "cvt.cpp"]
    compiled = ctypes.CDLL(str(runner.compile_(words, ".so")))
    for name in ("disagrees", "disagrees_near", "widens_otherwise", "divides_otherwise",
                 "activates_otherwise"):  # fmt: skip
        getattr(compiled, name).restype = ctypes.c_int64
    return compiled


@every_instruction
def test_around_every_step_of_each_format(instruction: str) -> None:
    """Every result changes at a multiple of 2^12, half a step of FP16, or right beside one."""
    number = INSTRUCTIONS.index(instruction)
    at = library().disagrees_near(number, ctypes.c_int64(1 << 12))
    assert at == PATTERNS, f"{instruction} of the FP32 number with the bits {at:#x}"


@pytest.mark.exhaustive
@every_instruction
def test_every_pattern(instruction: str) -> None:
    number = INSTRUCTIONS.index(instruction)
    at = library().disagrees(number, ctypes.c_int64(0), ctypes.c_int64(PATTERNS))
    assert at == PATTERNS, f"{instruction} of the FP32 number with the bits {at:#x}"


def test_every_code_of_16_and_8_bits() -> None:
    assert library().widens_otherwise() == 1 << 16
    assert library().in_order()


def test_quotients_of_every_fraction() -> None:
    at = library().divides_otherwise()
    assert at == 1 << 23, f"a divisor with the fraction {at:#x}"


def check_activation(kind: str, step: int) -> None:
    last = struct.unpack("<I", struct.pack("<f", KINDS[kind]))[0]
    at = library().activates_otherwise(list(KINDS).index(kind), ctypes.c_int64(step))
    assert at == last, f"{kind} of the FP32 number with the bits {at:#x}, or its negative"


@every_kind
def test_activations(kind: str) -> None:
    check_activation(kind, 997)


@pytest.mark.exhaustive
@every_kind
def test_activations_of_every_number(kind: str) -> None:
    check_activation(kind, 1)
