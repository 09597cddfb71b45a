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
import torch
from cases import name
from emulated.triton_compiled.helpers import local_bytes, offsets, record_launches

from mixprec.triton_kernels import configs, gemm, launch

CAPABILITIES = (80, 86, 89, 90, 100, 120)
BF16, FP32, E4M3, E5M2 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2
FAMILIES = {
    capability: tuple(kind for arch, kind in configs.TILES if arch == capability)
    for capability in CAPABILITIES
}
SHAPES = {"thin": (64, 4096), "small": (1024, 1024), "large": (8192, 8192)}
EVERY = [(c, f, s) for c in CAPABILITIES for f in FAMILIES[c] for s in SHAPES]


@dataclass(frozen=True)
class Build:
    """A product with a tile config of configs.py, and what its arguments decide."""

    capability: int
    family: str
    size: str
    a: torch.dtype | None = None  # None: bf16, or E4M3 and E5M2
    b: torch.dtype | None = None
    a_k_major: bool = True
    b_k_major: bool = True
    a_scale: str = "none"
    b_scale: str = "none"
    bias: torch.dtype | None = None
    out: torch.dtype = BF16
    accumulate: bool = False
    split: bool = False
    tma: bool | None = None  # None: as the tile config says
    aligned: bool = True

    @property
    def config(self) -> configs.Config:
        return configs.default(self.capability, self.family, *SHAPES[self.size], 100)

    @property
    def uses_tma(self) -> bool:
        return self.aligned and (self.config.tma if self.tma is None else self.tma)

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        a, b = (E4M3, E5M2) if "fp8" in self.family else (BF16, BF16)
        return self.a or a, self.b or b

    def launch(self) -> None:
        size = 512 if self.aligned else 511  # small, and more than one block of scales
        sa, sb = scale(self.a_scale, size, size), scale(self.b_scale, size, 4)
        sb = sb if sb is None else sb.t()
        a, b = (matrix(size, dtype, self.aligned) for dtype in self.dtypes)
        a, b = a if self.a_k_major else a.t(), b.t() if self.b_k_major else b
        if self.accumulate:
            gemm.gemm_accumulate_(matrix(size, self.out, self.aligned), a, b, sa, sb)
            return
        bias = None if self.bias is None else torch.zeros(size, dtype=self.bias)
        gemm.gemm(a, b, sa, sb, bias, self.out, self.family.endswith("fast"))


def scale(kind: str, rows: int, groups: int) -> torch.Tensor | None:
    """groups: of rows that share the scales of a chunk of K, of which there are four."""
    shapes = {"scalar": (), "rows": (rows, 1), "blocks": (groups, 4)}
    return None if kind == "none" else torch.ones(shapes[kind])


def matrix(size: int, dtype: torch.dtype, aligned: bool) -> torch.Tensor:
    first = 0 if aligned else 1
    return torch.zeros(size * size + first).to(dtype)[first:].view(size, size)


def built(it: Build) -> list[Any]:
    """The kernels that are launched for it: the GEMM's, and that of the parts of a split K."""
    with pytest.MonkeyPatch.context() as patch:
        launches = record_launches(patch, it.capability)
        config = replace(it.config, tma=it.uses_tma)
        patch.setattr(gemm, "_gpu", lambda _: (it.capability, 100))
        patch.setattr(gemm, "pick", lambda *_: config)
        patch.setattr(gemm, "split_k", lambda *_: 1 + it.split)
        it.launch()
    return [one.compiled for one in launches]


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
    a, b = (launch.FORMATS[dtype] for dtype in it.dtypes)
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
    kernel, *_ = built(it)
    ptx, config = kernel.asm["ptx"], it.config
    assert ".local" not in ptx, "local memory is used"
    limit = configs.SHARED_KIB[it.capability] * 1024
    assert kernel.metadata.shared <= limit, f"{kernel.metadata.shared} of {limit} bytes"
    assert multiplications(ptx) == expected_multiplication(it)
    assert ("cp.async.bulk.tensor" in ptx) is it.uses_tma
    if it.bias is None:  # which has no more than N elements
        assert offsets(kernel.asm["ttir"]) == {"i64"}
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
    if where in LARGE and it.capability in (80, 89, 90):
        assert local_bytes(kernel) == 0, "registers are spilled"


# One of each main loop: 8.6 has the instructions of 8.0 with the tiles of 8.9.
LARGE = [
    (c, f, "large") for c in CAPABILITIES if c != 86 for f in FAMILIES[c]
    if f in ("16-bit", "fp8", "fp8 soft")
]  # fmt: skip


A_TURNED, B_TURNED = {"a_k_major": False}, {"b_k_major": False}
ROWS, ONE = ({"a_scale": kind, "b_scale": kind} for kind in ("rows", "scalar"))
# The other three layouts (wgmma and tcgen05 read 16-bit operands as they lie), each with another
# epilogue; the mixed ones without TMA; a part of a split K; scales along K; odd sizes.
HOW: tuple[dict[str, Any], ...] = (
    {**A_TURNED, **ROWS, "bias": BF16, "out": torch.float16},
    {**B_TURNED, "tma": False},
    {**B_TURNED, **ONE, "accumulate": True, "out": FP32},
    {**A_TURNED, "tma": False},
    {"a_scale": "blocks", "b_scale": "blocks", "bias": FP32},
    {**A_TURNED, **B_TURNED},
    {**A_TURNED, "aligned": False},
    {"size": "thin", "split": True, "out": FP32},
)


@pytest.mark.parametrize("where", LARGE, ids=name)
def test_layouts_and_epilogues(where: tuple[int, str, str]) -> None:
    """Every second way of a tile; of GPUs with the same instructions other ones."""
    turn = LARGE.index(where) + CAPABILITIES.index(where[0])
    for how in HOW[turn % 2 :: 2]:
        if "blocks" not in how.values() or "fp8" in where[1]:
            check(replace(Build(*where), **how))
    if where[0] in (80, 89, 90):  # the epilogue with the most registers
        kernel, *_ = built(Build(*where, accumulate=True, out=FP32, a_scale="rows"))
        assert local_bytes(kernel) == 0, "registers are spilled"


@pytest.mark.parametrize("capability", [c for c in CAPABILITIES if c >= 89])
def test_pairs_of_fp8_formats(capability: int) -> None:
    """E4M3 with E5M2 is everywhere above; the rest where the formats are in the instruction."""
    pairs = [(E5M2, E4M3)]
    pairs += [(E4M3, E4M3), (E5M2, E5M2)] if capability in (89, 90) else []
    for a, b in pairs:
        check(Build(capability, "fp8", "large", a=a, b=b))
    check(Build(capability, "fp8 fast", "small", a=E5M2, b=E5M2))


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_reduction(capability: int) -> None:
    split = {"split": True, "bias": BF16, "a_scale": "rows"}
    _, kernel = built(Build(capability, "16-bit", "thin", **split))
    assert ".local" not in kernel.asm["ptx"]
    assert re.search(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64", kernel.asm["ptx"])
    assert kernel.metadata.shared <= 48 * 1024
