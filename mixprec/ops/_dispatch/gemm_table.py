"""Which GEMM is the fastest on the user's GPU, and the resulting order of backends.

`python -m mixprec.bench tune` measures, for a kind of operands and a class of sizes, which backend
is the fastest and, for CUDA and Triton, with which tile, and writes that to `user_file()`. SHIPPED
has such entries of our own measurements. Where nothing is measured the vendor's GEMM is first,
wherever a single call of it is exact.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .library import Capability

logger = logging.getLogger("mixprec")

SHIPPED = Path(__file__).with_name("gemm_table.json")

DEFAULT = ("vendor", "cuda", "triton", "reference")
BACKENDS = ("cuda", "triton", "vendor")
# Scales of blocks where nothing is measured.
_OF_BLOCKS = ("cuda", "triton", "vendor", "reference")
_FIRST = {first: (first, *(b for b in DEFAULT if b != first)) for first in BACKENDS}
# By the main loop: blocks have scales that change along K; fast keeps FP8's short accumulator.
FAMILIES = ("16-bit", "16-bit blocks", "fp8", "fp8 blocks", "fp8 fast")
SIZES = ("thin", "unaligned", "small", "medium", "large")
# Those of the CUDA kernel, in the order of GemmFamily (csrc/cuda/gemm/config/tile_configs.h).
CUDA_FAMILIES = ("16-bit", "fp8", "fp8 blocks", "fp8 fast")


class Entry(NamedTuple):
    """What is the fastest for products of a family and size class."""

    backend: str
    # Of CudaTile, or of triton_kernels.configs.Config; None: the backend chooses one for each call.
    tile: dict[str, Any] | None


Table = dict[str, dict[str, Entry]]  # by compute capability ("9.0"), then by "family size class"


@dataclass(frozen=True)
class CudaTile:
    """A tile of the CUDA kernel. cluster: blocks that share a tile of b."""

    block_m: int
    block_n: int
    cluster: int


def cuda_tiles() -> dict[int, tuple[str, CudaTile]]:
    """The family and the fields of each tile config of the CUDA kernel, by its number; none where
    the kernel is not built."""
    if not hasattr(torch.ops.mixprec, "gemm_sm90_tile_configs"):
        return {}
    numbers = torch.ops.mixprec.gemm_sm90_tile_configs()
    rows = [numbers[i : i + 4] for i in range(0, len(numbers), 4)]
    return {i: (CUDA_FAMILIES[of], CudaTile(*tile)) for i, (of, *tile) in enumerate(rows)}


def use_cuda_tiles(entries: dict[str, Entry]) -> None:
    """From now on the CUDA kernel computes in the tiles of these entries, by "family size class",
    and in its planner's choice where there is none."""
    known = {of_tile: i for i, of_tile in cuda_tiles().items()}
    if not known:
        return
    chosen = []
    for name in (f"{of} {size}" for of in CUDA_FAMILIES for size in SIZES):
        entry, number = entries.get(name), -1
        if entry is not None and entry.backend == "cuda" and entry.tile is not None:
            number = known.get((name.rpartition(" ")[0], CudaTile(**entry.tile)), -1)
            if number < 0:
                logger.warning("the measured tile %s is ignored: no kernel has it", entry.tile)
        chosen.append(number)
    torch.ops.mixprec.gemm_sm90_measured(chosen)


def family(itemsize: int, *, blocks: bool, fast: bool) -> str:
    kind = "16-bit" if itemsize == 2 else "fp8"
    if blocks:
        return f"{kind} blocks"
    return "fp8 fast" if fast and itemsize == 1 else kind


def size_class(m: int, n: int, k: int, itemsize: int) -> str:
    """The class of a [M, K] x [K, N] product of operands of `itemsize` bytes.

    thin: 64 rows or columns at most. unaligned: rows that do not start on 16 bytes. small: up to
    1448 cubed; medium: up to 4096 cubed; large: above.
    """
    if m <= 64 or n <= 64:
        return "thin"
    if (n * itemsize) % 16 or (k * itemsize) % 16:
        return "unaligned"
    products = m * n * k
    return "small" if products <= 1448**3 else "medium" if products <= 4096**3 else "large"


def user_file() -> Path:
    """$MIXPREC_TUNED, else mixprec/gemm_table.json in the cache folder."""
    named = os.environ.get("MIXPREC_TUNED")
    if named:
        return Path(named)
    folder = os.environ.get("XDG_CACHE_HOME")
    return (Path(folder) if folder else Path.home() / ".cache") / "mixprec" / "gemm_table.json"


def read(path: Path) -> Table:
    """The entries of a file; an error for one that is damaged, none without one."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    table = {gpu: {k: Entry(*e) for k, e in entries.items()} for gpu, entries in found.items()}
    for entries in table.values():
        if unknown := {entry.backend for entry in entries.values()} - {*BACKENDS}:
            raise ValueError(f"{', '.join(unknown)} is none of {', '.join(BACKENDS)}")
    return table


def _in_use(user: Table) -> Table:
    """Our entries, in which those of the user replace what they name; the CUDA kernel has them."""
    found = read(SHIPPED)
    for gpu, entries in user.items():
        found[gpu] = found.get(gpu, {}) | entries
    use_cuda_tiles(found.get("9.0", {}))
    return found


@cache
def table() -> Table:
    """Our entries and the user's, read once. A damaged file of the user's is reported once."""
    try:
        return _in_use(read(user_file()))
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        logger.warning(
            "the tuned entries in %s are ignored (%s); python -m mixprec.bench tune writes them "
            "anew",
            os.environ.get("MIXPREC_TUNED") or "the cache folder",
            error,
        )
        return _in_use({})


def fastest(arch: str, family: str, size: str) -> str:
    """The backend of the entry for these arguments; "" if there is none."""
    entry = table().get(arch, {}).get(f"{family} {size}")
    return "" if entry is None else entry.backend


def tile(
    capability: int, family: str, m: int, n: int, k: int, itemsize: int
) -> dict[str, Any] | None:
    """Triton's tile for a product on a GPU of capability 10 * major + minor; None if there is no
    entry for Triton."""
    arch, size = f"{capability // 10}.{capability % 10}", size_class(m, n, k, itemsize)
    entry = table().get(arch, {}).get(f"{family} {size}")
    return None if entry is None or entry.backend != "triton" else entry.tile


# torch.compile treats its result as a constant and does not trace into the file access: the mark
# that torch.compiler.assume_constant_result sets, which would import torch._dynamo (1.3 s).
fastest._dynamo_marked_constant = True  # type: ignore[attr-defined]


def order(args: Any, capability: Capability | None) -> tuple[str, ...]:
    """The variants to try for a call of gemm or gemm_accumulate_, best first."""
    if args is None or capability is None:
        return DEFAULT
    [m, k], n, itemsize = args.a.shape, args.b.shape[1], args.a.dtype.itemsize
    blocks = scales_along_k(args)
    kind = family(itemsize, blocks=blocks, fast=getattr(args, "fast_accum", False))
    first = fastest(f"{capability[0]}.{capability[1]}", kind, size_class(m, n, k, itemsize))
    if first:
        return _FIRST[first]
    return _OF_BLOCKS if blocks and itemsize == 1 else DEFAULT


def scales_along_k(args: Any) -> bool:
    """Whether a scale of a call of gemm or gemm_accumulate_ changes along K."""
    scales = ((args.a_scale_inv, 1), (args.b_scale_inv, 0))
    return any(s is not None and s.numel() > 1 and s.shape[dim] > 1 for s, dim in scales)


def cuda_why_not(args: Any, capability: Capability | None) -> str | None:
    """The kernel needs instructions of one GPU generation; scales along K are for FP8 only."""
    major, minor = capability or (9, 0)  # torch.compile of torch 2.11 does not trace != of tuples
    if major != 9 or minor != 0:
        gpu = f"{major}.{minor}"
        return f"the CUDA kernel is for compute capability 9.0 (Hopper), this GPU is {gpu}"
    if args.a.dtype.itemsize == 2 and scales_along_k(args):
        return "the CUDA kernel takes scales of blocks along K with FP8 operands only"
    return None


if cuda_tiles():  # read now: the kernel may be used without a choice of backends
    table()
