"""What the machine code of each instance of the Hopper GEMM must show, as its template says, and
that of FP4 on the GPUs that have instructions for it."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

# csrc/cuda/gemm/config/tile_configs.h: enum class Accumulate
ACCUMULATE = ("direct", "promoted", "scaled")
FP8 = ("E4m3", "E5m2")
MIXES = tuple((a, b) for a in FP8 for b in FP8)
SIXTEEN = (("Bf16", "Bf16"), ("Fp16", "Fp16"))
TILE = re.compile(r"gemm_kernel<.*Tile<(\w+), (\w+), (\d), (\d), (\d+), (\d+), (\d), (\d), (\d)>")
ROW = re.compile(r"\{(true|false), Accumulate::(\w+), (\d+), (\d+), (\d+), (\d+)\}")


class Instance(NamedTuple):
    """The template arguments of Tile, csrc/cuda/gemm/kernel/gemm_sm90.cuh; majors: 0 for K."""

    a: str
    b: str
    a_major: int
    b_major: int
    block_m: int
    block_n: int
    consumers: int
    cluster: int
    accumulate: str


def instance(name: str) -> Instance | None:
    """Of a kernel's demangled name without the names of enums; None: it is no GEMM kernel."""
    found = TILE.search(name)
    if found is None:
        return None
    *numbers, accumulate = map(int, found.groups()[2:])
    return Instance(found[1], found[2], *numbers, ACCUMULATE[accumulate])


def expected(rows: Path) -> set[Instance]:
    """Every instance that the table in tile_configs.h stands for."""
    instances = set()
    for fp8, accumulate, *sizes in ROW.findall(rows.read_text()):
        layouts = [(0, 0)] if fp8 == "true" else [(a, b) for a in (0, 1) for b in (0, 1)]
        for types in MIXES if fp8 == "true" else SIXTEEN:
            for majors in layouts:
                instances.add(Instance(*types, *majors, *map(int, sizes), accumulate))
    return instances


def wrong(it: Instance, sass: str) -> list[str]:
    """What the code of an instance lacks, or has and must not have."""
    fp8 = it.a in FP8
    multiply = f"QGMMA.64x{it.block_n}x32" if fp8 else f"HGMMA.64x{it.block_n}x16"
    must = {multiply: True, "UTMALDG": True, "UTMASTG": True, "UTMAREDG": True, "STSM": True}
    must |= {"HMMA": False, "HGMMA" if fp8 else "QGMMA": False}
    must |= {"MULTICAST": it.cluster > 1, "USETMAXREG": it.consumers == 2}
    must["LDS"] = it.accumulate == "scaled"  # scales of columns; all else goes through TMA
    reasons = [
        f"{'no' if there else 'there is'} {word} in the machine code"
        for word, there in must.items()
        if (re.search(rf"\b{word}|\.{word}", sass) is not None) is not there
    ]
    return reasons + _serialised(it, sass) + _unpromoted(it, sass) + _slow(it, sass)


def no_fp4(name: str, sass: str) -> list[str]:
    """Built for a family of GPUs (10.x, 12.x), the casts to and from FP4 use its instructions."""
    wanted = {"quantize_mx_kernel": "F2FP.SATFINITE.E2M1", "dequantize_mx_kernel": "F2FP.F16.E2M1"}
    word = wanted.get(name.split("<")[0])
    return [f"no {word} in the machine code"] if word is not None and word not in sass else []


def _serialised(it: Instance, sass: str) -> list[str]:
    """The products of one chunk of K are issued together: a wait comes after all of them."""
    together = 4 * (it.block_m // it.consumers // 64 if it.accumulate == "direct" else 1)
    issued = 0
    for token in re.findall(r"\b[HQ]GMMA\b|WARPGROUP\.DEPBAR", sass):
        if token != "WARPGROUP.DEPBAR":
            issued += 1
        elif issued % together:
            return [f"a wait after {issued} wgmmas, which belong together in {together}s"]
    return []


def _slow(it: Instance, sass: str) -> list[str]:
    """Fences of all memory and invalidations of the L1 cache belong to the barriers of a cluster,
    not to each chunk; and one thread loads by TMA, without a loop over the lanes."""
    barriers = 2 if it.cluster > 1 else 0
    words = r"MEMBAR\.\w+\.GPU|UCGABAR_\w+|CCTL\.IVALL|UTM[A-Z]+|[HQ]GMMA|SYNCS|BRA\.U\.ANY"
    found = re.findall(words, sass)
    pairs = list(pairwise(found))
    fences = [after for word, after in pairs if word.startswith("MEMBAR")]
    drops = [before for before, word in pairs if word == "CCTL.IVALL"]
    reasons = []
    if fences != ["UCGABAR_ARV"] * barriers:
        reasons.append(f"MEMBAR of the GPU before {fences}, {barriers} cluster barriers")
    if drops != ["UCGABAR_WAIT"] * barriers:
        reasons.append(f"CCTL.IVALL after {drops}, {barriers} cluster barriers")
    if ("UTMALDG", "BRA.U.ANY") in pairs:
        reasons.append("a loop around UTMALDG")
    return reasons


def _unpromoted(it: Instance, sass: str) -> list[str]:
    """Promotion adds every accumulator of a chunk to another register."""
    if it.accumulate == "direct":
        return []
    word, needed = ("FADD" if it.accumulate == "promoted" else "FFMA"), it.block_n // 2
    adds = len(re.findall(rf"\b{word}\b", sass))
    return [] if adds >= needed else [f"{adds} {word}, promotion takes {needed}"]
