"""Every kernel of triton_kernels (but gemm) with dtypes and constants that it is launched with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from emulated.triton_compiled import helpers  # noqa: F401 (skips where nothing can be compiled)

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

POINTERS = {
    "fp64": "*fp64", "fp32": "*fp32", "bf16": "*u16", "fp16": "*u16", "e4m3": "*u8", "e5m2": "*u8",
    "int16": "*u16",
}  # fmt: skip
THREADS = 128


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


def amax_case(x: str) -> Kernel:
    types = {"x_ptr": POINTERS[x], "amax_ptr": "*i32", "n": "i32"}
    constants = {"given_ptr": None, "FORMAT": x, "SOFT_CAST": False, "BLOCK": amax.BLOCK}
    loads = accesses(amax.BLOCK, x)
    return twice(Kernel(f"amax {x}", amax.amax_kernel, types, constants, loads))


def quantize_case(x: str, q: str, capability: int, source: str, transpose: bool) -> Kernel:
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


def dequantize_case(q: str, out: str, capability: int) -> Kernel:
    types = {
        "q_ptr": POINTERS[q], "scale_inv_ptr": "*fp32", "out_ptr": POINTERS[out], "n": "i32",
    }  # fmt: skip
    size = dequantize.BLOCK
    constants = {"Q": q, "OUT": out, "SOFT_CAST": soft(capability, q), "BLOCK": size}
    kernel, label = dequantize.dequantize_kernel, f"dequantize {q} {out}"
    return twice(Kernel(label, kernel, types, constants, accesses(size, q), accesses(size, out)))


def block_cases(x: str, q: str, capability: int) -> list[Kernel]:
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
    cases = [
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
        cases.append(Kernel(
            label, blocks.quantize_tiles_kernel, common | {"M": "i32"} | types,
            constants | tile | {"BY": by} | none, accesses(half, x) + maxima,
            accesses(half, q) * (2 if types else 1), options,
        ))  # fmt: skip
    return cases


def dequantize_blocks_case(q: str, out: str, by_row: bool, capability: int) -> Kernel:
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


def gradient_cases(g: str, counts: bool) -> list[Kernel]:
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


def update_case(
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


def constants_case(op: str, kernel: Any, numbers: tuple[str, ...], **flags: bool) -> Kernel:
    return Kernel(
        f"{op} constants", kernel,
        {"step_ptr": "*fp32", "found_inf_ptr": "*fp32", "lr_ptr": "*fp32", "table_ptr": "*fp64",
         "count": "i32", **dict.fromkeys(numbers, "fp64")},
        {"COLUMNS": step.COLUMNS, "BLOCK": step.STEPS_BLOCK, **flags}, options=step.OPTIONS,
    )  # fmt: skip


def scalar_cases() -> list[Kernel]:
    """The kernels of a few scalars each."""
    flags = ("scale_ptr", "found_inf_ptr", "underflow_ptr", "min_scale", "max_scale")
    trackers = ("growth_tracker_ptr", "hysteresis_tracker_ptr")
    return [
        constants_case("adamw", adamw.adamw_constants_kernel,
                      ("lr", "beta1", "beta2", "eps", "weight_decay"), DECOUPLED=True),
        constants_case("sgd", sgd.sgd_constants_kernel,
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


WITH_MASTER = update_case("adamw", "bf16", "bf16", ("fp32", "fp32"), "fp32")


def update_cases() -> list[Kernel]:
    """Every kind of param, state and master, and every kernel with the most random bits."""
    moments, narrow = ("fp32", "fp32"), ("bf16", "bf16")
    return [
        WITH_MASTER,
        update_case("adamw", "bf16", "fp32", moments, "fp32"),
        update_case("adamw", "bf16", "bf16", moments, "int16"),
        update_case("adamw", "fp32", "fp32", moments),
        update_case("adamw", "fp64", "fp64", ("fp64", "fp64"), DECOUPLED=False),
        update_case("adamw", "bf16", "bf16", narrow, STOCHASTIC=True),
        update_case("adamw", "bf16", "bf16", narrow, "int16"),
        update_case("adamw", "fp32", "fp32", narrow),
        update_case("sgd", "fp32", "fp32", ("fp32",)),
        update_case("sgd", "fp64", "fp64", ("fp64",), NESTEROV=False),
        update_case("sgd", "bf16", "bf16", (), "int16"),
        update_case("sgd", "bf16", "bf16", ("bf16",), STOCHASTIC=True),
    ]


def cases_for(capability: int) -> list[Kernel]:
    """fp16 is left out where bf16 takes the same way; E5M2 of fp32 likewise."""
    return [
        amax_case("fp32"),
        amax_case("bf16"),
        *(quantize_case(x, q, capability, "given", t) for x, q in (
            ("fp32", "e4m3"), ("bf16", "e4m3"), ("bf16", "e5m2"), ("fp32", "bf16")
        ) for t in (False, True)),
        quantize_case("bf16", "e4m3", capability, "from amax", False),
        quantize_case("fp32", "fp16", capability, "one", False),
        *(dequantize_case(q, o, capability) for q, o in (("e4m3", "bf16"), ("e5m2", "fp32"))),
        *block_cases("bf16", "e4m3", capability),
        *block_cases("fp32", "e5m2", capability),
        dequantize_blocks_case("e4m3", "bf16", False, capability),
        dequantize_blocks_case("e5m2", "fp32", True, capability),
        *(case for g in ("fp32", "bf16", "fp64") for case in gradient_cases(g, False)),
        *(case for g in ("bf16", "fp64") for case in gradient_cases(g, True)),
        *update_cases(),
        *scalar_cases(),
    ]  # fmt: skip
