"""The tiles of the Triton GEMM, tuned: what is tried, what is chosen, what is written and read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_tune import FakeClock

pytest.importorskip("triton", reason="triton is not installed")

from mixprec.bench import tune_tiles
from mixprec.triton_kernels import configs


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("MIXPREC_TILES", str(tmp_path / "folder" / "tiles.json"))
    monkeypatch.setattr(configs, "_user", None)
    configs.pick.cache_clear()
    yield
    configs.prefer(())


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_candidates_fit_and_begin_with_ours(capability: int) -> None:
    for kind in tune_tiles.kinds(capability):
        for size in configs.SIZES:
            rows = tune_tiles.candidates(capability, kind, size)
            shape = tune_tiles.SHAPES[size][0]
            ours = configs.pick("gemm", capability, kind, shape[0], shape[1], 132).config
            assert rows[0].config in (ours, *(r.config for r in configs.ROWS))
            assert len({row.config for row in rows}) == len(rows) > 2
            assert all(configs._problem(row) is None for row in rows)
            assert {(row.arch, row.family, row.size) for row in rows} == {(capability, kind, size)}


def play(clock: FakeClock, seconds: Callable[[configs.Config], float]) -> Callable[..., Any]:
    """A gemm that takes as long as its tile is said to, and gives the right values."""

    def run(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
        row = configs.pick("gemm", 90, KIND[a.dtype, rest[-1]], a.shape[0], b.shape[1], 132)
        time = seconds(row.config)
        if time < 0:
            raise RuntimeError("out of resource: shared memory")
        clock.now += time
        return torch.ops.mixprec.gemm_reference(a, b, *rest)

    return run


KIND = {(dtype, fast): kind for kind, (dtype, fast) in tune_tiles.kinds(90).items()}


def measured(monkeypatch: pytest.MonkeyPatch, seconds: Callable[..., float]) -> list[configs.Row]:
    shapes = {"skinny": ((4, 48, 32), (8, 32, 48)), "large": ((80, 80, 80),)}
    monkeypatch.setattr(tune_tiles, "SHAPES", shapes)
    monkeypatch.setattr(configs, "size_class", lambda M, N, sms: "skinny" if M <= 8 else "large")
    clock = FakeClock()
    facts = {"capability": 90, "gpu": "A GPU", "cache": 1 << 10, "seconds": 1.0}
    run = play(clock, seconds)
    return list(tune_tiles.measure("cpu", clock, run=run, report=lambda _: None, **facts))


def test_the_fastest_tile_that_runs_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(config: configs.Config) -> float:
        return -1.0 if config.block_m == 64 else 1e-3 / config.stages

    rows = measured(monkeypatch, seconds)
    assert [(r.family, r.size) for r in rows] == [(k, s) for k in tune_tiles.kinds(90)
                                                  for s in ("skinny", "large")]  # fmt: skip
    for row in rows:
        tried = tune_tiles.candidates(90, row.family, row.size)
        able = [r.config.stages for r in tried if r.config.block_m != 64]
        assert row.config.stages == max(able)
        assert row.config.block_m != 64
        assert (row.gpu, row.arch) == ("A GPU", 90)
        assert row.tflops is not None


def test_ours_stays_where_nothing_is_clearly_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in measured(monkeypatch, lambda config: 1e-3 - 1e-6 * config.stages):
        assert row.config == tune_tiles.candidates(90, row.family, row.size)[0].config


def test_a_wrong_tile_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    row = tune_tiles.candidates(90, "16-bit", "large")[0]
    inputs = [tune_tiles.arguments(torch.bfloat16, False, (16, 16, 16), "cpu", 0)]

    def wrong(*args: Any) -> torch.Tensor:
        return torch.ops.mixprec.gemm_reference(*args) + 1

    with pytest.raises(ValueError, match="is wrong"):
        tune_tiles.times_of([row], inputs, wrong, clock, seconds=1.0, report=print)


def test_what_is_written_is_read_at_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = configs.pick("gemm", 90, "16-bit", 8192, 8192, 132)
    best = next(r for r in tune_tiles.candidates(90, "16-bit", "large") if r.config != ours.config)
    other = tune_tiles.candidates(80, "16-bit", "large")[1]
    tune_tiles.save([other], 80)
    path = tune_tiles.save([best], 90)
    assert path == configs.user_file()
    monkeypatch.setattr(configs, "_user", None)  # a new process
    configs.pick.cache_clear()
    assert configs.pick("gemm", 90, "16-bit", 8192, 8192, 132) == best
    assert configs.pick("gemm", 80, "16-bit", 8192, 8192, 132) == other
    assert configs.pick("gemm", 100, "16-bit", 8192, 8192, 132).gpu is None


@pytest.mark.parametrize("text", ["{", "[1]", '[{"op": "gemm"}]'])
def test_a_damaged_file_is_named_once_and_ignored(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = configs.user_file()
    path.parent.mkdir()
    path.write_text(text)
    with caplog.at_level(logging.WARNING, "mixprec"):
        for n in (8192, 4096, 64):
            assert configs.pick("gemm", 90, "16-bit", 8192, n, 132).gpu is None
    assert len(caplog.records) == 1
    assert "tuned tiles are ignored" in caplog.text
