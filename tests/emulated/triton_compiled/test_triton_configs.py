"""The tile configs of the Triton GEMM: a choice for everything, measured ones, bad ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from mixprec.triton_kernels import configs

SHAPES = ((64, 64), (65, 64), (8192, 8192))  # thin, small and large products
GPU_SMS = 132
Measured = dict[tuple[Any, ...], dict[str, Any]]
LARGE = configs.TILES[90, "16-bit"][2]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Measured]:
    """What was measured: a tile for each (capability, family, M, N, K, bytes of an element)."""
    tiles: Measured = {}
    monkeypatch.setattr(configs, "measured", lambda *key: tiles.get(key))
    configs.pick.cache_clear()
    yield tiles
    configs.pick.cache_clear()


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("capability", [75, 80, 86, 87, 89, 90, 100, 103, 120, 121, 130])
def test_there_is_a_tile_for_everything(capability: int) -> None:
    arch = max(80, *(arch for arch, _ in configs.TILES if arch <= capability), 80)
    for fp8, blocks, fast in itertools.product((False, True), repeat=3):
        kind = configs.family(fp8, fp8 and capability < 89, blocks, fast)
        assert ("fast" in kind) is (fast and fp8 and not blocks and capability >= 89)
        for i, shape in enumerate(SHAPES):
            tile = configs.pick(capability, kind, *shape, 8192, 2 - fp8, GPU_SMS)
            assert tile == configs.TILES[arch, kind.replace("fp8 blocks", "fp8")][i], (kind, shape)


def test_measured_tiles_come_first(measured: Measured) -> None:
    tile = asdict(LARGE) | {"block_n": 128, "stages": 3}
    measured[90, "16-bit", 8192, 8192, 512, 2] = tile
    measured[80, "fp8", 8192, 8192, 512, 1] = tile  # decoded or not, FP8 was measured as such
    measured[80, "fp8 blocks", 8192, 8192, 512, 1] = tile | {"group": 2}
    assert configs.pick(90, "16-bit", 8192, 8192, 512, 2, GPU_SMS) == configs.Config(**tile)
    assert configs.pick(80, "fp8 soft", 8192, 8192, 512, 1, GPU_SMS) == configs.Config(**tile)
    blocks = configs.pick(80, configs.family(True, True, True, False), 8192, 8192, 512, 1, GPU_SMS)
    assert blocks == configs.Config(**tile | {"group": 2})
    assert configs.pick(90, "16-bit", 8192, 8192, 1024, 2, GPU_SMS) == LARGE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speed": 1}, "unexpected keyword argument 'speed'"),
        ({"block_m": 96}, "block_m must be one of"),
        ({"warps": 3}, "warps must be one of"),
        ({"stages": 0}, "stages, group and per_sm must be at least 1"),
        ({"stages": 9}, "of shared memory, the GPU has 227 KiB a block"),
        ({"stages": 2.0}, "stages must be int, got 2.0"),
        ({"tma": 1}, "tma must be bool, got 1"),
        (None, "missing"),
    ],
    ids=str,
)
def test_tiles_that_make_no_sense(
    measured: Measured, caplog: pytest.LogCaptureFixture, change: Any, message: str
) -> None:
    """They are ignored with a warning, and the built-in tile is taken."""
    given = {} if change is None else asdict(LARGE) | change
    assert message in str(configs.why_not(given, 90, 2))
    measured[90, "16-bit", 8192, 8192, 8192, 2] = given
    assert configs.pick(90, "16-bit", 8192, 8192, 8192, 2, GPU_SMS) == LARGE
    assert "is ignored: " in caplog.text
    assert message in caplog.text
