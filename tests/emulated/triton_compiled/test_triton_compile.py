"""The Triton kernels of every op's examples compiled ahead of time, without a GPU.

Their PTX shows 16-byte loads and stores, 64-bit offsets, no spills, and the instructions that the
numerics need. What they compute is checked in triton_interpreter.

And what a call runs has been compared with the reference: the binaries that Triton makes for it are
those of the examples most like it, whose sizes are others. Triton makes one for sizes and addresses
that are multiples of 16, and another for those that are not.
"""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest
from emulated.agreement import OPS, TRITON, launcher
from emulated.triton_compiled.helpers import (
    Launch,
    check_declarations,
    check_zeros,
    local_bytes,
    offsets,
    record_launches,
)

from mixprec.ops._dispatch import example_inputs, example_products, self_check
from mixprec.triton_kernels import gemm

# In the place of the examples' sizes: these are more tiles, bands, rows and partial sums. Behind
# 252 FP32 numbers, not behind 253, an address can be a multiple of 16.
SIZES: dict[ModuleType, dict[str, Any]] = {
    example_inputs: {
        "BLOCK_SHAPES": ((128, 160), (131, 163)),
        "PACKED": ((32, 256), (31, 257)),
        "SHAPES": ((256, 384), (252, 391)),
        "ROWS": ((256, 384), (252, 391)),
        "NORMS": ((64, 304), (53, 305)),
        "NORM_GRADS": ((1024, 304), (131, 305)),
        "ACTIVATIONS": ((256, 384), (253, 391)),
        "GRADS": (65536, 5555, 16),
        "SUMMED": (262_144, 16_399, 16),
        "PARAMS": (1024, 77, 16),
    },
    example_products: {
        "SIZES": ((32, 96, 128), (13, 21, 35)),
        "CLASSES": ((16, 2080), (13, 2075)),
        "POSITIONS": ((3, 17, 12, 64), (3, 7, 6, 26)),
    },
}
# In odd sizes a thread has 64 addresses of its own; 16 bytes of a thread.
SPILL = {("quantize_tiles_kernel", 90), ("cross_entropy_kernel", 100), ("rotary_kernel", 90)}
SCALARS = ("inv_scale", "clip_coef", "update_scale_")  # their kernels take no sizes


OF_FP32 = ("norm_rows", "norm_backward", "norm_bands", "rotary")
WORDS = {"v4.b32", "v2.b64"}  # of 16 bytes
# Whether all that a kernel loads and all that it stores are such words, but for some scalars.
MOVING: dict[str, tuple[bool, bool, int]] = {
    **dict.fromkeys(("amax", "grad_stats", "quantize_transpose", "tile_maxima"), (True, True, 4)),
    **dict.fromkeys(("dequantize", "dequantize_blocks", "unscale", "scale_from_amax"),
                    (True, True, 4)),
    **dict.fromkeys(("quantize", "quantize_rows"), (True, True, 8)),
    **dict.fromkeys(("quantize_mx", "pack"), (True, False, 4)),
    **dict.fromkeys(("dequantize_mx", "unpack"), (False, True, 4)),
    "quantize_tiles": (True, True, 22),
    "step": (True, True, 28),
    "rotary": (True, True, 0),
}  # fmt: skip


def calls(name: str) -> list[list[Any]]:
    """The examples in other sizes; of many every third, along the diagonal (triton_interpreter
    runs all of them)."""
    with pytest.MonkeyPatch.context() as patch:
        for module, sizes in SIZES.items():
            for constant, values in sizes.items():
                patch.setattr(module, constant, values)
        every = list(OPS[name].examples("cpu"))
    return [c for i, c in enumerate(every) if len(every) <= 6 or (i + i // 3) % 3 == 1]


def arguments(one: Launch) -> str:
    return one.compiled.asm["ttir"].split("tt.func", 1)[1].split(" attributes ", 1)[0]


def sizes_divisible(one: Launch) -> set[bool]:
    """Whether integers, that is sizes, are known to be multiples of 16."""
    return {"divisibility" in x for x in re.findall(r"%\w+: i\d+ (\{.*?\})?", arguments(one))}


def check(one: Launch, capability: int) -> None:
    """What holds for every kernel but those of GEMMs."""
    ptx, ttir = one.compiled.asm["ptx"], one.compiled.asm["ttir"]
    approximate = re.findall(r"\b\w+\.approx\S*|\bdiv\.full\S*|\S+\.ftz\S*", ptx)
    assert not approximate, f"not IEEE: {approximate}"
    assert one.compiled.metadata.shared <= 48 * 1024, "more than every GPU has without asking"
    check_declarations(one)
    check_zeros(ttir)
    casts = "quantize" in one.name or one.values.get("PASS") == "cast"
    if casts and not one.stem.endswith("_mx"):
        check_conversions(one, capability)
    if one.stem.startswith("step") or one.stem in OF_FP32 or "source" in one.values:
        check_rounding(one)
    if one.stem.endswith("_mx"):
        assert not re.search(r"\bfma\.", ptx)
    if one.stem in MOVING or one.stem in OF_FP32:
        assert offsets(ttir) == {"i64"}
    if (one.name, capability) not in SPILL and (capability == 90 or is_aligned(one)):
        assert local_bytes(one.compiled) == 0, "registers are spilled"
    if is_aligned(one):
        check_accesses(one)
        if one.stem.startswith("step"):
            check_random_bits(one)


def is_aligned(one: Launch) -> bool:
    """Sizes and addresses are known to be multiples of 16: every access can be a wide one."""
    sizes = "" if one.values.get("n", 1) % 16 == 0 else "i32|"  # else of each argument
    found = re.findall(rf"%\w+: (?:{sizes}!tt\.ptr<\w+>) ?(\{{tt\.div.*?\}})?", arguments(one))
    return all(found)


def counted(ptx: str, operation: str) -> dict[str, int]:
    """How often each width of ld.global or st.global occurs in the PTX."""
    counts: dict[str, int] = {}
    for word in re.findall(rf"\b{operation}\.global((?:\.[a-z0-9_]+)+)", ptx):
        width = ".".join(w for w in word.split(".") if re.fullmatch(r"v\d|[bufs]\d+", w))
        counts[width] = counts.get(width, 0) + 1
    return counts


def check_accesses(one: Launch) -> None:
    ptx, source = one.compiled.asm["ptx"], one.values.get("source")
    if one.stem.startswith("norm"):  # a lane has eight elements of a row, 8 bytes of FP8
        row_wise = one.stem in ("norm_rows", "norm_backward")
        assert not row_wise or counted(ptx, "ld").keys() & WORDS
        writes = one.stem == "norm_backward" or one.values.get("PASS") == "cast"
        assert not writes or counted(ptx, "st").keys() & (WORDS | {"v2.b32"})
        return
    loads, stores, scalars = MOVING.get(one.stem, (False, False, 0))
    if source is not None and (source.rstd is not None or not source.is_plain()):
        stores, scalars = False, 1000  # values that are computed part by part
    for operation in ["ld"] * loads + ["st"] * stores:
        counts = counted(ptx, operation)
        narrow = {width: n for width, n in counts.items() if width not in WORDS}
        assert counts.keys() & WORDS or operation == "st", f"{operation}: {counts}"
        codes = sum(one.values.get(state) == "codes" for state in ("FIRST", "SECOND"))
        unread = operation == "ld" and one.values.get("RULE") == "muon_direction"
        codes += one.values.get("REMAINDER") == 8 and not unread
        # Of each array of bytes, in full blocks and the last one.
        assert narrow.pop("v2.b32", 0) == 2 * codes, f"{operation}: 8 bytes, {counts}"
        assert narrow.keys() <= {"b32", "b64"}, f"{operation}: narrow accesses, {counts}"
        assert sum(narrow.values()) <= scalars, f"{operation}: {counts}"


def check_conversions(one: Launch, capability: int) -> None:
    """One rounding, by the instruction made for it or in integers; never a detour through fp16."""
    conversions = set(re.findall(r"\bcvt\.[a-z0-9.]+", one.compiled.asm["ptx"]))
    to = one.values["to"].Q.value if "to" in one.values else None
    to_fp16 = {c for c in conversions if re.search(r"\.f16(x2)?\.f32", c)}
    assert one.name.startswith("dequantize") or bool(to_fp16) is (to == "fp16")
    native = {f"cvt.rn.satfinite.{to}x2.f32"} if to in ("e4m3", "e5m2") else set()
    found = {c for c in conversions if re.search(r"\.e[45]m[32]x2\.", c)}
    assert found == (native if capability >= 89 else set())


def check_rounding(one: Launch) -> None:
    """Every operation rounds to nearest on its own."""
    ptx = one.compiled.asm["ptx"]
    # On 8.0 a sum of two bf16 that is rounded to bf16 is one exact fma.rn.bf16 with 1.
    assert not re.search(r"\bfma\.(?!rn\.bf16)", ptx)
    assert not re.search(r"\b(mul|add|sub)\.f(32|64)", ptx), "ptxas may fuse what has no .rn"
    if not one.stem.startswith("step"):
        return
    real = "f64" if one.values.get("P", "fp64") == "fp64" else "f32"
    wanted = ("sqrt", "div", "mul", "sub") if one.values["RULE"] == "adamw" else ()
    wanted = wanted or (("mul", "add", "sub") if one.stem == "step" else ())
    for instruction in wanted:
        assert f"{instruction}.rn.{real}" in ptx


def check_random_bits(one: Launch) -> None:
    """A thread has eight elements: ten rounds of two products for each array that is rounded at
    random, in full blocks and in the last one, and no more (streams share some of the first)."""
    products = re.findall(r"\bmul\.(?:wide|hi)\.u32", one.compiled.asm["ptx"])
    arrays = sum(one.values.get(x) in ("bf16", "codes") for x in ("FIRST", "SECOND"))
    arrays += one.values.get("FIRST") == "codes"  # the bits of whole blocks
    arrays += one.values.get("STOCHASTIC", False) + 2 * (one.values["REMAINDER"] == 8)
    addresses = 8
    assert len(products) <= 2 * 10 * 2 * arrays + addresses
    assert bool(arrays) is (len(products) > addresses)


@pytest.mark.parametrize("capability", [80, 89, 100, 120])
@pytest.mark.parametrize("name", [op for op in TRITON if not op.startswith("gemm")])
def test_other_gpus(monkeypatch: pytest.MonkeyPatch, name: str, capability: int) -> None:
    """8.9 casts as 9.0 does, 12.0 as 10.0: few of those."""
    launches = record_launches(monkeypatch, capability)
    for args in calls(name)[:: 2 if capability in (80, 100) else 6]:
        launcher(name)(*args)
    for one in {id(one.compiled): one for one in launches}.values():
        check(one, capability)


@pytest.mark.parametrize("name", TRITON)
def test_what_a_call_runs_has_been_compared(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """On a GPU with 132 multiprocessors."""
    monkeypatch.setattr(gemm, "_gpu", lambda _: (90, 132))
    launched, op = record_launches(monkeypatch), OPS[name]
    examples = [(self_check.kind(op.arguments, e), e) for e in op.examples("cpu")]
    compiled: dict[int, set[int]] = {}

    def binaries(args: list[Any]) -> set[int]:
        first = len(launched)
        launcher(name)(*args)
        assert len(launched) > first
        return {id(one.compiled) for one in launched[first:]}

    for call in calls(name):
        kinds = self_check.most_like(self_check.kind(op.arguments, call), {k for k, _ in examples})
        assert 1 <= len(kinds) <= 4, "each costs its user a comparison"
        compared: set[int] = set()
        for i, (kind, example) in enumerate(examples):
            if kind in kinds:
                compiled[i] = compiled.get(i) or binaries(example)
                compared |= compiled[i]
        assert binaries(call) <= compared, [x for x in call if not isinstance(x, list)]

    different = {id(one.compiled): one for one in launched}.values()
    if name not in SCALARS:
        assert set().union(*map(sizes_divisible, different)) == {False, True}
    for one in different:
        assert not one.keywords.get("SOFT_CAST")
        if not name.startswith("gemm"):
            check(one, 90)
