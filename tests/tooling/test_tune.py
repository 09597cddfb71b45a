"""mixprec.bench tune: measures what can run, decides by its rule, writes what mixprec reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mixprec.bench import tune
from mixprec.ops._dispatch import backends, gemm_choice, gemm_rows, gemm_vendor, library
from mixprec.ops._dispatch.gemm_rows import Row


class FakeClock:
    """Time passes only in the work that is timed."""

    def __init__(self) -> None:
        self.now = 0.0

    def host(self) -> float:
        return self.now

    def delay(self, seconds: float) -> None:
        pass

    def mark(self) -> float:
        return self.now

    def reached(self, mark: float) -> bool:
        return False

    def between(self, first: float, last: float) -> float:
        return last - first

    def synchronize(self) -> None:
        pass


SMALL = {"thin": ((4, 48, 32), (8, 32, 48)), "small": ((80, 80, 80),)}


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeClock]:
    """Variants that take the given seconds (by family and backend) and give the right values."""

    def play(seconds: dict[tuple[str, str], float], wrong: str | None = None) -> FakeClock:
        clock = FakeClock()
        families = {dtype: family for family, dtype in tune.DTYPES.items()}

        def contenders(args: tuple[Any, ...], index: int) -> dict[str, Callable[..., Any]]:
            family = families[args[0].dtype]

            def run(backend: str) -> Callable[..., torch.Tensor]:
                def gemm(*args: Any) -> torch.Tensor:
                    clock.now += seconds[family, backend]
                    c = torch.ops.mixprec.gemm_reference(*args)
                    return c + 1 if backend == wrong else c

                return gemm

            return {b: run(b) for b in gemm_rows.BACKENDS if (family, b) in seconds}

        monkeypatch.setattr(tune, "contenders", contenders)
        monkeypatch.setattr(tune, "SHAPES", SMALL)
        return clock

    return play


def measured(clock: FakeClock) -> list[Row]:
    rows = tune.measure(
        "cpu", clock, arch="9.0", gpu="A GPU", cache=1 << 10, seconds=1.0, report=lambda _: None
    )
    return list(rows)


def test_the_fastest_of_each_family_and_size(played: Callable[..., FakeClock]) -> None:
    clock = played(
        {
            ("fp16", "cuda"): 2e-3,
            ("fp16", "triton"): 1e-3,
            ("fp16", "vendor"): 4e-3,
            ("bf16", "cuda"): 0.995e-3,
            ("bf16", "vendor"): 1e-3,
            ("fp8", "triton"): 1e-3,
        }
    )
    got = {(row.family, row.size): (row.backend, row.speedup) for row in measured(clock)}
    assert got == {
        **{("fp16", size): ("triton", 2.0) for size in SMALL},
        **{("bf16", size): ("vendor", 0.995) for size in SMALL},  # ours is within the margin
    }, "and none for fp8, which one variant alone can do"


def test_no_time_for_wrong_values(played: Callable[..., FakeClock]) -> None:
    clock = played({("fp16", "cuda"): 1e-3, ("fp16", "vendor"): 2e-3}, wrong="cuda")
    with pytest.raises(ValueError, match=r"gemm of \(4, 48, 32\) in fp16 by cuda is wrong: c"):
        measured(clock)


@pytest.mark.parametrize(
    ("times", "result"),
    [
        ([{"cuda": 1.0, "vendor": 2.0}, {"cuda": 2.0, "vendor": 1.0}], ("vendor", 1.0)),
        ([{"cuda": 1.0, "vendor": 4.0}, {"cuda": 2.0, "vendor": 2.0}], ("cuda", 2.0)),
        ([{"cuda": 1.0, "triton": 1.5}, {"triton": 1.5, "vendor": 1.0}], None),
        ([{"cuda": 3.0, "triton": 1.5}], ("triton", 2.0)),
        ([{}], None),
    ],
)
def test_the_rule(times: list[dict[str, float]], result: tuple[str, float] | None) -> None:
    found = tune.fastest(times)
    assert (found is None) is (result is None)
    if found is not None and result is not None:
        assert found[0] == result[0]
        assert found[1] == pytest.approx(result[1])


def test_every_shape_is_of_its_class() -> None:
    assert set(tune.SHAPES) == set(gemm_rows.SIZES)
    for size, shapes in tune.SHAPES.items():
        for shape in shapes:
            for dtype in tune.DTYPES.values():
                assert gemm_rows.size_class(*shape, dtype.itemsize) == size, (shape, dtype)


def test_the_arguments_are_what_torch_takes_too() -> None:
    for family in tune.DTYPES:
        args = tune.arguments(family, (16, 32, 48), "cpu", 0)
        assert gemm_rows.family(args[0].dtype) == family
        assert gemm_vendor.gemm_why_not(args, (9, 0)) is None
        other = tune.arguments(family, (16, 32, 48), "cpu", 1)
        assert not torch.equal(args[0].float(), other[0].float())


def test_contenders_are_those_that_can_do_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def why_not(name: str, backend: str, device: str, index: int, args: object) -> str | None:
        asked.append((name, device, index))
        return None if backend != "triton" else "no"

    def choose(name: str, device: str, args: object) -> object:
        return backends.order(device)[0]

    monkeypatch.setattr(backends, "why_not", why_not)
    monkeypatch.setattr(backends, "choose", choose)
    assert tune.contenders((), 3) == {"cuda": "cuda", "vendor": "vendor"}
    assert asked == [("gemm", "cuda", 3)] * 3


def test_the_file_is_what_the_choice_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows of this architecture are replaced, those of others kept, a damaged file written anew."""
    path = tmp_path / "new" / "rows.json"
    monkeypatch.setenv("MIXPREC_TUNED", str(path))
    old = Row("8.0", "bf16", "thin", "triton", "NVIDIA A100", "2026-01-01", 1.1)
    mine = Row("9.0", "bf16", "thin", "cuda", "NVIDIA H200", "2026-01-02", 1.2)
    try:
        gemm_choice.forget()
        assert gemm_choice.fastest("9.0", "bf16", "thin") == ""
        tune.save(path, [mine._replace(size="large"), old], "8.0")
        tune.save(path, [mine], "9.0")
        assert {row.key: row for row in (mine, old)} == gemm_rows.parse(
            json.loads(path.read_text())
        )
        assert gemm_choice.fastest("9.0", "bf16", "thin") == "cuda"
        assert gemm_choice.fastest("8.0", "bf16", "thin") == "triton"
        path.write_text("{")
        tune.save(path, [mine], "9.0")
        assert list(gemm_choice.rows().values()) == [mine]
    finally:
        monkeypatch.delenv("MIXPREC_TUNED")
        gemm_choice.forget()


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.tune(["--out", str(tmp_path / "rows.json")]) == 1
    assert "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "rows.json").exists()


def test_a_whole_run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    played: Callable[..., FakeClock],
) -> None:
    """From the command's words to the file, on a GPU that is played."""
    clock = played({(f, b): 1e-3 for f in gemm_rows.FAMILIES for b in ("cuda", "vendor")})

    class Properties:
        name, L2_cache_size = "A GPU", 1 << 10

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(tune._library, "capability", lambda _: (8, 9))
    monkeypatch.setattr(tune, "CudaClock", lambda: clock)
    monkeypatch.setattr(tune, "settle", lambda work, clock: None)
    tiles: list[Any] = []  # which test_tune_tiles.py measures
    monkeypatch.setattr(tune, "_tune_tiles", lambda *args: tiles.append(args))
    triton = library.TRITON_ERROR is None
    randn, arguments = torch.randn, tune.arguments
    monkeypatch.setattr(torch, "randn", lambda *s, device=None, **k: randn(*s, **k))
    monkeypatch.setattr(tune, "arguments", lambda f, s, device, seed: arguments(f, s, "cpu", seed))
    path = tmp_path / "rows.json"
    assert tune.tune(["--out", str(path), "--seconds", "0.01"]) == 0
    assert [args[3] for args in tiles] == [(8, 9)] * triton
    rows = gemm_rows.parse(json.loads(path.read_text()))
    assert {row.arch for row in rows.values()} == {"8.9"}
    assert len(rows) == len(gemm_rows.FAMILIES) * len(SMALL)
    text = capsys.readouterr().out
    assert "bf16  thin       vendor   1.00x the next" in text
    assert f"written: {path} (6 rows for A GPU, compute capability 8.9)" in text
