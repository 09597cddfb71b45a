"""Which tile a GEMM is computed in: rows of data, one per architecture, kind and size of operands.

A row is chosen by the shape alone, so the same call always runs the same kernel, and nothing is
timed at run time. Rows that were measured on a user's own GPU come first: those in `user_file()`,
which `python -m mixprec.bench tune` writes.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

FAMILIES = ("16-bit", "16-bit blocks", "fp8", "fp8 fast", "fp8 soft")
SIZES = ("skinny", "small", "large")
OPS = ("gemm", "gemm_accumulate_")
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


@dataclass(frozen=True)
class Row:
    """gpu, date and tflops: where, when and how fast it was measured; None: it was not."""

    op: str  # a row of "gemm" also serves gemm_accumulate_ where that has none
    arch: int
    family: str
    size: str
    config: Config
    gpu: str | None = None
    date: str | None = None
    tflops: float | None = None


def _rows(arch: int, family: str, *configs: Config) -> list[Row]:
    return [Row("gemm", arch, family, s, c) for s, c in zip(SIZES, configs, strict=True)]


def _mma_rows(arch: int, tma: bool) -> list[Row]:
    """99 KiB a block and mma.sync, whose operands pass through registers: 128 x 128 with 8 warps
    is the largest tile that leaves room for them."""
    sixteen = (
        Config(64, 64, 64, 4, 4, tma=tma),
        Config(64, 128, 64, 4, 3, tma=tma),
        Config(128, 128, 64, 8, 3, tma=tma),
    )
    eight = (
        Config(64, 64, 128, 4, 4, tma=tma),
        Config(64, 128, 128, 4, 3, tma=tma),
        Config(128, 128, 128, 8, 3, tma=tma),
    )
    # Decoded in registers and put into shared memory once more, as fp16.
    soft = (Config(64, 64, 64, 4, 3), Config(64, 128, 64, 4, 3), Config(128, 128, 64, 8, 3))
    rows = [*_rows(arch, "16-bit", *sixteen), *_rows(arch, "16-bit blocks", *sixteen)]
    if arch < 89:
        return [*rows, *_rows(arch, "fp8 soft", *soft)]
    return [*rows, *_rows(arch, "fp8", *eight), *_rows(arch, "fp8 fast", *eight)]


# None of these rows has been measured: they follow from registers and shared memory. 128 x 256 in
# FP32 takes 128 registers of each of 256 threads; a sum that is promoted or scaled along K needs
# them twice, which leaves 128 x 128. Stages are what fits, "skinny" (M <= 64) reads b once in many
# small tiles, "small" is less than one wave of large tiles.
ROWS: tuple[Row, ...] = (
    *_rows(80, "16-bit", Config(64, 64, 64, 4, 5), Config(64, 128, 64, 4, 4),
           Config(128, 256, 64, 8, 3)),
    *_rows(80, "16-bit blocks", Config(64, 64, 64, 4, 5), Config(64, 128, 64, 4, 4),
           Config(128, 128, 64, 8, 4)),
    *_rows(80, "fp8 soft", Config(64, 64, 64, 4, 5), Config(64, 128, 64, 4, 4),
           Config(128, 128, 64, 8, 4)),
    *_mma_rows(86, tma=False),
    *_mma_rows(89, tma=False),
    # wgmma takes both operands from shared memory, 64 rows to a warpgroup.
    *_rows(90, "16-bit", Config(64, 64, 128, 4, 6, tma=True), Config(128, 128, 64, 8, 6, tma=True),
           Config(128, 256, 64, 8, 4, tma=True)),
    *_rows(90, "16-bit blocks", Config(64, 64, 128, 4, 6, tma=True),
           Config(128, 64, 64, 8, 6, tma=True), Config(128, 128, 64, 8, 6, tma=True)),
    *_rows(90, "fp8", Config(64, 64, 128, 4, 8, tma=True), Config(128, 64, 128, 8, 6, tma=True),
           Config(128, 128, 128, 8, 5, tma=True)),
    *_rows(90, "fp8 fast", Config(64, 64, 128, 4, 8, tma=True),
           Config(128, 128, 128, 8, 5, tma=True), Config(128, 256, 128, 8, 4, tma=True)),
    # tcgen05 keeps the sum in tensor memory; promotion reads it from there.
    *_rows(100, "16-bit", Config(64, 64, 128, 4, 5, tma=True), Config(128, 128, 64, 8, 5, tma=True),
           Config(128, 256, 64, 8, 3, tma=True)),
    *_rows(100, "16-bit blocks", Config(64, 64, 128, 4, 5, tma=True),
           Config(128, 64, 64, 8, 5, tma=True), Config(128, 128, 64, 8, 5, tma=True)),
    *_rows(100, "fp8", Config(64, 64, 128, 4, 6, tma=True), Config(128, 64, 128, 8, 5, tma=True),
           Config(128, 128, 128, 8, 4, tma=True)),
    *_rows(100, "fp8 fast", Config(64, 64, 128, 4, 6, tma=True),
           Config(128, 128, 128, 8, 4, tma=True), Config(128, 256, 128, 8, 3, tma=True)),
    *_mma_rows(120, tma=True),
)  # fmt: skip

logger = logging.getLogger("mixprec")

_user: tuple[Row, ...] | None = None  # None: user_file() was not looked at yet


def user_file() -> Path:
    """The user's own rows: $MIXPREC_TILES, else mixprec/gemm_tiles.json in the cache folder."""
    named = os.environ.get("MIXPREC_TILES")
    if named:
        return Path(named)
    folder = os.environ.get("XDG_CACHE_HOME")
    return (Path(folder) if folder else Path.home() / ".cache") / "mixprec" / "gemm_tiles.json"


def _users_rows() -> tuple[Row, ...]:
    """Read once; a damaged file is named once, and ignored."""
    if _user is None:
        try:
            path = user_file()
            return use_rows(path if path.exists() else None)
        except (OSError, ValueError, RuntimeError) as error:
            logger.warning("the tuned tiles are ignored (%s)", error)
            prefer(())
    return _user or ()


def prefer(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Take `rows` before ours for all later calls; returns those that were taken so far."""
    global _user
    before, _user = _user or (), tuple(rows)
    pick.cache_clear()
    return before


def family(fp8: bool, soft: bool, blocks: bool, fast: bool) -> str:
    """The kind of main loop; blocks: a scale changes along K."""
    if not fp8:
        return "16-bit blocks" if blocks else "16-bit"
    if soft:
        return "fp8 soft"
    return "fp8 fast" if fast and not blocks else "fp8"


def size_class(M: int, N: int, multiprocessors: int) -> str:
    if M <= 64:
        return "skinny"
    tiles = M * N / (128 * 256)
    return "small" if tiles < multiprocessors else "large"


def known_arch(capability: int) -> int:
    """The newest architecture with rows that is not newer than the GPU; at least 8.0."""
    return max((row.arch for row in ROWS if row.arch <= capability), default=80)


def shared_bytes(config: Config, arch: int, itemsize: int) -> int:
    """What the tiles of the operands take; with mma.sync the last stage lies in registers."""
    stages = config.stages if arch in (90, 100) else max(1, config.stages - 1)
    return stages * (config.block_m + config.block_n) * config.block_k * itemsize


@lru_cache(maxsize=4096)
def pick(op: str, capability: int, kind: str, M: int, N: int, multiprocessors: int) -> Row:
    """The row for a product [M, K] @ [K, N]: the user's for this very GPU, then ours."""
    size, arch = size_class(M, N, multiprocessors), known_arch(capability)
    for rows, wanted in ((_users_rows(), capability), (ROWS, arch)):
        for name in (op, "gemm"):
            for row in rows:
                if (row.op, row.arch, row.family, row.size) == (name, wanted, kind, size):
                    return row
    raise ValueError(f"{op}: no tile for {kind} operands on compute capability {capability}")


def split_k(row: Row, M: int, N: int, K: int, multiprocessors: int) -> int:
    """Into how many parts K is cut so that more multiprocessors work, 1 if it is not worth it."""
    tiles = -(-M // row.config.block_m) * -(-N // row.config.block_n)
    free = multiprocessors * row.config.per_sm // tiles
    return max(1, min(free, -(-K // CHUNK) // MIN_CHUNKS, MAX_SPLIT))


def _problem(row: Row) -> str | None:
    config = row.config
    for field in fields(Config):
        if type(getattr(config, field.name)) is not (bool if field.default is False else int):
            return f"{field.name} must be {field.type}, got {getattr(config, field.name)!r}"
    for name, value, known in (
        ("op", row.op, OPS), ("family", row.family, FAMILIES), ("size", row.size, SIZES),
        ("block_m", config.block_m, (16, 32, 64, 128, 256)),
        ("block_n", config.block_n, (16, 32, 64, 128, 256)),
        ("block_k", config.block_k, (32, 64, 128)),
        ("warps", config.warps, (1, 2, 4, 8, 16)),
    ):  # fmt: skip
        if value not in known:
            return f"{name} must be one of {known}, got {value!r}"
    if row.arch not in SHARED_KIB:
        return f"arch must be one of {tuple(SHARED_KIB)}, got {row.arch!r}"
    if min(config.stages, config.group, config.per_sm) < 1:
        return "stages, group and per_sm must be at least 1"
    taken = shared_bytes(config, known_arch(row.arch), 2 if row.family.startswith("16") else 1)
    if taken > SHARED_KIB[row.arch] * 1024:
        return f"its tiles take {taken} bytes of shared memory, {SHARED_KIB[row.arch]} KiB exist"
    return None


def use_rows(path: str | Path | None) -> tuple[Row, ...]:
    """Prefer the rows in a JSON file (None: ours again) for all later calls; returns them.

    The file holds a list of objects with the fields of Row, config an object with those of Config.
    ValueError naming the file, the row and what is wrong with it; nothing has changed then.
    """
    rows = []
    entries: Any = [] if path is None else json.loads(Path(path).read_text())
    if not isinstance(entries, list):
        raise ValueError(f"use_rows: {path} must hold a list of rows, got {type(entries).__name__}")
    for i, entry in enumerate(entries):
        try:
            row = Row(**{**entry, "config": Config(**entry["config"])})
            problem = _problem(row)
        except (TypeError, KeyError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            raise ValueError(f"use_rows: {path}, row {i}: {problem}")
        rows.append(row)
    prefer(rows)
    return tuple(rows)


def write_rows(path: str | Path, rows: Sequence[Row]) -> None:
    """The file that use_rows reads."""
    Path(path).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
