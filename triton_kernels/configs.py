"""Which tile a GEMM is computed in: a measured one, else by architecture and kind of operands.

A tile is chosen by the shape alone, so the same call always runs the same kernel, and nothing is
timed at run time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

# Shared memory that a block may have, KiB: CUDA C++ Programming Guide, compute capabilities.
SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
CHUNK = 128  # split_k cuts K at multiples of it
MIN_CHUNKS = 8  # of a part; below, its fixed costs and the sum of the parts weigh more (estimated)
MAX_SPLIT = 32


@dataclass(frozen=True)
class Config:
    """block_k at most 128; stages: tiles of the operands on their way; group: rows of tiles that
    are computed together (L2); per_sm: programs for each multiprocessor; flatten: fetch the next
    tile's operands while this one's result is stored; tma: where the operands are aligned."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group: int = 8
    per_sm: int = 1
    flatten: bool = False
    tma: bool = False


Tiles = tuple[Config, Config, Config]  # for thin, small and large products


def _mma_tiles(arch: int, tma: bool) -> dict[tuple[int, str], Tiles]:
    """99 KiB a block and mma.sync, whose operands pass through registers: 128 x 128 with 8 warps
    is the largest tile that leaves room for them."""
    sixteen = (
        Config(64, 64, 64, 4, 4, tma=tma),
        Config(64, 128, 64, 4, 3, tma=tma),
        Config(128, 128, 64, 8, 3, tma=tma),
    )
    # Decoded in registers and put into shared memory once more, as fp16.
    soft = tuple(replace(tile, stages=3, tma=False) for tile in sixteen)
    eight = tuple(replace(tile, block_k=128) for tile in sixteen)
    of_fp8 = {"fp8 soft": soft} if arch < 89 else {"fp8": eight, "fp8 fast": eight}
    kinds = {"16-bit": sixteen, "16-bit blocks": sixteen, **of_fp8}
    return {(arch, kind): tiles for kind, tiles in kinds.items()}


# None of these tiles has been measured: they follow from registers and shared memory. 128 x 256 in
# FP32 takes 128 registers of each of 256 threads; a sum that is promoted or scaled along K needs
# them twice, which leaves 128 x 128. Stages are what fits, "thin" (M <= 64) reads b once in many
# small tiles, "small" is less than one wave of large tiles.
TILES: dict[tuple[int, str], Tiles] = {
    (80, "16-bit"): (Config(64, 64, 64, 4, 5), Config(64, 128, 64, 4, 4),
           Config(128, 256, 64, 8, 3)),
    (80, "16-bit blocks"): (Config(64, 64, 64, 4, 5), Config(64, 128, 64, 4, 4),
           Config(128, 128, 64, 8, 4)),
    (80, "fp8 soft"): (Config(64, 64, 64, 4, 5), Config(64, 128, 64, 4, 4),
           Config(128, 128, 64, 8, 4)),
    **_mma_tiles(86, tma=False),
    **_mma_tiles(89, tma=False),
    # wgmma takes both operands from shared memory, 64 rows to a warpgroup.
    (90, "16-bit"): (Config(64, 64, 128, 4, 6, tma=True), Config(128, 128, 64, 8, 6, tma=True),
           Config(128, 256, 64, 8, 4, tma=True)),
    (90, "16-bit blocks"): (Config(64, 64, 128, 4, 6, tma=True),
           Config(128, 64, 64, 8, 6, tma=True), Config(128, 128, 64, 8, 6, tma=True)),
    (90, "fp8"): (Config(64, 64, 128, 4, 8, tma=True), Config(128, 64, 128, 8, 6, tma=True),
           Config(128, 128, 128, 8, 5, tma=True)),
    (90, "fp8 fast"): (Config(64, 64, 128, 4, 8, tma=True),
           Config(128, 128, 128, 8, 5, tma=True), Config(128, 256, 128, 8, 4, tma=True)),
    # tcgen05 keeps the sum in tensor memory; promotion reads it from there.
    (100, "16-bit"): (Config(64, 64, 128, 4, 5, tma=True), Config(128, 128, 64, 8, 5, tma=True),
           Config(128, 256, 64, 8, 3, tma=True)),
    (100, "16-bit blocks"): (Config(64, 64, 128, 4, 5, tma=True),
           Config(128, 64, 64, 8, 5, tma=True), Config(128, 128, 64, 8, 5, tma=True)),
    (100, "fp8"): (Config(64, 64, 128, 4, 6, tma=True), Config(128, 64, 128, 8, 5, tma=True),
           Config(128, 128, 128, 8, 4, tma=True)),
    (100, "fp8 fast"): (Config(64, 64, 128, 4, 6, tma=True),
           Config(128, 128, 128, 8, 4, tma=True), Config(128, 256, 128, 8, 3, tma=True)),
    **_mma_tiles(120, tma=True),
}  # fmt: skip

logger = logging.getLogger("mixprec")

Measured = Callable[[int, str, int, int, int, int], "dict[str, Any] | None"]
# Asked first, for (capability, family, M, N, K, bytes of an element): the fields of a Config that
# was measured for the like of them. mixprec.ops sets it: this package imports nothing of mixprec.
measured: Measured = lambda *_: None  # noqa: E731


def family(fp8: bool, soft: bool, blocks: bool, fast: bool) -> str:
    """The kind of main loop; blocks: a scale changes along K."""
    kind = "fp8" if fp8 else "16-bit"
    if blocks:
        kind += " blocks"
    if soft:
        return f"{kind} soft"
    return "fp8 fast" if fp8 and fast and not blocks else kind


def known_arch(capability: int) -> int:
    """The newest architecture in TILES that is not newer than the GPU; at least 8.0."""
    return max((arch for arch, _ in TILES if arch <= capability), default=80)


def tiles_of(capability: int, kind: str) -> Tiles:
    """FP8 has the same tiles with and without scales along K: both promote the sums."""
    return TILES[known_arch(capability), kind.replace("fp8 blocks", "fp8")]


def shared_bytes(config: Config, arch: int, itemsize: int) -> int:
    """What the tiles of the operands take; with mma.sync the last stage lies in registers."""
    stages = config.stages if arch in (90, 100) else max(1, config.stages - 1)
    return stages * (config.block_m + config.block_n) * config.block_k * itemsize


def default(capability: int, kind: str, M: int, N: int, multiprocessors: int) -> Config:
    """The tile for a product [M, K] @ [K, N] of which nothing was measured."""
    thin, small, large = tiles_of(capability, kind)
    if M <= 64:
        return thin
    return small if multiprocessors > M * N / (128 * 256) else large


@lru_cache(maxsize=4096)
def pick(
    capability: int, kind: str, M: int, N: int, K: int, itemsize: int, multiprocessors: int
) -> Config:
    """The tile for a product [M, K] @ [K, N]: a measured one that can run, else the default."""
    found = measured(capability, kind.removesuffix(" soft"), M, N, K, itemsize)
    if found is not None:
        problem = why_not(found, capability, itemsize)
        if problem is None:
            return Config(**found)
        logger.warning("the measured tile %s is ignored: %s", found, problem)
    return default(capability, kind, M, N, multiprocessors)


def split_k(config: Config, M: int, N: int, K: int, multiprocessors: int) -> int:
    """Into how many parts K is cut so that more multiprocessors work, 1 if it is not worth it."""
    tiles = -(-M // config.block_m) * -(-N // config.block_n)
    free = multiprocessors * config.per_sm // tiles
    return max(1, min(free, -(-K // CHUNK) // MIN_CHUNKS, MAX_SPLIT))


def why_not(given: dict[str, Any], capability: int, itemsize: int) -> str | None:
    """Why these are not the fields of a Config that runs on such a GPU; None if they are."""
    try:
        config = Config(**given)
    except TypeError as error:
        return str(error)
    for field in fields(Config):
        if type(getattr(config, field.name)) is not (bool if field.default is False else int):
            return f"{field.name} must be {field.type}, got {getattr(config, field.name)!r}"
    for name, known in (
        ("block_m", (16, 32, 64, 128, 256)),
        ("block_n", (16, 32, 64, 128, 256)),
        ("block_k", (32, 64, 128)),
        ("warps", (1, 2, 4, 8, 16)),
    ):
        if getattr(config, name) not in known:
            return f"{name} must be one of {known}, got {getattr(config, name)!r}"
    if min(config.stages, config.group, config.per_sm) < 1:
        return "stages, group and per_sm must be at least 1"
    arch = known_arch(capability)
    taken = shared_bytes(config, arch, itemsize)
    limit = SHARED_KIB.get(capability, SHARED_KIB[arch])
    if taken > limit * 1024:
        return f"its tiles take {taken} bytes of shared memory, the GPU has {limit} KiB a block"
    return None
