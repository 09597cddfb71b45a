"""The Triton kernels compiled ahead of time, without a GPU, and what their PTX and SASS show.

16-byte loads and stores, 64-bit offsets, no spills, and the instructions that the numerics need,
in every kernel as its launcher launches it. What they compute is checked in triton_interpreter.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest
import torch
from emulated.agreement import launcher
from emulated.triton_compiled.helpers import (
    Launch,
    check_any,
    check_offsets,
    local_bytes,
    record_launches,
)
from emulated.values.test_updates import RULES, Mix, arguments

F64, F32, BF16, F16, I16, U8 = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.uint8,
)  # fmt: skip
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS, COLUMNS, SIZE = 128, 256, 128 * 256  # multiples of 16: every access can be a wide one


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.zeros(shape or (ROWS, COLUMNS), dtype=dtype)


ONE = some(F32, 1)[0]


def update(rule: str, *dtypes: Any, **options: Any) -> tuple[Any, ...]:
    """An update of one param, with everything that may be absent."""
    given = {"lr_tensor": ONE, "inv_scale": ONE, "clip": ONE, "found_inf": ONE} | options
    return RULES[rule][0], *arguments(rule, [Mix(*dtypes)], [(ROWS, COLUMNS)], **given)


WITH_MASTER = update("decoupled", BF16, BF16, F32)
# fp16 is left out where bf16 takes the same way; E5M2 of fp32 likewise.
CASTS = [
    *(("quantize", some(x), q, ONE, turned, "tensor", True) for x, q in (
        (F32, E4M3), (BF16, E4M3), (BF16, E5M2), (F32, BF16)) for turned in (False, True)),
    ("quantize", some(BF16), E4M3, None, False, "tensor", True),
    ("quantize", some(F32), F16, None, False, "tensor", True),
    *(("quantize", some(x), q, None, turned, by, True) for x, q in ((BF16, E4M3), (F32, E5M2))
      for by, turned in (("row", False), ("row", True), ("block1x128", True),
                         ("block128x128", True), ("block1x128", False))),
    ("dequantize", some(E4M3), ONE, BF16),
    ("dequantize", some(E5M2), ONE, F32),
    ("dequantize", some(E4M3), some(F32, 1, 2), BF16),
    ("dequantize", some(E5M2), some(F32, ROWS, 1), F32),
]  # fmt: skip
BLOCK_SCALES = {32: some(U8, ROWS, COLUMNS // 32), 16: some(E4M3, ROWS, COLUMNS // 16)}
MX = [
    *(("quantize_mx", some(x), fmt, mode, turned, seed, turned, not turned)
      for x, fmt, mode, turned, seed in (
        (F32, "mxfp8_e4m3", "rceil", True, None), (BF16, "mxfp8_e5m2", "floor", False, None),
        (BF16, "mxfp6_e2m3", "even", True, None), (BF16, "mxfp4", "ceil", True, None),
        (BF16, "nvfp4", "rceil", True, None),
        (BF16, "nvfp4", "rceil", True, torch.zeros(1, dtype=torch.int64)))),
    ("dequantize_mx", some(E4M3), BLOCK_SCALES[32], None, "mxfp8_e4m3", COLUMNS, BF16),
    ("dequantize_mx", some(U8), BLOCK_SCALES[32], None, "mxfp6_e3m2", COLUMNS, F32),
    ("dequantize_mx", some(U8, ROWS, COLUMNS // 2), BLOCK_SCALES[16], ONE, "nvfp4", COLUMNS, BF16),
]  # fmt: skip
ROW = some(F32, ROWS)
VECTOR, PLAIN, GIVEN = some(F32, COLUMNS), (None, False, "tensor"), (ONE, False, "tensor")
CURRENT, ROWS_T, ROWS_1, MX_T = (
    (None, turned, by) for turned, by in ((True, "tensor"), (True, "row"), (False, "row"),
                                          (True, "mx")))  # fmt: skip
LINES, BLOCKS = (None, True, "block1x128"), (None, True, "block128x128")
FUSED = [
    *(("norm_quantize", some(BF16), some(BF16), VECTOR, some(BF16, COLUMNS), 1e-5, True, *cast)
      for cast in ((BF16, *PLAIN), (E4M3, *CURRENT), (E4M3, *LINES), (E4M3, *ROWS_T))),
    *(("norm_quantize", some(F32), None, None, None, 1e-5, False, *cast)
      for cast in ((E5M2, *GIVEN), (E4M3, *MX_T))),
    *(("act_quantize", some(x), up, kind, *cast) for x, up, kind, cast in (
        (BF16, some(BF16), "silu", (F32, *PLAIN)), (BF16, some(BF16), "silu", (E4M3, *CURRENT)),
        (F16, some(F16), "relu2", (E4M3, *ROWS_1)), (F32, None, "gelu", (BF16, *PLAIN)),
        (F32, None, "gelu", (E5M2, *BLOCKS)))),
    *(("act_backward", some(g), some(BF16), some(BF16), kind, *cast) for g, kind, cast in (
        (BF16, "silu", (BF16, *PLAIN)), (BF16, "silu", (E4M3, *LINES)),
        (F32, "gelu", (E4M3, *BLOCKS)), (F32, "gelu_tanh", (E5M2, *MX_T)))),
    ("act_backward", some(F32), some(F32), None, "gelu", E4M3, *ROWS_T),
    ("act_backward", some(F32), some(F32), some(F32), "gelu", E4M3, ONE, True, "tensor"),
]  # fmt: skip
FUSED = [(*call, True) for call in FUSED]
OF_GRADIENTS = [
    ("norm_backward", some(BF16), some(BF16), some(BF16, COLUMNS), ROW, ROW, some(F32), True),
    ("norm_backward", some(F32), some(F32), None, some(F32, 0), ROW, None, True),
]
OTHERS = [
    *OF_GRADIENTS,
    ("amax", some(F32)),
    ("amax", some(BF16)),
    *(("pack", some(x), bits, 7, 9, offset) for x, bits, offset in (
        (F32, 8, None), (BF16, 4, some(torch.int64, 1)), (F16, 2, None))),
    *(("unpack", some(torch.uint8, SIZE * bits // 8), some(BF16, SIZE // 128, 2), bits, [SIZE], y)
      for y, bits in ((F32, 8), (BF16, 4), (F16, 2))),
    *(("unscale_", [some(g)], ONE, ONE, counts) for g in (F32, BF16, F64)
      for counts in (None, some(torch.int64, 1, 4))),
    *(("grad_stats_", [some(g, 1 << 16)], ONE, ONE, some(F64, 1), counts) for g in (F32, BF16, F64)
      for counts in (None, some(torch.int64, 1, 4))),
    WITH_MASTER,
    update("decoupled", BF16, BF16, I16),
    update("decoupled", F32, F32),
    update("l2", F64, F64, None, (F64, F64)),
    update("decoupled", BF16, BF16, None, (BF16, BF16), stochastic_rounding=True),
    update("decoupled", BF16, BF16, I16, (BF16, BF16)),
    update("decoupled", BF16, BF16, I16, (U8, U8)),
    update("decoupled", F32, F32, None, (BF16, BF16)),
    update("momentum", F64, F64, None, (F64, F64)),
    update("sgd", BF16, BF16, I16),
    update("nesterov", BF16, BF16, None, (BF16, BF16), stochastic_rounding=True),
    update("lion", BF16, BF16, None, (BF16, BF16), stochastic_rounding=True),
    update("muon", BF16, BF16, None, (BF16, BF16), stochastic_rounding=True),
    ("scale_from_amax_", some(F32, 2048), some(F32, 2048), some(F32, 2048), E4M3, 3, True),
    ("inv_scale", ONE),
    ("clip_coef", some(F64, 100), 1.5),
    ("update_scale_", ONE, *[some(torch.int32, 1)] * 2, some(torch.int64, 3), ONE, ONE,
     2.0, 0.5, 2000, 0.5, 65536.0, 2, 0.5),
]  # fmt: skip
# All for 9.0. 8.9 casts as 9.0 does, 12.0 as 10.0: there every third cast. Kernels without casts
# are compiled for one of 8.0 and 10.0 beside it.
PARTS = {80: (1, slice(0, None, 2)), 89: (3, slice(0)), 90: (1, slice(None)),
         100: (1, slice(1, None, 2)), 120: (3, slice(0))}  # fmt: skip
BUILDS = [
    pytest.param(call, capability, id=f"{capability}-{i}-{call[0]}")
    for capability, (step, others) in PARTS.items()
    for i, call in enumerate([*[*CASTS, *MX, *FUSED][::step], *OTHERS[others]])
]
OF_FP32 = ("norm_rows", "norm_backward", "norm_bands")
# Arrays that kernels read and write in 16-byte words only (None: in others too), how often the code
# is there, for full blocks and for the last one, and how many other accesses they need for a few
# scalars.
STATES = "first_ptr second_ptr master_ptr"
MOVING: dict[str, tuple[str | None, str | None, int, int]] = {
    "amax": ("source", "", 2, 4),
    "quantize": ("source", "data", 2, 8),
    "quantize_transpose": ("source", "data data_t", 1, 4),
    "quantize_rows": ("source source", "data", 1, 4),
    "quantize_mx": ("source", None, 1, 4),
    "tile_maxima": ("source", "", 1, 4),
    "quantize_tiles": ("source", "data data_t", 1, 22),
    "dequantize": ("q_ptr", "out_ptr", 2, 4),
    "dequantize_blocks": ("q_ptr", "out_ptr", 1, 4),
    "dequantize_mx": (None, "out_ptr", 1, 4),
    "pack": ("x_ptr", None, 2, 4),
    "unpack": (None, "y_ptr", 2, 4),
    "unscale": ("grad_ptr", "grad_ptr", 2, 4),
    "grad_stats": ("grad_ptr", "", 2, 4),
    "scale_from_amax": ("scale_ptr amax_ptr", "scale_ptr scale_inv_ptr", 1, 4),
    "step": (f"param_ptr grad_ptr {STATES}", f"param_ptr {STATES}", 2, 28),
}
WORDS = {"v4.b32", "v2.b64"}  # of 16 bytes


def counted(ptx: str, operation: str) -> dict[str, int]:
    """How often each width of ld.global or st.global occurs in the PTX."""
    counts: dict[str, int] = {}
    for word in re.findall(rf"\b{operation}\.global((?:\.[a-z0-9_]+)+)", ptx):
        width = ".".join(w for w in word.split(".") if re.fullmatch(r"v\d|[bufs]\d+", w))
        counts[width] = counts.get(width, 0) + 1
    return counts


@pytest.mark.parametrize(("call", "capability"), BUILDS)
def test_every_kernel(
    monkeypatch: pytest.MonkeyPatch, call: tuple[Any, ...], capability: int
) -> None:
    launches = record_launches(monkeypatch, capability)
    launcher(call[0])(*call[1:])
    assert launches
    for one in launches:
        check_any(one)
        check_accesses(one)
        casts = "quantize" in one.name or one.values.get("PASS") == "cast"
        if casts and not one.stem.endswith("_mx"):
            check_conversions(one, capability)
        if one.stem.startswith("step") or one.stem in OF_FP32 or "source" in one.values:
            check_rounding(one)
        if one.stem.endswith("_mx"):
            assert not re.search(r"\bfma\.", one.compiled.asm["ptx"])
            check_offsets(one.compiled.asm["ttir"])
        if one.stem.startswith("step"):
            check_random_bits(one)
        if one.stem in MOVING or one.stem in OF_FP32:
            check_offsets(one.compiled.asm["ttir"])
        assert local_bytes(one.compiled) == 0, "registers are spilled"


def check_accesses(one: Launch) -> None:
    ptx, source = one.compiled.asm["ptx"], one.values.get("source")
    if one.stem.startswith("norm"):  # a lane has eight elements of a row, 8 bytes of FP8
        row_wise = one.stem in ("norm_rows", "norm_backward")
        assert not row_wise or counted(ptx, "ld").keys() & WORDS
        writes = one.stem == "norm_backward" or one.values.get("PASS") == "cast"
        assert not writes or counted(ptx, "st").keys() & (WORDS | {"v2.b32"})
        return
    if (source is not None and source.rstd is not None) or in_parts(one):
        loads = counted(ptx, "ld")
        assert loads.keys() & WORDS
        assert loads.keys() <= WORDS | {"b32", "b64"}, f"narrow accesses, {loads}"
        return
    *arrays, paths, scalars = MOVING.get(one.stem, ("", "", 0, 99))
    for operation, names in zip(("ld", "st"), arrays, strict=True):
        if names is None:
            continue
        counts = counted(ptx, operation)
        narrow = {width: count for width, count in counts.items() if width not in WORDS}
        wide = sum(counts.values()) - sum(narrow.values())
        # The compiler unrolls the loop of whole chunks, that of the last one, both or none.
        unrolled = itertools.product((1, one.values.get("ROUNDS", 1)), repeat=paths)
        allowed = {words(one, operation, names) * sum(times) for times in unrolled}
        if operation == "ld" and one.stem == "quantize_tiles" and one.values["BY"] == "row":
            allowed = {n + 4 for n in allowed}  # the maxima of its rows
        assert wide in allowed, f"{operation}: {wide} of 16 bytes, not {allowed}; {counts}"
        if one.values.get("FIRST") == "codes":  # of both states, in full blocks and the last one
            assert narrow.pop("v2.b32", 0) == 4, f"{operation}: 8 bytes, {counts}"
        assert set(narrow) <= {"b32", "b64"}, f"{operation}: narrow accesses, {counts}"
        assert sum(narrow.values()) <= scalars, f"{operation}: {counts}"


def in_parts(one: Launch) -> bool:
    """Whether values are computed again for each cast, part by part: no fixed number of loads."""
    by_results = one.stem in ("quantize_rows", "quantize_tiles", "tile_maxima")
    return by_results and not one.values["source"].is_plain()


def arrays(v: dict[str, Any], name: str) -> list[torch.Tensor | None]:
    """All that a source reads, or one kind of results, of x's size."""
    if name == "source":
        return [v[name].x, v[name].up, v[name].g]
    return [getattr(r, name) for r in v["results"]] if "results" in v else [v.get(name)]


def words(one: Launch, operation: str, names: str) -> int:
    """Of 16 bytes that a thread has of a block of these arrays."""
    v, step = one.values, one.stem == "step"
    # An update reads no weights that it computes from an FP32 master, Muon's none at all.
    computed = step and (v["RULE"] == "muon_direction" or v["master_ptr"] is not None)
    if computed and operation == "ld" and not v["REMAINDER"]:
        names = names.removeprefix("param_ptr ")
    sizes = [t.element_size() for name in names.split() for t in arrays(v, name) if t is not None]
    tile = [v[side] for side in ("TILE", "TILE", "TILE_M", "TILE_K") if side in v]
    elements = math.prod(tile or [v.get("BLOCK", 128 * v.get("GROUPS", 0))])
    # A thread has 8 elements of an update: states in 8 bits are 8 bytes, in one access.
    width = sum(size for size in sizes if size > 1 or not step)
    return elements * width // (16 * 32 * v.get("num_warps", 4))


def check_conversions(one: Launch, capability: int) -> None:
    """One rounding, by the instruction made for it or in integers; never a detour through fp16."""
    conversions = set(re.findall(r"\bcvt\.[a-z0-9.]+", one.compiled.asm["ptx"]))
    to = one.values["to"].Q.value if "to" in one.values else None
    to_fp16 = {c for c in conversions if re.search(r"\.f16(x2)?\.f32", c)}
    assert bool(to_fp16) is (to == "fp16")
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
    arrays += one.values.get("STOCHASTIC", False)
    addresses = 8
    assert len(products) <= 2 * 10 * 2 * arrays + addresses
    assert bool(arrays) is (len(products) > addresses)
