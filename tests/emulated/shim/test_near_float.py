"""Activations of numbers in a range, with divisions made of a reciprocal, have the bits of FP32."""

from __future__ import annotations

import ctypes
import struct
from functools import cache

import pytest
from emulated.shim import runner

KINDS = {"silu": 87.0, "gelu": 13.0, "gelu_tanh": 9.5}  # activation_near

every_kind = pytest.mark.parametrize("kind", KINDS)


@cache
def library() -> ctypes.CDLL:
    words = ["-O2", "-shared", runner.SCHEDULER, runner.HERE / "near_float.cpp"]
    compiled = ctypes.CDLL(str(runner.compile_(words, ".so")))
    for name in ("divides_otherwise", "activates_otherwise"):
        getattr(compiled, name).restype = ctypes.c_int64
    return compiled


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
