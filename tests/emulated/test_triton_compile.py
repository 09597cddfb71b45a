"""The Triton kernels compiled ahead of time, without a GPU, and what their PTX and SASS show.

For compute capability 8.0, 8.9, 9.0, 10.0 and 12.0: 16-byte loads and stores, 64-bit offsets, no
spills, and the instructions that the numerics need. What runs is checked in test_triton.py.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from cases import name

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (pip install triton)", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mixprec.triton_kernels import (
    adamw,
    amax,
    dequantize,
    grad_stats,
    quantize,
    scale,
    sgd,
    step,
    unscale,
)
from mixprec.triton_kernels import quantize_blocks as blocks

CAPABILITIES = (80, 89, 90, 100, 120)
POINTERS = {
    "fp64": "*fp64", "fp32": "*fp32", "bf16": "*u16", "fp16": "*u16", "e4m3": "*u8", "e5m2": "*u8",
    "int16": "*u16",
}  # fmt: skip
THREADS = 128
SIZES = ("n", "M", "K")  # arguments that are multiples of 16 here, as Triton finds out at a launch


@dataclass(frozen=True)
class Kernel:
    """A kernel as it is launched for some dtypes. loads, stores: its 16-byte accesses a thread."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    loads: int = 0
    stores: int = 0
    options: dict[str, Any] = field(default_factory=dict)


def accesses(elements: int, *formats: str) -> int:
    """16-byte accesses a thread to blocks of so many elements."""
    widths = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "int16": 2, "e4m3": 1, "e5m2": 1}
    return sum(elements * widths[f] for f in formats) // (16 * THREADS)


def twice(kernel: Kernel) -> Kernel:
    """Full blocks and the last one are two paths through a kernel."""
    changed = {"loads": 2 * kernel.loads, "stores": 2 * kernel.stores}
    return Kernel(**(vars(kernel) | changed))


def soft(capability: int, *formats: str) -> bool:
    return capability < 89 and bool({"e4m3", "e5m2"} & set(formats))


def amax_row(x: str, _: int) -> Kernel:
    types = {"x_ptr": POINTERS[x], "amax_ptr": "*i32", "n": "i32"}
    constants = {"given_ptr": None, "FORMAT": x, "SOFT_CAST": False, "BLOCK": amax.BLOCK}
    loads = accesses(amax.BLOCK, x)
    return twice(Kernel(f"amax {x}", amax.amax_kernel, types, constants, loads))


def quantize_row(x: str, q: str, capability: int, source: str, transpose: bool) -> Kernel:
    types = {
        "x_ptr": POINTERS[x], "q_ptr": POINTERS[q], "amax_ptr": "*i32", "scale_inv_ptr": "*fp32",
        "fmt_max": "fp32",
    }  # fmt: skip
    constants: dict[str, Any] = {
        "X": x, "Q": q, "SCALE": source, "POWER_OF_TWO": True, "SOFT_CAST": soft(capability, x, q),
        "scale_ptr": None,
    }  # fmt: skip
    if source == "given":
        types["scale_ptr"] = "*fp32"
    if transpose:
        types |= {"q_t_ptr": POINTERS[q], "M": "i32", "K": "i32"}
        constants |= {"TILE_M": quantize.TILE_M, "TILE_K": quantize.TILE_K}
        size = quantize.TILE_M * quantize.TILE_K
        kernel, label = quantize.quantize_transpose_kernel, f"quantize and transpose {x} {q}"
        return Kernel(label, kernel, types, constants, accesses(size, x), accesses(size, q, q))
    types["n"] = "i32"
    size = constants["BLOCK"] = quantize.BLOCK
    kernel, label = quantize.quantize_kernel, f"quantize {x} {q} {source}"
    return twice(Kernel(label, kernel, types, constants, accesses(size, x), accesses(size, q)))


def dequantize_row(q: str, out: str, capability: int) -> Kernel:
    types = {
        "q_ptr": POINTERS[q], "scale_inv_ptr": "*fp32", "out_ptr": POINTERS[out], "n": "i32",
    }  # fmt: skip
    size = dequantize.BLOCK
    constants = {"Q": q, "OUT": out, "SOFT_CAST": soft(capability, q), "BLOCK": size}
    kernel, label = dequantize.dequantize_kernel, f"dequantize {q} {out}"
    return twice(Kernel(label, kernel, types, constants, accesses(size, q), accesses(size, out)))


def block_rows(x: str, q: str, capability: int) -> list[Kernel]:
    """The kernels of quantize with a scale per row or block, and back."""
    casts = {"X": x, "SOFT_CAST": soft(capability, x, q)}
    constants = {**casts, "Q": q, "POWER_OF_TWO": True}
    tile = {"TILE": blocks.TILE}
    options = {"num_warps": blocks.WARPS}
    half = blocks.TILE * blocks.TILE * THREADS // (32 * blocks.WARPS)  # of a thread of so many
    row = blocks.ROW_BLOCK * THREADS // (32 * blocks.WARPS)
    common = {"x_ptr": POINTERS[x], "q_ptr": POINTERS[q], "scale_inv_ptr": "*fp32",
              "amax_ptr": "*i32", "K": "i32", "fmt_max": "fp32"}  # fmt: skip
    absent = ("q_t_ptr", "scale_inv_t_ptr", "row_amax_ptr", "column_amax_ptr")
    here = {"q_t_ptr": POINTERS[q], "scale_inv_t_ptr": "*fp32"}
    lines = {"row_amax_ptr": "*i32", "column_amax_ptr": "*i32"}
    rows = [
        Kernel(f"quantize rows {x} {q}", blocks.quantize_rows_kernel, common,
               constants | {"BLOCK": blocks.ROW_BLOCK}, 2 * accesses(row, x), accesses(row, q),
               options),
        Kernel(f"maxima of tiles {x}", blocks.tile_maxima_kernel,
               {"x_ptr": POINTERS[x], "M": "i32", "K": "i32", **lines}, casts | tile,
               accesses(half, x), 0, options),
    ]  # fmt: skip
    for by, types in (("row", here | lines), ("block1x128", here), ("block128x128", here),
                      ("block1x128", {})):  # fmt: skip
        label = f"quantize {by} {x} {q}" + (" transpose" if types else "")
        none = {name: None for name in absent if name not in types}
        maxima = 4 if by == "row" else 0  # 16-byte loads of those of rows and columns
        rows.append(Kernel(
            label, blocks.quantize_tiles_kernel, common | {"M": "i32"} | types,
            constants | tile | {"BY": by} | none, accesses(half, x) + maxima,
            accesses(half, q) * (2 if types else 1), options,
        ))  # fmt: skip
    return rows


def dequantize_blocks_row(q: str, out: str, by_row: bool, capability: int) -> Kernel:
    types = {
        "q_ptr": POINTERS[q], "scale_inv_ptr": "*fp32", "out_ptr": POINTERS[out], "M": "i32",
        "K": "i32", "stride_row": "i32", "stride_column": "i32",
    }  # fmt: skip
    constants = {
        "Q": q, "OUT": out, "ROWS": 1 if by_row else 128, "BY_ROW": by_row,
        "SOFT_CAST": soft(capability, q), "TILE_M": dequantize.TILE_M, "TILE_K": dequantize.TILE_K,
    }  # fmt: skip
    size = dequantize.TILE_M * dequantize.TILE_K
    kernel, label = dequantize.dequantize_blocks_kernel, f"dequantize blocks {q} {out} {by_row}"
    return Kernel(label, kernel, types, constants, accesses(size, q), accesses(size, out))


def gradient_rows(g: str, counts: bool) -> list[Kernel]:
    types = {"grad_ptr": POINTERS[g], "inv_scale_ptr": "*fp32", "found_inf_ptr": "*fp32"}
    constants: dict[str, Any] = {"G": g, "SOFT_CAST": False}
    if counts:
        types["counts_ptr"] = "*i64"
    else:
        constants["counts_ptr"] = None
    size = accesses(unscale.BLOCK, g)
    blocks = {"BLOCK": grad_stats.BLOCK, "ROUNDS": grad_stats.ROUNDS}
    label = g + (" counts" if counts else "")
    return [
        twice(Kernel(f"unscale {label}", unscale.unscale_kernel, types | {"n": "i32"},
                     constants | {"BLOCK": unscale.BLOCK}, size, size)),
        twice(Kernel(f"grad_stats {label}", grad_stats.grad_stats_kernel,
                     types | {"partial_ptr": "*fp64", "n": "i32"}, constants | blocks,
                     accesses(grad_stats.BLOCK, g))),
    ]  # fmt: skip


def update_row(
    op: str, p: str, g: str, states: tuple[str, ...], master: str | None = None, **flags: bool
) -> Kernel:
    """A kernel of adamw_ or sgd_; states: formats of the moments, or of the buffer or none."""
    kernel = {"adamw": adamw.adamw_kernel, "sgd": sgd.sgd_kernel}[op]
    names = {"adamw": ("exp_avg_ptr", "exp_avg_sq_ptr"), "sgd": ("buffer_ptr",)}[op]
    letters = {"adamw": ("M", "V"), "sgd": ("B",)}[op]
    formats = states or (None,)
    flags = {{"adamw": "DECOUPLED", "sgd": "NESTEROV"}[op]: True, **flags}
    every = (*zip(names, formats, strict=True), ("master_ptr", master))
    types = {
        "param_ptr": POINTERS[p], "grad_ptr": POINTERS[g], "table_ptr": "*fp64",
        "max_value": "fp64", "seed": "i64", "index": "i32", "n": "i32",
        **dict.fromkeys(("inv_scale_ptr", "clip_ptr", "found_inf_ptr"), "*fp32"),
        **{pointer: POINTERS[f] for pointer, f in every if f is not None},
    }  # fmt: skip
    constants = {
        "P": p, "G": g, "REMAINDER": master == "int16", "STOCHASTIC": False, "MAXIMIZE": False,
        "SOFT_CAST": False, "BLOCK": step.BLOCK, **dict(zip(letters, formats, strict=True)),
        **{pointer: None for pointer, f in every if f is None}, **flags,
    }  # fmt: skip
    kept = [*states, *([master] if master else [])]
    read = [*kept, g, *([p] if master in (None, "int16") else [])]
    loads, stores = accesses(step.BLOCK, *read), accesses(step.BLOCK, *kept, p)
    words = [op, p, g, *states, *([f"master {master}"] if master else []), *flags]
    return twice(Kernel(" ".join(words), kernel, types, constants, loads, stores, step.OPTIONS))


def constants_row(op: str, kernel: Any, numbers: tuple[str, ...], **flags: bool) -> Kernel:
    return Kernel(
        f"{op} constants", kernel,
        {"step_ptr": "*fp32", "found_inf_ptr": "*fp32", "lr_ptr": "*fp32", "table_ptr": "*fp64",
         "count": "i32", **dict.fromkeys(numbers, "fp64")},
        {"COLUMNS": step.COLUMNS, "BLOCK": step.STEPS_BLOCK, **flags}, options=step.OPTIONS,
    )  # fmt: skip


def small_rows() -> list[Kernel]:
    """The kernels of a few scalars each."""
    flags = ("scale_ptr", "found_inf_ptr", "underflow_ptr", "min_scale", "max_scale")
    trackers = ("growth_tracker_ptr", "hysteresis_tracker_ptr")
    return [
        constants_row("adamw", adamw.adamw_constants_kernel,
                      ("lr", "beta1", "beta2", "eps", "weight_decay"), DECOUPLED=True),
        constants_row("sgd", sgd.sgd_constants_kernel,
                      ("lr", "momentum", "dampening", "weight_decay")),
        Kernel("sum of grad_stats", grad_stats.sum_kernel,
               {"partial_ptr": "*fp64", "count": "i32", "sum_ptr": "*fp64"},
               {"BLOCK": grad_stats.SUM_BLOCK}),
        Kernel("scale_from_amax", scale.scale_from_amax_kernel,
               {"scale_ptr": "*fp32", "scale_inv_ptr": "*fp32", "amax_ptr": "*fp32", "n": "i32",
                "fmt_max": "fp32", "two_to_minus_margin": "fp32"},
               {"POWER_OF_TWO": True, "BLOCK": scale.BLOCK},
               2 * accesses(scale.BLOCK, "fp32"), 2 * accesses(scale.BLOCK, "fp32")),
        Kernel("inv_scale", scale.inv_scale_kernel, {"scale_ptr": "*fp32", "out_ptr": "*fp32"}, {}),
        Kernel("clip_coef", scale.clip_coef_kernel,
               {"sum_sq_ptr": "*fp64", "count": "i32", "out_ptr": "*fp32", "max_norm": "fp64"},
               {"BLOCK": scale.BLOCK}),
        Kernel("update_scale", scale.update_scale_kernel,
               {**{f: "*fp32" if f.endswith("ptr") else "fp32" for f in flags},
                **dict.fromkeys(trackers, "*i32"), "counter_ptr": "*i64", "growth_factor": "fp64",
                "backoff_factor": "fp64", "growth_interval": "i32", "hysteresis": "i32",
                "grow_on_underflow": "fp32"}, {"EARLY": scale.EARLY}),
    ]  # fmt: skip


MASTER_ROW = update_row("adamw", "bf16", "bf16", ("fp32", "fp32"), "fp32")


def update_rows() -> list[Kernel]:
    """Every kind of param, state and master, and every kernel with the most random bits."""
    moments, narrow = ("fp32", "fp32"), ("bf16", "bf16")
    return [
        MASTER_ROW,
        update_row("adamw", "bf16", "fp32", moments, "fp32"),
        update_row("adamw", "bf16", "bf16", moments, "int16"),
        update_row("adamw", "fp32", "fp32", moments),
        update_row("adamw", "fp64", "fp64", ("fp64", "fp64"), DECOUPLED=False),
        update_row("adamw", "bf16", "bf16", narrow, STOCHASTIC=True),
        update_row("adamw", "bf16", "bf16", narrow, "int16"),
        update_row("adamw", "fp32", "fp32", narrow),
        update_row("sgd", "fp32", "fp32", ("fp32",)),
        update_row("sgd", "fp64", "fp64", ("fp64",), NESTEROV=False),
        update_row("sgd", "bf16", "bf16", (), "int16"),
        update_row("sgd", "bf16", "bf16", ("bf16",), STOCHASTIC=True),
    ]


def rows(capability: int) -> list[Kernel]:
    """fp16 is left out where bf16 takes the same way; E5M2 of fp32 likewise."""
    return [
        amax_row("fp32", capability),
        amax_row("bf16", capability),
        *(quantize_row(x, q, capability, "given", t) for x, q in (
            ("fp32", "e4m3"), ("bf16", "e4m3"), ("bf16", "e5m2"), ("fp32", "bf16")
        ) for t in (False, True)),
        quantize_row("bf16", "e4m3", capability, "from amax", False),
        quantize_row("fp32", "fp16", capability, "one", False),
        *(dequantize_row(q, o, capability) for q, o in (("e4m3", "bf16"), ("e5m2", "fp32"))),
        *block_rows("bf16", "e4m3", capability),
        *block_rows("fp32", "e5m2", capability),
        dequantize_blocks_row("e4m3", "bf16", False, capability),
        dequantize_blocks_row("e5m2", "fp32", True, capability),
        *(row for g in ("fp32", "bf16", "fp64") for row in gradient_rows(g, False)),
        *(row for g in ("bf16", "fp64") for row in gradient_rows(g, True)),
        *update_rows(),
        *small_rows(),
    ]  # fmt: skip


LABELS = [row.name for row in rows(90)]


def build(row: Kernel, capability: int, aligned: bool = True) -> Any:
    """Compile a row; aligned: pointers and sizes are multiples of 16, as a launch would see."""
    names = [p.name for p in row.kernel.params]
    assert set(names) == set(row.types) | set(row.constants), "the row names other arguments"
    signature = {n: row.types.get(n, "constexpr") for n in names}
    constants = {(i,): row.constants[n] for i, n in enumerate(names) if n not in row.types}
    multiples = [
        i for i, n in enumerate(names)
        if n in row.types and (signature[n].startswith("*") or n in SIZES)
    ]  # fmt: skip
    attributes = {(i,): [["tt.divisibility", 16]] for i in multiples if aligned}
    source = ASTSource(row.kernel, signature, constants, attributes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=dict(row.options))


@cache
def compiled(label: str, capability: int) -> tuple[Kernel, Any]:
    row = next(r for r in rows(capability) if r.name == label)
    return row, build(row, capability)


def counted(ptx: str, operation: str) -> dict[str, int]:
    """How often each width of ld.global or st.global stands in the PTX."""
    counts: dict[str, int] = {}
    for word in re.findall(rf"\b{operation}\.global((?:\.[a-z0-9_]+)+)", ptx):
        width = ".".join(w for w in word.split(".") if re.fullmatch(r"v\d|[bufs]\d+", w))
        counts[width] = counts.get(width, 0) + 1
    return counts


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("label", LABELS)
def test_ptx(label: str, capability: int) -> None:
    row, kernel = compiled(label, capability)
    ptx = kernel.asm["ptx"]
    assert ".local" not in ptx, "something lies in local memory"
    approximate = re.findall(r"\b\w+\.approx\S*|\bdiv\.full\S*|\S+\.ftz\S*", ptx)
    assert not approximate, f"not IEEE: {approximate}"
    assert kernel.metadata.shared <= 48 * 1024, "more than every GPU has without asking"
    for operation, expected in (("ld", row.loads), ("st", row.stores)):
        counts = counted(ptx, operation)
        wide = sum(counts.pop(w, 0) for w in ("v4.b32", "v2.b64"))
        unrolled = row.constants.get("ROUNDS", 1)  # by the compiler, or not
        assert wide in (expected, unrolled * expected), f"{operation}: {wide} of 16 bytes; {counts}"
        assert set(counts) <= {"b32", "b64"}, f"{operation}: narrow accesses, {counts}"
        if row.loads:
            assert sum(counts.values()) <= 24, f"{operation}: {counts} for a few scalars"


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("label", [x for x in LABELS if "quantize" in x])
def test_fp8_conversions(label: str, capability: int) -> None:
    """One rounding, by the instruction made for it or in integers; never a detour through fp16."""
    row, kernel = compiled(label, capability)
    conversions = set(re.findall(r"\bcvt\.[a-z0-9.]+", kernel.asm["ptx"]))
    to = row.constants.get("Q") if not label.startswith("dequantize") else None
    to_fp16 = {c for c in conversions if re.search(r"\.f16(x2)?\.f32", c)}
    assert bool(to_fp16) is (to == "fp16")
    native = {f"cvt.rn.satfinite.{to}x2.f32"} if to in ("e4m3", "e5m2") else set()
    expected = native if capability >= 89 else set()
    assert {c for c in conversions if re.search(r"\.e[45]m[32]x2\.", c)} == expected


UPDATES = [x for x in LABELS if x.split()[0] in ("adamw", "sgd")]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("label", UPDATES)
def test_updates_round_every_operation(label: str, capability: int) -> None:
    ptx = compiled(label, capability)[1].asm["ptx"]
    assert "fma." not in ptx
    assert not re.search(r"\b(mul|add|sub)\.f(32|64)", ptx), "ptxas may fuse what has no .rn"
    real = "f64" if "fp64" in label or "constants" in label else "f32"
    instructions = {"adamw": ("sqrt", "div", "mul", "sub"), "sgd": ("mul", "add", "sub")}
    if label == "sgd constants":
        assert "sub.rn.f64" in ptx
        return
    for instruction in instructions[label.split()[0]]:
        assert f"{instruction}.rn.{real}" in ptx


@pytest.mark.parametrize("label", UPDATES)
def test_one_philox_serves_eight_elements(label: str) -> None:
    """A thread has eight elements: ten rounds of two products for each array that is rounded at
    random, in full blocks and in the last one, and no more (streams share some of the first)."""
    row, kernel = compiled(label, 90)
    products = re.findall(r"\bmul\.(?:wide|hi)\.u32", kernel.asm["ptx"])
    arrays = sum(row.constants.get(x) == "bf16" for x in ("M", "V", "B"))
    arrays += row.constants.get("STOCHASTIC", False)
    addresses = 8
    assert len(products) <= 2 * 10 * 2 * arrays + addresses
    assert bool(arrays) is (len(products) > addresses)


@pytest.mark.parametrize("label", [x for x in LABELS if x not in ("inv_scale", "clip_coef")])
def test_offsets_have_64_bits(label: str) -> None:
    """Every array of unbounded size is addressed by int64, as the IR before any optimisation
    shows it. (Steps and partial sums are counted by int32: 2^31 of either fill no machine.)"""
    row, kernel = compiled(label, 90)
    ttir = kernel.asm["ttir"]
    offsets = re.findall(r"tt\.addptr .*, tensor<[0-9x]*x(i\d+)>", ttir)
    if row.loads:
        assert offsets
        assert set(offsets) == {"i64"}


@pytest.mark.parametrize("row", [amax_row("bf16", 90), MASTER_ROW], ids=name)
def test_more_elements_than_an_int32_counts(row: Kernel) -> None:
    """Then n is passed as int64, and the accesses are as wide."""
    kernel = build(Kernel(**(vars(row) | {"types": row.types | {"n": "i64"}})), 90)
    counts = counted(kernel.asm["ptx"], "ld")
    assert counts["v4.b32"] == row.loads


@pytest.mark.parametrize(
    "label", [x for x in LABELS if x.split()[0] in ("adamw", "sgd", "quantize", "grad_stats")]
)
def test_sass_spills_nothing(label: str) -> None:
    """Of the kernels with the most registers, on 9.0 only: disassembling takes half a second."""
    sass = compiled(label, 90)[1].asm["sass"]
    assert "EXIT" in sass
    assert not re.findall(r"\b(?:LDL|STL)\b", sass)


@pytest.mark.parametrize("label", LABELS)
def test_numbers_reach_the_kernel_in_64_bits(label: str) -> None:
    """Triton passes a Python number as fp32, or as the narrowest integer, unless the parameter
    says otherwise."""
    row = compiled(label, 90)[0]
    for parameter in row.kernel.params:
        declared = row.types.get(parameter.name)
        if declared in ("fp32", "fp64", "i64"):
            assert parameter.annotation_type == ("" if declared == "fp32" else declared)


@pytest.mark.parametrize("row", [amax_row("bf16", 90), MASTER_ROW], ids=name)
def test_the_checks_see_narrow_accesses(row: Kernel) -> None:
    """Without alignment the same kernels load element by element, and the count shows it."""
    ptx = build(row, 90, aligned=False).asm["ptx"]
    counts = counted(ptx, "ld")
    assert "b16" in counts
    assert counts.get("v4.b32", 0) < row.loads
