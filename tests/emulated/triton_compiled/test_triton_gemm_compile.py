"""The Triton GEMM compiled ahead of time, without a GPU, with the tiles that would be used.

For compute capability 8.0, 8.6, 8.9, 9.0, 10.0 and 12.0: the tensor core instruction of each, sums
of FP8 that are promoted to FP32 registers, shared memory within the limit, 64-bit offsets, no
spills. What the kernels compute is checked in triton_interpreter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
from cases import name
from emulated.triton_compiled.helpers import compile_for, local_bytes, pointers_of

from mixprec.triton_kernels import configs, gemm
from mixprec.triton_kernels.gemm_kernel import gemm_kernel, reduce_kernel

CAPABILITIES = (80, 86, 89, 90, 100, 120)
POINTERS = {
    "fp16": "*fp16", "bf16": "*bf16", "fp32": "*fp32", "e4m3": "*fp8e4nv", "e5m2": "*fp8e5",
}  # fmt: skip
MULTIPLES = ("M", "N", "K", "lda", "ldb", "out_m")  # of 16 where a launch finds them so
FAMILIES = {
    capability: tuple(kind for arch, kind in configs.TILES if arch == capability)
    for capability in CAPABILITIES
}
SHAPES = {"thin": (64, 4096), "small": (1024, 1024), "large": (8192, 8192)}
EVERY = [(c, f, s) for c in CAPABILITIES for f in FAMILIES[c] for s in SHAPES]


@dataclass(frozen=True)
class Build:
    """One instance of the kernel: a tile config of configs.py, and what the arguments decide."""

    capability: int
    family: str
    size: str
    a: str = ""  # formats; empty: bf16, or E4M3 and E5M2
    b: str = ""
    a_k_major: bool = True
    b_k_major: bool = True
    a_scale: str = "none"
    b_scale: str = "none"
    bias: str | None = None
    out: str = "bf16"
    accumulate: bool = False
    split: bool = False
    tma: bool | None = None  # None: as the tile config says
    flatten: bool = False
    aligned: bool = True

    @property
    def config(self) -> configs.Config:
        return configs.default(self.capability, self.family, *SHAPES[self.size], 100)

    @property
    def uses_tma(self) -> bool:
        return self.aligned and (self.config.tma if self.tma is None else self.tma)

    @property
    def formats(self) -> tuple[str, str]:
        a, b = ("e4m3", "e5m2") if "fp8" in self.family else ("bf16", "bf16")
        return self.a or a, self.b or b


def built(it: Build) -> Any:
    config = it.config
    soft = it.family == "fp8 soft"
    promote = it.family == "fp8" or "blocks" in (it.a_scale, it.b_scale)
    constants: dict[str, Any] = {
        "A": it.formats[0], "B": it.formats[1], "BIAS": it.bias, "OUT": it.out, "out_n": 1,
        "A_K_MAJOR": it.a_k_major, "B_K_MAJOR": it.b_k_major, "A_SCALE": it.a_scale,
        "B_SCALE": it.b_scale, "A_GROUP": 1, "B_GROUP": 128, "PROMOTE": promote,
        "ACCUMULATE": it.accumulate, "SPLIT": it.split, "SOFT_CAST": soft, "SOFT_OUT": False,
        "TMA": it.uses_tma, **gemm._constants(replace(config, flatten=it.flatten)),
    }  # fmt: skip
    options = {o: constants.pop(o) for o in ("num_warps", "num_stages")}
    integers = ("M", "N", "K", "lda", "ldb", "out_m", "a_scale_m", "a_scale_k", "b_scale_n",
                "b_scale_k", "split_k")  # fmt: skip
    types = {**dict.fromkeys(integers, "i32"), "out": POINTERS["fp32" if it.split else it.out]}
    for letter, fmt, block, k_major in (
        ("a", it.formats[0], config.block_m, it.a_k_major),
        ("b", it.formats[1], config.block_n, it.b_k_major),
    ):
        types[letter] = "*u8" if soft else POINTERS[fmt]
        if it.uses_tma:
            tile = (block, config.block_k) if k_major else (config.block_k, block)
            types[letter] = f"tensordesc<{POINTERS[fmt][1:]}[{tile[0]},{tile[1]}]>"
    for pointer, there in (
        ("a_scale", it.a_scale != "none"), ("b_scale", it.b_scale != "none"), ("bias", it.bias)
    ):  # fmt: skip
        if there:
            types[pointer] = POINTERS[it.bias or "fp32"] if pointer == "bias" else "*fp32"
        else:
            constants[pointer] = None
    multiples = (*pointers_of(types), *MULTIPLES) if it.aligned else ()
    return compile_for(gemm_kernel, types, constants, it.capability, multiples, **options)


def multiplications(ptx: str) -> dict[str, set[str]]:
    """The tensor core instructions, with the types in their names."""
    found = {
        "wgmma": r"wgmma\.mma_async\S*?\.f32\.(\w+\.\w+)",
        "tcgen05": r"tcgen05\.mma\.\S*?kind::(\w+)",
        "mma.sync": r"mma\.sync\S*?\.f32\.(\w+\.\w+)\.f32",
    }
    kinds = {kind: set(re.findall(pattern, ptx)) for kind, pattern in found.items()}
    return {kind: types for kind, types in kinds.items() if types}


def expected_multiplication(it: Build) -> dict[str, set[str]]:
    a, b = (f if f in ("e4m3", "e5m2", "bf16") else "f16" for f in it.formats)
    if it.family == "fp8 soft":
        a, b = "f16", "f16"
    if it.capability == 100:
        return {"tcgen05": {"f8f6f4" if a[0] == "e" else "f16"}}
    return {"wgmma" if it.capability == 90 else "mma.sync": {f"{a}.{b}"}}


def fp32_sums(ptx: str) -> int:
    """FP32 additions, fused ones and those of pairs too."""
    single = len(re.findall(r"\b(?:add|fma)(?:\.rn)?(?:\.ftz)?\.f32\s", ptx))
    return single + 2 * len(re.findall(r"\b(?:add|fma)(?:\.rn)?\.f32x2\s", ptx))


def check(it: Build) -> Any:
    kernel = built(it)
    ptx, config = kernel.asm["ptx"], it.config
    assert ".local" not in ptx, "local memory is used"
    limit = configs.SHARED_KIB[it.capability] * 1024
    assert kernel.metadata.shared <= limit, f"{kernel.metadata.shared} of {limit} bytes"
    assert multiplications(ptx) == expected_multiplication(it)
    assert ("cp.async.bulk.tensor" in ptx) is it.uses_tma
    offsets = re.findall(r"tt\.addptr .*, tensor<[0-9x]*x(i\d+)>", kernel.asm["ttir"])
    if it.bias is None:  # which has no more than N elements
        assert set(offsets) == {"i64"}
    elements = config.block_m * config.block_n // (32 * config.warps)
    if it.bias is None and not it.accumulate:
        promoted = it.family == "fp8" or "blocks" in (it.a_scale, it.b_scale)
        assert fp32_sums(ptx) >= elements if promoted else fp32_sums(ptx) == 0
    return kernel


@pytest.mark.parametrize("where", EVERY, ids=name)
def test_every_tile_config(where: tuple[int, str, str]) -> None:
    """b as [N, K] row-major, the layout of a forward pass; block scales where they belong."""
    scale = "blocks" if "blocks" in where[1] else "none"
    it = Build(*where, a_scale=scale, b_scale=scale)
    kernel = check(it)
    ptx = kernel.asm["ptx"]
    if not it.uses_tma:
        assert re.search(r"cp\.async\.c[ag]\.shared\.global\S* .*0x10", ptx), "not 16 bytes a time"
    assert re.search(r"st\.global\.v4\.b32|st\.global\.v2\.b64", ptx), "narrow stores"
    config = it.config
    itemsize = 2 if "16" in it.family else 1
    tiles = configs.shared_bytes(config, configs.known_arch(it.capability), itemsize)
    assert tiles <= configs.SHARED_KIB[it.capability] * 1024
    if where in LARGE and it.capability in (80, 89, 90):
        assert local_bytes(kernel) == 0, "registers are spilled"


# One of each main loop: 8.6 has the instructions of 8.0 with the tiles of 8.9.
LARGE = [
    (c, f, "large") for c in CAPABILITIES if c != 86 for f in FAMILIES[c]
    if f in ("16-bit", "fp8", "fp8 soft")
]  # fmt: skip


@pytest.mark.parametrize("where", LARGE, ids=name)
def test_layouts_and_epilogues(where: tuple[int, str, str]) -> None:
    """The other three layouts (wgmma and tcgen05 read 16-bit operands as they lie), each with
    another epilogue; the mixed ones without TMA; a part of a split K; scales along K."""
    a_turned, b_turned = {"a_k_major": False}, {"b_k_major": False}
    rows, one = {"a_scale": "rows", "b_scale": "rows"}, {"a_scale": "scalar", "b_scale": "scalar"}
    check(Build(*where, **a_turned, **rows, bias="bf16", out="fp16"))
    check(Build(*where, **b_turned, **one, accumulate=True, out="fp32"))
    check(Build(*where, **a_turned, **b_turned))
    check(Build(*where[:2], "thin", split=True, out="fp32"))
    if Build(*where).uses_tma:
        check(Build(*where, **a_turned, tma=False))
        check(Build(*where, **b_turned, tma=False))
    if "fp8" in where[1]:
        check(Build(*where, a_scale="blocks", b_scale="blocks", bias="fp32"))
    if where[0] in (80, 89, 90):  # the epilogue with the most registers
        kernel = built(Build(*where, accumulate=True, out="fp32", a_scale="rows"))
        assert local_bytes(kernel) == 0, "registers are spilled"


@pytest.mark.parametrize("where", LARGE, ids=name)
def test_sizes_that_are_multiples_of_nothing(where: tuple[int, str, str]) -> None:
    check(Build(*where, aligned=False, a_k_major=False))


@pytest.mark.parametrize("capability", [c for c in CAPABILITIES if c >= 89])
def test_pairs_of_fp8_formats(capability: int) -> None:
    """E4M3 with E5M2 is everywhere above; the rest where the formats are in the instruction."""
    pairs = [("e5m2", "e4m3")]
    pairs += [("e4m3", "e4m3"), ("e5m2", "e5m2")] if capability in (89, 90) else []
    for a, b in pairs:
        check(Build(capability, "fp8", "large", a=a, b=b))
    check(Build(capability, "fp8 fast", "small", a="e5m2", b="e5m2"))


@pytest.mark.parametrize("family", ["16-bit", "fp8"])
@pytest.mark.parametrize("capability", [90, 100])
def test_flattened_loops_compile(capability: int, family: str) -> None:
    """For tile configs that a measurement may bring. Another buffer for the result comes on top."""
    kernel = built(Build(capability, family, "small", flatten=True))
    assert ".local" not in kernel.asm["ptx"]
    assert kernel.metadata.shared <= configs.SHARED_KIB[capability] * 1024


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_reduction(capability: int) -> None:
    pointers = {"parts": "*fp32", "out": "*bf16", "bias": "*bf16", "a_scale": "*fp32"}
    integers = ("M", "N", "out_m", "a_scale_m", "b_scale_n", "split_k")
    constants = {
        "b_scale": None, "out_n": 1, "BIAS": "bf16", "OUT": "bf16", "A_SCALE": "rows",
        "B_SCALE": "none", "A_GROUP": 1, "B_GROUP": 1, "ACCUMULATE": False, "SOFT_OUT": False,
        "BLOCK_M": gemm.REDUCE_M, "BLOCK_N": gemm.REDUCE_N,
    }  # fmt: skip
    types = {**pointers, **dict.fromkeys(integers, "i32")}
    kernel = compile_for(reduce_kernel, types, constants, capability, (*pointers, *MULTIPLES))
    assert ".local" not in kernel.asm["ptx"]
    assert re.search(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64", kernel.asm["ptx"])
    assert kernel.metadata.shared <= 48 * 1024
