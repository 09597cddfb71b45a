"""The Triton kernels compiled ahead of time, without a GPU, and what their PTX and SASS show.

16-byte loads and stores, 64-bit offsets, no spills, and the instructions that the numerics need.
What the kernels compute is checked in triton_interpreter.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from cases import name
from emulated.triton_compiled.helpers import compile_for, pointers_of
from emulated.triton_compiled.kernel_cases import WITH_MASTER, Kernel, amax_case, cases_for

SIZES = ("n", "M", "K")  # multiples of 16 here
CASTS = ("quantize", "maxima")
# 8.9 casts as 9.0 does, 12.0 as 10.0: there the kernels without casts are the same.
BUILDS = [
    (case.name, capability)
    for capability in (80, 89, 90, 100, 120)
    for case in cases_for(capability)
    if capability in (80, 90, 100) or any(word in case.name for word in CASTS)
]


def build(case: Kernel, capability: int, aligned: bool = True) -> Any:
    """aligned: pointers and sizes are multiples of 16, as a launch would see."""
    multiples = (*pointers_of(case.types), *SIZES) if aligned else ()
    return compile_for(
        case.kernel, case.types, case.constants, capability, multiples, **case.options
    )


def counted(ptx: str, operation: str) -> dict[str, int]:
    """How often each width of ld.global or st.global occurs in the PTX."""
    counts: dict[str, int] = {}
    for word in re.findall(rf"\b{operation}\.global((?:\.[a-z0-9_]+)+)", ptx):
        width = ".".join(w for w in word.split(".") if re.fullmatch(r"v\d|[bufs]\d+", w))
        counts[width] = counts.get(width, 0) + 1
    return counts


@pytest.mark.parametrize(("label", "capability"), BUILDS, ids=str)
def test_every_kernel(label: str, capability: int) -> None:
    case = next(c for c in cases_for(capability) if c.name == label)
    kernel = build(case, capability)
    ptx, words = kernel.asm["ptx"], label.split()
    assert ".local" not in ptx, "local memory is used"
    approximate = re.findall(r"\b\w+\.approx\S*|\bdiv\.full\S*|\S+\.ftz\S*", ptx)
    assert not approximate, f"not IEEE: {approximate}"
    assert kernel.metadata.shared <= 48 * 1024, "more than every GPU has without asking"
    check_accesses(case, ptx)
    if "quantize" in label:
        check_conversions(case, ptx, capability)
    if words[0] in ("adamw", "sgd"):
        check_rounding(label, ptx)
        check_random_bits(case, ptx)
    if case.loads:
        check_offsets(kernel.asm["ttir"])
    check_declarations(case)
    if capability == 90 and words[0] in ("adamw", "sgd", "quantize", "grad_stats"):
        sass = kernel.asm["sass"]  # of those with the most registers: it takes half a second
        assert "EXIT" in sass
        assert not re.findall(r"\b(?:LDL|STL)\b", sass), "registers are spilled"


def check_accesses(case: Kernel, ptx: str) -> None:
    for operation, expected in (("ld", case.loads), ("st", case.stores)):
        counts = counted(ptx, operation)
        wide = sum(counts.pop(w, 0) for w in ("v4.b32", "v2.b64"))
        unrolled = case.constants.get("ROUNDS", 1)  # by the compiler, or not
        assert wide in (expected, unrolled * expected), f"{operation}: {wide} of 16 bytes; {counts}"
        assert set(counts) <= {"b32", "b64"}, f"{operation}: narrow accesses, {counts}"
        if case.loads:
            assert sum(counts.values()) <= 24, f"{operation}: {counts} for a few scalars"


def check_conversions(case: Kernel, ptx: str, capability: int) -> None:
    """One rounding, by the instruction made for it or in integers; never a detour through fp16."""
    conversions = set(re.findall(r"\bcvt\.[a-z0-9.]+", ptx))
    to = case.constants.get("Q") if not case.name.startswith("dequantize") else None
    to_fp16 = {c for c in conversions if re.search(r"\.f16(x2)?\.f32", c)}
    assert bool(to_fp16) is (to == "fp16")
    native = {f"cvt.rn.satfinite.{to}x2.f32"} if to in ("e4m3", "e5m2") else set()
    expected = native if capability >= 89 else set()
    assert {c for c in conversions if re.search(r"\.e[45]m[32]x2\.", c)} == expected


def check_rounding(label: str, ptx: str) -> None:
    """Every operation rounds to nearest on its own."""
    assert "fma." not in ptx
    assert not re.search(r"\b(mul|add|sub)\.f(32|64)", ptx), "ptxas may fuse what has no .rn"
    real = "f64" if "fp64" in label or "constants" in label else "f32"
    instructions = {"adamw": ("sqrt", "div", "mul", "sub"), "sgd": ("mul", "add", "sub")}
    expected = ("sub",) if label == "sgd constants" else instructions[label.split()[0]]
    for instruction in expected:
        assert f"{instruction}.rn.{real}" in ptx


def check_random_bits(case: Kernel, ptx: str) -> None:
    """A thread has eight elements: ten rounds of two products for each array that is rounded at
    random, in full blocks and in the last one, and no more (streams share some of the first)."""
    products = re.findall(r"\bmul\.(?:wide|hi)\.u32", ptx)
    arrays = sum(case.constants.get(x) == "bf16" for x in ("M", "V", "B"))
    arrays += case.constants.get("STOCHASTIC", False)
    addresses = 8
    assert len(products) <= 2 * 10 * 2 * arrays + addresses
    assert bool(arrays) is (len(products) > addresses)


def check_offsets(ttir: str) -> None:
    """Every array of unbounded size is addressed by int64, as the IR before any optimisation
    shows it. (Steps and partial sums are counted by int32: 2^31 of either fill no machine.)"""
    assert set(re.findall(r"tt\.addptr .*, tensor<[0-9x]*x(i\d+)>", ttir)) == {"i64"}


def check_declarations(case: Kernel) -> None:
    """Triton passes a Python number as fp32, or as the narrowest integer, unless the parameter
    says otherwise."""
    for parameter in case.kernel.params:
        declared = case.types.get(parameter.name)
        if declared in ("fp32", "fp64", "i64"):
            assert parameter.annotation_type == ("" if declared == "fp32" else declared)


@pytest.mark.parametrize("case", [amax_case("bf16"), WITH_MASTER], ids=name)
def test_more_elements_than_an_int32_counts(case: Kernel) -> None:
    """Then n is passed as int64, and the accesses are as wide."""
    kernel = build(replace(case, types=case.types | {"n": "i64"}), 90)
    assert counted(kernel.asm["ptx"], "ld")["v4.b32"] == case.loads


@pytest.mark.parametrize("case", [amax_case("bf16"), WITH_MASTER], ids=name)
def test_the_checks_see_narrow_accesses(case: Kernel) -> None:
    """Without alignment the same kernels load element by element, and the count shows it."""
    ptx = build(case, 90, aligned=False).asm["ptx"]
    counts = counted(ptx, "ld")
    assert "b16" in counts
    assert counts.get("v4.b32", 0) < case.loads
    with pytest.raises(AssertionError, match="ld: "):
        check_accesses(case, ptx)
