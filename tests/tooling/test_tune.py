"""mixprec.bench tune: measures what can run, decides by its rule, writes what mixprec reads."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from clock import SimulatedClock

from mixprec.bench import __main__ as cli
from mixprec.bench import device, tune
from mixprec.ops._dispatch import gemm_table

CUDA_TILES = {3: ("16-bit", gemm_table.CudaTile(128, 256, 2)),
              7: ("fp8", gemm_table.CudaTile(256, 128, 2)),
              11: ("fp8 blocks", gemm_table.CudaTile(256, 128, 2))}  # fmt: skip
SMALL = {"thin": ((4, 48, 32), (8, 32, 48)), "small": ((80, 80, 80),)}


def measured(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[tuple[str, str], float], wrong: str = ""
) -> dict[str, gemm_table.Entry]:
    """Entries for contenders that take these seconds (by family and name); `wrong` is off by 1."""
    clock = SimulatedClock()
    families = {kind[:3]: family for family, kind in tune.FAMILIES.items()}

    def contenders(args: tuple[Any, ...], *_: object) -> dict[str, Any]:
        blocks = args[2] is not None and args[2].dim() == 2
        family = families[args[0].dtype, args[-1], blocks]

        def run(name: str) -> Any:
            def gemm(*args: Any) -> torch.Tensor:
                clock.work(0.0, seconds[family, name])
                return torch.ops.mixprec.gemm_reference(*args) + (name == wrong)

            return gemm

        names = [name for f, name in seconds if f == family]
        return {name: (run(name), contextlib.nullcontext) for name in names}

    monkeypatch.setattr(tune, "contenders", contenders)
    monkeypatch.setattr(tune, "SHAPES", SMALL)
    monkeypatch.setattr(gemm_table, "cuda_tiles", lambda: CUDA_TILES)
    monkeypatch.setattr(gemm_table, "use_cuda_tiles", lambda entries: None)
    monkeypatch.setattr(device, "ON_CPU", True)  # for the size of its cache
    monkeypatch.setattr(device, "DRY_RUN", True)
    return tune.measure("cpu", clock, capability=(9, 0), seconds=1.0)


def test_the_fastest_of_each_family_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = measured(
        monkeypatch,
        {
            ("16-bit", "cuda"): 2e-3,
            ("16-bit", "triton 0"): 3e-3,
            ("16-bit", "triton 2"): 1e-3,
            ("fp8", "cuda"): 0.995e-3,
            ("fp8", "vendor"): 1e-3,
            ("fp8 blocks", "cuda"): 1e-3,
            ("fp8 blocks", "cuda 11"): 0.9e-3,
            ("fp8 blocks", "triton 0"): 2e-3,
            ("fp8 fast", "triton 0"): 1e-3,
            ("16-bit blocks", "triton 0"): 2e-3,
            ("16-bit blocks", "triton 1"): 1e-3,
        },
    )
    triton, blocks = (tune.tiles(90, of) for of in ("16-bit", "16-bit blocks"))
    cluster = {"block_m": 256, "block_n": 128, "cluster": 2}
    assert entries == {
        **{f"16-bit {size}": ("triton", asdict(triton["triton 2"])) for size in SMALL},
        **{f"16-bit blocks {size}": ("triton", asdict(blocks["triton 1"])) for size in SMALL},
        **{f"fp8 {size}": ("vendor", None) for size in SMALL},  # ours is within the margin
        **{f"fp8 blocks {size}": ("cuda", cluster) for size in SMALL},
    }, "and none for fp8 fast, which one variant alone can do"
    match = r"gemm of \(4, 48, 32\) in 16-bit, nt, by cuda is wrong: c"
    with pytest.raises(ValueError, match=match):
        measured(monkeypatch, {("16-bit", "cuda"): 1e-3, ("16-bit", "vendor"): 2e-3}, "cuda")


def test_what_is_written_is_read(tuned: Path) -> None:
    """The entries of other GPUs stay; a damaged file is replaced."""
    tile = asdict(tune.tiles(90, "16-bit")["triton 0"])
    mine, old = gemm_table.Entry("triton", tile), gemm_table.Entry("cuda", None)
    assert gemm_table.fastest("9.0", "16-bit", "thin") == ""
    tune.save(tuned, {"16-bit thin": old}, "8.0")
    tune.save(tuned, {"16-bit thin": mine}, "9.0")
    assert gemm_table.fastest("9.0", "16-bit", "thin") == "triton"
    assert gemm_table.fastest("8.0", "16-bit", "thin") == "cuda"
    assert gemm_table.tile(90, "16-bit", 16, 4096, 4096, 2) == tile
    assert gemm_table.tile(90, "16-bit", 4096, 4096, 4096, 2) is None
    tuned.write_text("{")
    tune.save(tuned, {"16-bit thin": mine}, "9.0")
    assert gemm_table.table() == {"9.0": {"16-bit thin": mine}}


def test_the_entries_that_come_with_mixprec_follow_from_what_was_measured() -> None:
    """Where torch and we can do all shapes and differ by 5 % or more: the faster backend, if it
    is not first without an entry."""
    root = Path(__file__).resolve().parents[2]
    path = root / "bench" / "results" / "nvidia-h100-80gb-hbm3" / "gemm-tiles.json"
    rows, expected = json.loads(path.read_text())["rows"], {}
    for family in gemm_table.FAMILIES:
        for size, shapes in tune.SHAPES.items():
            times = [
                row["seconds"]
                for row in rows
                if row["family"] == family and tuple(row["shape"]) in shapes
            ]
            if not times or not all("vendor" in one for one in times):
                continue
            found = tune.fastest(times)
            assert found is not None
            backend, speedup = found[0].split()[0], found[1]
            first = "cuda" if family == "fp8 blocks" else "vendor"
            if backend != first and speedup >= 1.05:
                expected[f"{family} {size}"] = gemm_table.Entry(backend, None)
    assert gemm_table.read(gemm_table.SHIPPED) == {"9.0": expected}


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["tune"]) == 1
    assert "tune: no CUDA device: there is nothing to measure" in capsys.readouterr().err
