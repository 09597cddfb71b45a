"""The GPU's conversion instructions, as the PTX manual has them, give the bits of the C++ casts."""

from __future__ import annotations

import ctypes
from functools import cache

import pytest
from emulated.shim import runner

INSTRUCTIONS = ("bf16x2", "f16x2", "e4m3x4", "e5m2x4", "e2m1x8")
PATTERNS = 1 << 32

every_instruction = pytest.mark.parametrize("instruction", INSTRUCTIONS)


@cache
def library() -> ctypes.CDLL:
    words = ["-O2", "-shared", runner.SCHEDULER, runner.HERE / "cvt.cpp"]
    compiled = ctypes.CDLL(str(runner.compile_(words, ".so")))
    for name in ("disagrees", "disagrees_near", "widens_otherwise"):
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
