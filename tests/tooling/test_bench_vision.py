"""mixprec.bench vision, without a GPU and without torchvision: a tiny model in place of the large
ones, in every precision; the search for the largest batch; rows that are wrong, die or lose the
device."""

from __future__ import annotations

import gc
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import mixprec
from mixprec.bench import __main__ as cli
from mixprec.bench import (
    gpu,
    gpu_run,
    gpu_stages,
    results,
    vision,
    vision_memory,
    vision_models,
    vision_row,
)
from mixprec.bench import vision_step as steps
from mixprec.bench.registry import NotMeasured
from mixprec.bench.vision_search import Largest, largest

ROOT = Path(__file__).resolve().parents[2]
# What the page that is made from the file reads of a row.
FIELDS = {
    *("model", "source", "precision", "tf32", "batch", "params", "images_per_s", "samples"),
    *("peak_bytes", "largest_batch", "largest_batch_bounded", "status", "reason"),
}


class Tiny(nn.Module):
    """What the large models are made of: strided, depthwise and 1 x 1 convolutions, an activation
    in place, batch norm, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 16, 4, stride=4, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
            *(nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16)),
            *(nn.SiLU(inplace=True), nn.Conv2d(16, 32, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        )
        self.head = nn.Linear(32, vision_models.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Rehearse with a model "tiny" of a package that is made up: install(make), by default Tiny."""
    monkeypatch.setattr(gpu, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(gpu, "ON_CPU", True)
    monkeypatch.setattr(gpu, "REHEARSAL", True)
    monkeypatch.setattr(vision_row, "SAMPLES", vision_row.QUEUED)  # in no time
    gpu_run.clock.cache_clear()
    package = ModuleType("mixprec_tiny_vision")
    package.__version__ = "1.2"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)

    def installed(make: Callable[[], nn.Module] = Tiny) -> None:
        vision_row._reference.cache_clear()
        model = vision_models.Model({package.__name__: lambda _: make()}, 4, 1e-2, True)
        monkeypatch.setitem(vision_models.MODELS, "tiny", model)

    installed()
    yield installed
    vision_row._reference.cache_clear()


def measured(precision: str = "fp32", batch: int | None = None, **more: Any) -> dict[str, Any]:
    (row,) = vision_row.plan(["tiny"], [precision], batch)
    return vision_row.run_row(row, lambda _: None, **{"seconds": 3600.0, **more})


def trainer(precision: str) -> steps.Trainer:
    return steps.Trainer("tiny", vision_models.find("tiny")[1], steps.PRECISIONS[precision])


# Rows


def test_every_precision_fills_its_row(install: Install, tmp_path: Path) -> None:
    path, names = tmp_path / "vision.json", list(steps.PRECISIONS)
    planned = vision_row.plan(["tiny"], names, None)
    assert vision.run_rows(planned, path, seconds=3600.0, resume=False) == 0
    content = json.loads(path.read_text())
    assert content["schema"] == results.SCHEMA
    assert content["environment"]["rehearsal"] is True
    assert {"gpu_before", "gpu_after", "sources"} <= content.keys()
    assert content["sources"].keys() >= {"gemm", "quantize", "adamw_"}
    assert [(r["precision"], r["tf32"]) for r in content["rows"]] == [
        *(("fp32", False), ("fp32", True), ("autocast-bf16", None), ("autocast-fp16", None)),
        *(("bf16", None), ("fp16", None), ("fp8", None), ("fp8-delayed", None)),
        ("fp8-worthwhile", None),
    ]
    for row in content["rows"]:
        assert row.keys() >= FIELDS
        assert (row["status"], row["reason"]) == ("ok", ""), row
        assert (row["model"], row["source"], row["batch"]) == ("tiny", "mixprec_tiny_vision 1.2", 2)
        assert row["params"] == sum(p.numel() for p in Tiny().parameters())
        assert len(row["samples"]) >= vision_row.QUEUED
        speed = 2 / statistics.median(row["samples"])
        assert row["images_per_s"] == pytest.approx(speed, rel=1e-4)
        assert row["peak_bytes"] is None  # nobody counts on a CPU
        assert (row["largest_batch"], row["largest_batch_bounded"]) == (8, True)  # of a rehearsal
        assert row["took"] > 0
    assert vision.show(content["rows"]) == 0


def test_ours_is_what_readme_says_and_the_rival_is_torch(install: Install) -> None:
    for name, recipe, dtype in (
        *(("bf16", "bf16", torch.bfloat16), ("fp16", "fp16", torch.float16)),
        *(("fp8", "fp8", torch.bfloat16), ("fp8-delayed", "fp8-delayed", torch.bfloat16)),
    ):
        ours = trainer(name)
        layers = [m for m in ours.model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
        assert {m.recipe.name for m in layers} == {recipe}
        assert {m.weight.dtype for m in layers} == {dtype}
        norms = [m for m in ours.model.modules() if isinstance(m, nn.BatchNorm2d)]
        assert {m.weight.dtype for m in norms} == {torch.float32}
        assert isinstance(ours.optimizer, mixprec.optim.AdamW)
        assert isinstance(ours.scaler, mixprec.GradScaler)
        assert ours.scaler.is_enabled() == (dtype == torch.float16)
        assert ours.batch(2)[0].dtype == dtype
    for name in ("fp32", "tf32", "autocast-bf16", "autocast-fp16"):
        rival = trainer(name)
        assert type(rival.optimizer) is torch.optim.AdamW
        assert rival.optimizer.defaults["fused"]
        assert type(rival.scaler) is torch.amp.GradScaler
        assert rival.scaler.is_enabled() == (name == "autocast-fp16")
        assert not any(isinstance(m, mixprec.nn.Layer) for m in rival.model.modules())
        x, _ = rival.batch(2)
        assert x.dtype == torch.float32
        assert x.is_contiguous(memory_format=torch.channels_last)
        assert rival.model.body[0].weight.is_contiguous(memory_format=torch.channels_last)
    few = trainer("fp8-worthwhile")
    assert not any(isinstance(m, mixprec.nn.Layer) for m in few.model.modules())  # all too small


def test_all_precisions_see_the_same_images(install: Install) -> None:
    x, labels = trainer("fp32").batch(3, seed=1)
    for precision in steps.PRECISIONS:
        y, same = trainer(precision).batch(3, seed=1)
        assert torch.equal(y, x.to(y.dtype))
        assert torch.equal(same, labels)
    assert not torch.equal(x, trainer("fp32").batch(3)[0])


def test_tf32_is_set_for_each_precision_and_put_back(install: Install) -> None:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    seen = set()

    class Spy(Tiny):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.add((matmul.allow_tf32, cudnn.allow_tf32, x.shape[0] == 2))
            return super().forward(x)

    for precision, tf32 in (("tf32", True), ("fp32", False), ("bf16", False)):
        install(Spy)
        vision_row._reference("tiny", 4, 2)  # without TF32, whatever is measured
        assert {s[:2] for s in seen} == {(False, False)}
        seen.clear()
        assert measured(precision)["status"] == "ok"
        assert {s[:2] for s in seen} == {(tf32, tf32)}
        assert (tf32, tf32, True) in seen, "the timed batch, too"
        seen.clear()
        assert (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark) == before
    with pytest.raises(KeyError), steps.switches(tf32=True, benchmark=True):
        raise KeyError
    assert (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark) == before


def test_a_missing_package_is_a_reason(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "mixprec_of_another_torch":
                raise RuntimeError("operator torchvision::nms does not exist\nmore")

    def none(_: ModuleType) -> nn.Module:
        raise AssertionError

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    packages = {"mixprec_is_not_there": none, "mixprec_of_another_torch": none}
    monkeypatch.setitem(vision_models.MODELS, "tiny", vision_models.Model(packages, 4, 1.0, False))
    row = measured("bf16")
    assert row["status"] == "not measured"
    assert "mixprec_is_not_there is not installed" in row["reason"]
    assert row["reason"].endswith(
        "mixprec_of_another_torch cannot be imported "
        "(RuntimeError: operator torchvision::nms does not exist)"
    )
    assert row["source"] == "mixprec_is_not_there or mixprec_of_another_torch"
    assert (row["images_per_s"], row["samples"]) == (None, [])
    assert vision.show([row]) == 0
    with pytest.raises(NotMeasured):
        vision_models.find("tiny")


# Values before speed


class Spoiled(Tiny):
    """Right in FP32, something else under autocast."""

    spoil: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return type(self).spoil(y) if torch.is_autocast_enabled("cpu") else y


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda y: 1.5 * y + 20 * torch.linspace(-1, 1, 1000), "the first loss is not FP32's"),
        (lambda y: y.detach() + 0 * y, "falls by less than 50% of what FP32's does"),
        (lambda y: y * float("nan"), "a loss is not finite"),
    ],
)
def test_a_wrong_precision_is_not_timed(
    install: Install, monkeypatch: pytest.MonkeyPatch, spoil: Any, reason: str
) -> None:
    install(type("One", (Spoiled,), {"spoil": staticmethod(spoil)}))
    monkeypatch.setattr(vision_row, "_timed", lambda *_: pytest.fail("was timed"))
    row = measured("bf16")
    assert row["status"] == "wrong"
    assert reason in row["reason"]
    assert (row["samples"], row["images_per_s"], row["largest_batch"]) == ([], None, None)
    assert vision.show([row]) == 1


def test_what_losses_are_wrong() -> None:
    reference = [7.0, 5.0, 3.0]
    assert steps.wrong([7.2, 5.0, 5.0], reference) is None
    for losses, reason in (
        ([7.4, 5.0, 3.0], "the first loss is not FP32's within 5%"),
        ([7.0, 5.0, 5.1], "falls by less than 50%"),
        ([7.0, float("nan"), 3.0], "not finite"),
        ([7.0, 5.0], "too many steps were skipped"),
    ):
        assert reason in str(steps.wrong(losses, reference))
    assert "FP32 does not learn" in str(steps.wrong([7.0, 7.0, 7.0], [7.0, 7.0, 7.0]))
    assert "FP32 does not learn" in str(steps.wrong(reference, [7.0, 5.0, float("nan")]))


@pytest.mark.parametrize("precision", ["fp16", "autocast-fp16"])
def test_skipped_steps_are_no_updates(install: Install, precision: str) -> None:
    one = trainer(precision)
    expected = one.losses(4, 2)
    assert len(expected) == 3
    kind, options = type(one.scaler), {"cpu": "cpu"}.values()
    one = trainer(precision)
    one.scaler = kind(*options, init_scale=2.0**33)
    assert one.losses(4, 2) == pytest.approx(expected, rel=0.01)
    assert one.scaler.get_scale() < 2.0**33
    one = trainer(precision)
    one.scaler = kind(*options, init_scale=2.0**120)
    found = one.losses(4, 2)
    assert len(found) < 3
    assert "too many steps were skipped" in str(steps.wrong(found, expected))


def test_steps_that_end_in_nothing_have_no_speed(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trainer("bf16")
    monkeypatch.setattr(one, "step", lambda _: torch.tensor(float("nan")))
    found = vision_row._timed(one, 2, 0.0, dict)
    assert found == {
        "status": "wrong",
        "reason": f"after {vision_row.QUEUED} steps the loss is nan, its scale 1.0",
    }


# Time and memory


def test_a_sample_does_not_begin_on_an_idle_device() -> None:
    class Clock:
        now = 0.0

        def mark(self) -> float:
            return self.now

        def between(self, first: float, last: float) -> float:
            return last - first

        def synchronize(self) -> None:
            self.idle = True

    class Slow:
        """The first step after a wait takes longer."""

        seen: list[int] = []  # noqa: RUF012

        def step(self, batch: int) -> None:
            clock.now += 5.0 if clock.idle else 1.0
            clock.idle = False
            self.seen.append(batch)

    clock = Clock()
    clock.idle = True
    found = vision_row.queued(Slow(), [0, 1, 2], clock)  # type: ignore[arg-type]
    assert found == [1.0] * vision_row.QUEUED
    assert Slow.seen == [0, 1, 2, 0, 1]


def test_clocks_are_those_of_the_timed_steps(install: Install) -> None:
    seen: list[int] = []

    class Counted(Tiny):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.shape[0])
            return super().forward(x)

    def watched() -> dict[str, list[float]]:
        noted = {"clocks.sm": [float(n) for n in seen]}
        seen.clear()
        return noted

    install(Counted)
    row = measured("bf16", batch=8, seconds=0.0, watched=watched)
    assert row["watched"] == {"clocks.sm": [8.0] * (vision_row.QUEUED + 1)}


LIMITS = (5, 8, 23, 24, 31, 32, 100, 999, 1000, 2047, 5000)


@pytest.mark.parametrize("guess", [None, 0, 8, 100, 1000, 1100, 3000, 100_000])
def test_the_largest_batch_is_exact(guess: int | None) -> None:
    for limit, known in itertools.product(LIMITS, (3, 8, 20)):
        tries: list[int] = []

        def fits(count: int, most: int = max(limit, known), tries: list[int] = tries) -> bool:
            tries.append(count)
            assert count % 8 == 0
            return count <= most

        found = largest(
            fits, known, step=8, until=1e9, most=1 << 15, guess=guess, clock=lambda: 0.0
        )
        assert found == Largest(max(known, limit // 8 * 8), bounded=False), (limit, known)
        assert len(tries) == len(set(tries)) <= 24
        if guess is not None and abs(guess - limit) < 0.1 * limit > 100:
            assert len(tries) <= 10, tries


def test_where_the_search_ends_before_it_is_over() -> None:
    for allowed in range(12):
        time, tries = iter(range(100)), []

        def fits(count: int, tries: list[int] = tries) -> bool:
            tries.append(count)
            return count <= 1000

        clock = lambda time=time: float(next(time))  # noqa: E731
        found = largest(fits, 8, step=8, until=allowed, most=1 << 15, clock=clock)
        assert len(tries) == allowed
        assert found.batch == max([8, *(n for n in tries if n <= 1000)])
        assert found.bounded
    assert largest(lambda _: True, 8, step=8, until=1.0, most=100, clock=lambda: 0.0) == (96, True)
    assert largest(lambda _: True, 8, step=8, until=1.0, most=4, clock=lambda: 0.0) == (8, True)


def is_tensor(thing: object) -> bool:
    """isinstance asks some modules' lazy attributes, which then warn."""
    return issubclass(type(thing), torch.Tensor)


class Limited(Tiny):
    """More than `limit` images do not fit, which shows in the middle of the pass."""

    limit = 40
    error: Exception = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if x.shape[0] > self.limit:
            raise type(self.error)(*self.error.args)  # one that is kept would keep the frames, too
        return y


@pytest.mark.parametrize(
    ("precision", "limit", "expected", "bounded"),
    [("fp8", 16, 16, False), ("fp8", 23, 16, False), ("fp8", 24, 24, False),
     ("fp8", 47, 40, False), ("fp8", 63, 56, False), ("fp8", 1000, 64, True),
     ("tf32", 48, 48, False), ("fp16", 48, 48, False), ("autocast-fp16", 48, 48, False)],
)  # fmt: skip
def test_the_largest_batch_of_a_model(
    install: Install, precision: str, limit: int, expected: int, bounded: bool
) -> None:
    install(type("One", (Limited,), {"limit": limit}))
    row = measured(precision, batch=16)
    assert (row["status"], row["reason"]) == ("ok", "")
    assert (row["largest_batch"], row["largest_batch_bounded"]) == (expected, bounded)
    assert row["batch"] == 16
    assert len(row["samples"]) >= vision_row.QUEUED


def test_without_time_the_timed_batch_is_a_bound(install: Install) -> None:
    row = measured("bf16", batch=16, seconds=0.0)
    assert (row["status"], row["largest_batch"], row["largest_batch_bounded"]) == ("ok", 16, True)


@pytest.mark.parametrize("precision", list(steps.PRECISIONS))
def test_a_row_gives_its_memory_back(install: Install, precision: str) -> None:
    def held() -> list[torch.Size]:
        shape = (vision_models.CLASSES, 32)  # of the head's weight, and of all that goes with it
        return [t.shape for t in gc.get_objects() if is_tensor(t) and t.shape == shape]

    before = len(held())
    assert measured(precision)["status"] == "ok"
    vision_row.release()
    assert len(held()) == before


@pytest.mark.parametrize("precision", ["fp32", "autocast-fp16", "fp16", "fp8-delayed"])
def test_a_try_gives_its_memory_back(install: Install, precision: str) -> None:
    def held() -> list[torch.Size]:
        gc.collect()
        tensors = (t for t in gc.get_objects() if is_tensor(t))
        return [t.shape for t in tensors if t.dim() and t.shape[0] in (17, 53)]

    install(Limited)
    one = trainer(precision)
    for count, fits in ((53, False), (17, True), (53, False)):
        assert vision_row.can_step(one, count) == fits
        assert held() == []
        assert all(p.grad is None for p in one.model.parameters())


def test_what_else_may_go_wrong_in_the_search(install: Install) -> None:
    """It ends there, and what was timed stays; libraries have words of their own for no memory."""
    for error, largest_, bounded, reason in (
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"), 32, True,
         "a step of 64 images: RuntimeError: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), 40, False, ""),
        (RuntimeError("CUDA error: out of memory"), 40, False, ""),
    ):  # fmt: skip
        install(type("One", (Limited,), {"error": error}))
        row = measured("fp32", batch=16)
        assert (row["status"], row["reason"]) == ("ok", reason)
        assert (row["largest_batch"], row["largest_batch_bounded"]) == (largest_, bounded)
        assert row["samples"]


def test_a_batch_that_does_not_fit_at_all_has_failed(install: Install) -> None:
    install(Limited)
    row = measured("fp32", batch=48)
    assert row["status"] == "failed"
    assert row["reason"].startswith("OutOfMemoryError: CUDA out of memory")
    assert vision.show([row]) == 1


def test_memory_of_a_gpu(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is that of one step, and the first guess what would fill the rest of the memory."""
    calls: list[str] = []
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: calls.append(name))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    one = trainer("fp32")
    monkeypatch.setattr(one, "step", lambda batch: calls.append("step"))
    monkeypatch.setattr(gpu, "ON_CPU", False)
    monkeypatch.setattr(gpu, "free_bytes", lambda: 120_000)
    assert vision_memory.peak(one, one.batch(2)) == 5000
    assert calls == ["synchronize", "reset_peak_memory_stats", "step", "synchronize"]
    assert vision_memory.guess(4, 5000) == 120
    assert calls[-1] == "empty_cache"


# Rows that end the process


def in_processes(monkeypatch: pytest.MonkeyPatch, statuses: list[int]) -> None:
    """Run in this process what `run_all` would start; the end of a process is KeyboardInterrupt."""

    def watched(command: list[str], path: Path, last: float) -> int:
        try:
            statuses.append(cli.main(command[3:]))
        except KeyboardInterrupt:
            statuses.append(-9)
        return statuses[-1]

    monkeypatch.setattr(gpu_stages, "watched", watched)


NAMES = ["fp32", "tf32", "bf16"]


def test_a_row_that_kills_the_process_does_not_take_the_others(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = steps.Trainer.step
    statuses: list[int] = []

    def kills(self: steps.Trainer, batch: Any) -> torch.Tensor:
        if self.precision.tf32:
            raise KeyboardInterrupt
        return right(self, batch)

    monkeypatch.setattr(steps.Trainer, "step", kills)
    in_processes(monkeypatch, statuses)
    path = tmp_path / "vision.json"
    path.write_text("an old one")
    rows = vision.run_all(["tiny"], NAMES, path, batch=None, seconds=600.0)
    assert statuses == [-9, 0]
    assert [r["status"] for r in rows] == ["ok", "failed", "ok"]
    assert rows[1]["reason"] == vision_row.DIED
    assert json.loads(path.read_text())["rows"] == rows
    assert vision.show(rows) == 1


def test_as_many_processes_as_there_are_rows(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def kills(self: steps.Trainer, batch: Any) -> torch.Tensor:
        raise KeyboardInterrupt

    statuses: list[int] = []
    monkeypatch.setattr(steps.Trainer, "step", kills)
    in_processes(monkeypatch, statuses)
    names = list(steps.PRECISIONS)
    rows = vision.run_all(["tiny"], names, tmp_path / "v.json", batch=None, seconds=600.0)
    assert statuses == [-9] * len(names) + [0]
    assert {r["reason"] for r in rows} == {vision_row.DIED}
    assert len(rows) == len(names)


@pytest.mark.parametrize("lost", [False, True])
def test_a_search_that_ends_the_process_keeps_what_was_timed(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lost: bool
) -> None:
    right = vision_row.can_step
    statuses: list[int] = []

    def kills(one: steps.Trainer, count: int) -> bool:
        if one.precision.tf32 and count > 16:
            raise gpu_run.DeviceLost("an illegal memory access") if lost else KeyboardInterrupt
        return right(one, count)

    monkeypatch.setattr(vision_row, "can_step", kills)
    if lost:  # what follows the loss of a device says so again

        def answers() -> None:
            error = sys.exc_info()[1]
            if isinstance(error, gpu_run.DeviceLost):
                raise error

        monkeypatch.setattr(gpu_run, "answers", answers)
    in_processes(monkeypatch, statuses)
    rows = vision.run_all(["tiny"], NAMES, tmp_path / "v.json", batch=8, seconds=600.0)
    assert statuses == [gpu_stages.LOST if lost else -9, 0]
    assert [r["status"] for r in rows] == ["ok"] * 3
    assert [r["largest_batch"] for r in rows] == [32, 16, 32]
    assert len(rows[1]["samples"]) >= vision_row.QUEUED
    assert rows[1]["largest_batch_bounded"]
    words = f"{vision_row.DIED}: a step of 32 images"
    assert rows[1]["reason"] == words + (" (an illegal memory access)" if lost else "")


def test_rows_that_were_never_reached_are_named(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    starts: list[bool] = []

    def never(command: list[str], path: Path, last: float) -> int:
        starts.append("--resume" in command)
        return 1

    monkeypatch.setattr(gpu_stages, "watched", never)
    path = tmp_path / "v.json"
    rows = vision.run_all(["tiny"], NAMES, path, batch=None, seconds=600.0)
    assert starts == [False] * vision.IDLE
    assert {(r["status"], r["reason"]) for r in rows} == {
        ("not measured", "the program did not start")
    }
    assert len(rows) == 3

    def one_row(command: list[str], path: Path, last: float) -> int:
        file = vision.File(path, resume=False)
        file.rows.append(rows[0] | {"status": "ok", "reason": ""})
        file.save()
        return 0

    monkeypatch.setattr(gpu_stages, "watched", one_row)
    rows = vision.run_all(["tiny"], NAMES, path, batch=None, seconds=0.1)
    assert [r["status"] for r in rows] == ["ok", "not measured", "not measured"]
    content = json.loads(path.read_text())
    assert content["rows"] == rows
    assert rows[2]["reason"] == "out of time"
    assert "sources" in content


# What a person sees


def test_every_line_of_the_table_says_which_fp32_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    done = {"status": "ok", "images_per_s": 3000.0, "peak_bytes": 3 << 30, "largest_batch": 640}
    rows = [r | done for r in vision_row.plan(["resnet50"], [*NAMES, "autocast-bf16"], 256)]
    rows = [r | {"reason": ""} for r in rows]
    rows[2] |= {"images_per_s": 4500.0, "largest_batch_bounded": True}
    rows[1] |= {"status": "wrong", "reason": "a loss is not finite"}
    assert vision.show(rows) == 1
    lines = capsys.readouterr().out.splitlines()
    cells = [line.split() for line in lines]
    assert cells[1] == ["resnet50", "fp32", "off", "256", "3,000", "1.00x", "3.00", "GiB", "640"]
    assert cells[2][:5] == ["resnet50", "fp32", "on", "256", "WRONG"]
    assert " ".join(cells[3]) == ("resnet50 bf16 no FP32 products 256 4,500 1.50x 3.00 GiB >= 640")
    assert lines[5:] == ["resnet50 fp32 with TF32: WRONG: a loss is not finite"]


def test_a_run_from_start_to_end(tmp_path: Path) -> None:
    """In processes of its own: without torchvision and timm, rows say so."""
    out = tmp_path / "deep" / "vision.json"
    words = ["--models", "efficientnet_b0", "--precisions", "fp32,bf16", "--seconds", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "mixprec.bench", "vision", *words, "--out", str(out)],
        capture_output=True, text=True, cwd=tmp_path, check=False,
        env={**os.environ, "MIXPREC_BENCH_DEVICE": "cpu"},
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == f"written: {out}", done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [r["precision"] for r in rows] == ["fp32", "bf16"]
    for row in rows:
        assert row["status"] == "ok" or row["reason"], row
    if rows[0]["source"] == "torchvision or timm":
        assert done.returncode == 0, done.stdout + done.stderr
        assert "torchvision is not installed" in rows[0]["reason"]
        assert "timm is not installed" in done.stdout


def test_words_that_are_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for words, reason in (
        (["--models", "resnet50,resnet51"], "got resnet51"),
        (["--precisions", "fp64"], "must be among fp32, tf32, autocast-bf16"),
        (["--batch", "0"], "must be 1 or more"),
    ):
        with pytest.raises(SystemExit):
            cli.main(["vision", *words])
        assert reason in capsys.readouterr().err
    monkeypatch.setattr(gpu, "REHEARSAL", False)
    monkeypatch.setattr(gpu, "name", lambda: None)
    assert cli.main(["vision", "--out", str(tmp_path / "x.json")]) == 2
    assert "vision: this machine has no GPU that torch can use" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_gpu_vision(tmp_path: Path) -> None:
    words = ["gpu-vision", f"PYTHON={sys.executable}", f"OUT={tmp_path}", "BUDGET=60",
             "ARGS=--models resnet50"]  # fmt: skip
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    command = " ".join(done.stdout.replace("\\\n", " ").split())
    assert (
        f'-m mixprec.bench vision --out "{tmp_path}/vision.json" --seconds 60 --models resnet50'
        in command
    )
