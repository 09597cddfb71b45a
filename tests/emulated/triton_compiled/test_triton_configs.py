"""The tile configs of the Triton GEMM: a choice for everything, measured entries, bad files."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from mixprec.triton_kernels import configs

SIXTEEN = configs.pick("gemm", 90, "16-bit", 8192, 8192, 132)


def test_every_built_in_entry_is_valid() -> None:
    for entry in configs.ROWS:
        assert configs._problem(entry) is None
        measured = (entry.gpu, entry.date, entry.tflops)
        assert all(measured) or not any(measured), "measured in part"
    keys = [(entry.op, entry.arch, entry.family, entry.size) for entry in configs.ROWS]
    assert len(set(keys)) == len(keys), "two entries for one case"


@pytest.mark.parametrize("capability", [80, 86, 87, 89, 90, 100, 103, 120, 121, 130])
def test_there_is_a_tile_for_everything(capability: int) -> None:
    soft = capability < 89
    for fp8, blocks, fast in itertools.product((False, True), repeat=3):
        kind = configs.family(fp8, fp8 and soft, blocks, fast)
        for shape, size in (((1, 1), "skinny"), ((65, 64), "small"), ((8192, 8192), "large")):
            for op in configs.OPS:
                row = configs.pick(op, capability, kind, *shape, 132)
                assert (row.family, row.size) == (kind, size)
                assert row.arch <= capability


def test_scales_along_k_are_never_accumulated_fast() -> None:
    assert configs.family(True, False, True, True) == "fp8"
    assert configs.family(True, False, False, True) == "fp8 fast"


def test_what_the_tiles_take_of_shared_memory() -> None:
    config = configs.Config(128, 256, 64, 8, 4)
    assert configs.shared_bytes(config, 90, 2) == 4 * 48 * 1024
    assert configs.shared_bytes(config, 80, 2) == 3 * 48 * 1024  # one stage is in registers


def test_split_k() -> None:
    """As many parts as fill the GPU once, each of at least 1024 of K."""
    row = configs.pick("gemm", 90, "16-bit", 16, 4096, 132)
    assert row.config.block_n == 64
    assert configs.split_k(row, 16, 4096, 16384, 132) == 2  # 64 tiles
    assert configs.split_k(row, 16, 4096, 1024, 132) == 1
    assert configs.split_k(row, 16, 64, 8192, 132) == 8
    assert configs.split_k(row, 16, 64, 2**20, 132) == configs.MAX_SPLIT
    assert configs.split_k(row, 16, 2**20, 2**20, 132) == 1


@pytest.fixture
def ours() -> Any:
    """Afterwards the built-in entries again."""
    yield
    configs.use_rows(None)


def test_measured_entries_come_first(tmp_path: Path, ours: None) -> None:
    """On the GPU they were measured on, and for the op that they name."""
    tile = replace(SIXTEEN.config, block_n=128, stages=3)
    mine = replace(SIXTEEN, config=tile, gpu="NVIDIA H100", date="2026-01-31", tflops=612.5)
    special = replace(mine, op="gemm_accumulate_", config=replace(tile, group=4))
    path = tmp_path / "rows.json"
    configs.write_rows(path, [special, mine])
    assert configs.use_rows(path) == (special, mine)
    assert configs.pick("gemm", 90, "16-bit", 8192, 8192, 132) == mine
    assert configs.pick("gemm_accumulate_", 90, "16-bit", 8192, 8192, 132) == special
    assert configs.pick("gemm", 90, "16-bit", 1024, 1024, 132) in configs.ROWS
    assert configs.pick("gemm", 100, "16-bit", 8192, 8192, 132) in configs.ROWS
    assert configs.use_rows(None) == ()
    assert configs.pick("gemm", 90, "16-bit", 8192, 8192, 132) == SIXTEEN


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "matmul"}, "op must be one of"),
        ({"arch": 75}, "arch must be one of"),
        ({"arch": "90"}, "arch must be one of"),
        ({"family": "fp4"}, "family must be one of"),
        ({"size": "huge"}, "size must be one of"),
        ({"speed": 1}, "TypeError"),
        ({"config": {"block_m": 96}}, "block_m must be one of"),
        ({"config": {"block_k": 256}}, "block_k must be one of"),
        ({"config": {"warps": 3}}, "warps must be one of"),
        ({"config": {"stages": 0}}, "stages, group and per_sm must be at least 1"),
        ({"config": {"stages": 9}}, "shared memory"),
        ({"config": {"stages": 2.0}}, "stages must be int"),
        ({"config": {"tma": 1}}, "tma must be bool"),
        ({"config": {"cluster": 2}}, "TypeError"),
    ],
)
def test_entries_that_make_no_sense(
    tmp_path: Path, ours: None, change: dict[str, Any], message: str
) -> None:
    entry = asdict(SIXTEEN)
    entry |= {**change, "config": entry["config"] | change.get("config", {})}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([asdict(SIXTEEN), entry]))
    with pytest.raises(ValueError, match=r"rows\.json, row 1: .*" + message):
        configs.use_rows(path)
    assert configs.pick("gemm", 90, "16-bit", 8192, 8192, 132) == SIXTEEN
    path.write_text("{}")
    with pytest.raises(ValueError, match="must hold a list of rows, got dict"):
        configs.use_rows(path)
