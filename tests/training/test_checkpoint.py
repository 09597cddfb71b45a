"""save_checkpoint, load_checkpoint: exact resuming, files that are whole, all or nothing."""

from __future__ import annotations

import collections
import io
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import normal
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR, StepLR

from mixprec.amp.grad_scaler import GradScaler
from mixprec.checkpoint import load_checkpoint, save_checkpoint
from mixprec.optim import SGD, Adam, AdamW


def sgd(groups: Any, **options: Any) -> torch.optim.Optimizer:
    return SGD(groups, momentum=0.9, **options)


def torch_scaler(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **options)


LOW_STATE = {"state_dtype": torch.bfloat16}
MIXES: dict[str, tuple[torch.dtype, Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "fp32": (torch.float32, AdamW, {}),
    "bf16 master": (torch.bfloat16, sgd, {}),
    "bf16 remainder16": (torch.bfloat16, Adam, {"master_weights": "remainder16"}),
    "bf16 stochastic": (torch.bfloat16, sgd, {"stochastic_rounding": True, "seed": 5}),
    "bf16 moments": (torch.bfloat16, AdamW, LOW_STATE),
    "bf16 all": (torch.bfloat16, AdamW, {"stochastic_rounding": True, **LOW_STATE}),
    "fp16 master": (torch.float16, Adam, {"max_grad_norm": 0.5}),
    "torch AdamW": (torch.float32, torch.optim.AdamW, {"scales": torch_scaler}),
    "torch SGD": (torch.float32, torch.optim.SGD, {"scales": torch_scaler, "momentum": 0.9}),
}
STEPS, OVERFLOW = 6, 3


class Run:
    """A training run with everything that has a state, and one step as users write it."""

    def __init__(
        self,
        dtype: torch.dtype = torch.bfloat16,
        kind: Callable[..., torch.optim.Optimizer] = AdamW,
        scales: Callable[..., torch.amp.GradScaler] = GradScaler,
        init: int = 0,
        **options: Any,
    ) -> None:
        torch.manual_seed(init)
        self.dtype = dtype
        self.model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3)
        ).to(dtype)
        params = list(self.model.parameters())
        groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.02}]
        self.optimizer = kind(groups, lr=0.01, **options)
        self.scaler = scales(init_scale=2.0**10, growth_interval=2)
        schedules = [LinearLR(self.optimizer), CosineAnnealingLR(self.optimizer, T_max=4)]
        self.lr_scheduler = SequentialLR(self.optimizer, schedules, milestones=[2])

    def step(self, step: int) -> None:
        x = normal((8, 6), self.dtype, seed=step)
        loss = (self.model(x).float() - normal((8, 3), torch.float32, seed=5)).square().mean()
        self.scaler.scale(loss).backward()
        if step == OVERFLOW:
            self.optimizer.param_groups[0]["params"][0].grad[0, 0] = torch.inf
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.lr_scheduler.step()
        self.optimizer.zero_grad()

    def parts(self) -> dict[str, Any]:
        return {part: getattr(self, part) for part in PARTS}

    def bits(self) -> Any:
        """All of the state, random generator included, with tensors as their bytes."""
        states = {part: value.state_dict() for part, value in self.parts().items()}
        return as_bytes([states, torch.get_rng_state()])


PARTS = ("model", "optimizer", "scaler", "lr_scheduler")


def as_bytes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return value.dtype, tuple(value.shape), flat.numpy().tobytes()
    if isinstance(value, dict):
        return {key: as_bytes(item) for key, item in value.items()}
    return [as_bytes(item) for item in value] if isinstance(value, (list, tuple)) else value


def refused(path: Path, message: str, run: Run, **arguments: Any) -> None:
    """load_checkpoint raises one ValueError with the path and `message`, and changes no bit."""
    before = run.bits()
    with pytest.raises(ValueError, match=message) as caught:
        load_checkpoint(path, **{**run.parts(), **arguments})
    assert str(caught.value).startswith(f"load_checkpoint: {path}")
    assert run.bits() == before


def edit(path: Path, change: Callable[[dict], object]) -> None:
    """Write the file again with `change` made to its content."""
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.pt"


# Resuming


@pytest.mark.parametrize("mix", MIXES)
def test_a_run_resumed_at_any_step_is_the_uninterrupted_run(mix: str, tmp_path: Path) -> None:
    dtype, kind, options = MIXES[mix]
    run = Run(dtype, kind, **options)
    for step in range(STEPS):
        save_checkpoint(tmp_path / str(step), **run.parts(), step=step, extra={"at": [step]})
        run.step(step)
    assert run.scaler.get_scale() == 2.0**11, "grown twice, and backed off once"
    straight = run.bits()
    assert all(t.isfinite().all() for t in run.model.state_dict().values())
    for first in range(STEPS):
        resumed = Run(dtype, kind, init=1, **options)
        for step in range(first % 3):  # one that is fresh, or has done something else before
            resumed.step(100 + step)
        told = load_checkpoint(tmp_path / str(first), **resumed.parts())
        assert told == {"step": first, "extra": {"at": [first]}}
        for step in range(first, STEPS):
            resumed.step(step)
        assert resumed.bits() == straight, f"resumed at step {first}"


def test_without_the_random_state_other_numbers_follow(path: Path) -> None:
    run = Run()
    save_checkpoint(path, **run.parts(), rng=False)
    refused(path, "holds no state of random generators; pass rng=False", run)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    load_checkpoint(path, **run.parts(), rng=False)
    assert torch.equal(torch.get_rng_state(), before)
    save_checkpoint(path)
    torch.rand(3)
    load_checkpoint(path)
    assert torch.equal(torch.get_rng_state(), before)


def test_cuda_generators_are_saved_and_restored(path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.cuda.init()
    save_checkpoint(path)
    wanted = torch.rand(5, device="cuda")
    load_checkpoint(path)
    assert torch.equal(torch.rand(5, device="cuda"), wanted)


def test_generators_of_devices_that_are_not_here(path: Path) -> None:
    save_checkpoint(path)
    devices = torch.cuda.device_count() + 1
    edit(path, lambda content: content["rng"].update(cuda=[content["rng"]["cpu"]] * devices))
    refused(path, f"holds the random generators of {devices} CUDA devices", Run(), **NOTHING)
    load_checkpoint(path, rng=False)


NOTHING: dict[str, None] = dict.fromkeys(PARTS)


def test_a_part_alone(path: Path) -> None:
    run, other = Run(), Run(init=1)
    run.step(0)
    save_checkpoint(path, **run.parts(), step=8, extra=[1.5, None, "a"])
    before = other.bits()
    assert load_checkpoint(path, model=other.model, rng=False)["extra"] == [1.5, None, "a"]
    assert other.bits() != before
    assert as_bytes(other.model.state_dict()) == as_bytes(run.model.state_dict())
    assert as_bytes(other.optimizer.state_dict()) == before[0]["optimizer"]
    assert load_checkpoint(path, rng=False)["step"] == 8


def test_several_optimizers_and_schedulers(path: Path) -> None:
    def pair(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        models = [nn.Linear(3, 2), nn.Linear(2, 1)]
        optimizers = [AdamW(models[0].parameters()), SGD(models[1].parameters(), momentum=0.5)]
        for model, optimizer in zip(models, optimizers, strict=True):
            model(normal((4, model.in_features), torch.float32, seed=seed)).sum().backward()
            optimizer.step()
        schedulers = [StepLR(optimizer, seed + 1) for optimizer in optimizers]
        return {"model": models, "optimizer": optimizers, "lr_scheduler": schedulers}

    def bits(parts: dict[str, Any]) -> Any:
        return as_bytes([[one.state_dict() for one in several] for several in parts.values()])

    mine, other = pair(0), pair(1)
    save_checkpoint(path, **mine)
    load_checkpoint(path, **other)
    assert bits(other) == bits(mine)
    for optimizers, message in (
        (other["optimizer"][0], r"holds no optimizer, .*: .*optimizer\[0\], optimizer\[1\]"),
        (other["optimizer"][::-1], r"optimizer\[0\] was saved from AdamW, got SGD"),
    ):
        with pytest.raises(ValueError, match=message):
            load_checkpoint(path, optimizer=optimizers)
    assert bits(other) == bits(mine)


def test_a_tensor_lr_stays_where_it_is(path: Path) -> None:
    params = [nn.Parameter(torch.ones(3))]
    save_checkpoint(path, optimizer=AdamW(params, lr=torch.tensor(0.25)))
    resumed = AdamW(params, lr=torch.tensor(0.5, dtype=torch.float64))
    load_checkpoint(path, optimizer=resumed)
    assert resumed.param_groups[0]["lr"].item() == 0.25
    elsewhere = AdamW(params, lr=torch.tensor(0.5, device="meta"))  # in place of a GPU
    load_checkpoint(path, optimizer=elsewhere)
    assert elsewhere.param_groups[0]["lr"].device.type == "meta"


# The file


def test_the_file_is_plain_and_reads_without_us(path: Path) -> None:
    run = Run()
    run.step(0)
    save_checkpoint(path, **run.parts(), step=3)
    content = torch.load(path, weights_only=True)
    keys = ("format", "version", "step", "extra", "rng", "classes", *PARTS)
    assert sorted(content) == sorted(keys)
    assert content["format"] == "mixprec checkpoint"
    assert (content["version"], content["step"]) == (1, 3)
    assert content["classes"]["optimizer"] == "AdamW"
    Run(init=1).model.load_state_dict(content["model"])
    Run(init=1).optimizer.load_state_dict(content["optimizer"])
    torch.amp.GradScaler("cpu").load_state_dict(content["scaler"])


class Thing:
    pass


class Masked(torch.Tensor):
    pass


Point = collections.namedtuple("Point", "x y")
NOT_PLAIN = (
    len,
    [0, Thing()],
    Thing,
    np.float64(1.0),
    np.zeros(3),
    Point(1, 2),
    collections.defaultdict(int),
    {Thing(): 1},
    torch.ones(2).as_subclass(Masked),
    torch.ones(2, device="meta"),
)


def test_what_could_not_be_loaded_is_refused_when_saved(path: Path) -> None:
    save_checkpoint(path, step=1)
    before = path.read_bytes()
    for value in NOT_PLAIN:
        with pytest.raises(ValueError, match=r"^save_checkpoint: .*extra\['p'\]"):
            save_checkpoint(path, extra={"p": value})
    for step in (1.0, "1", True, torch.tensor(1)):
        with pytest.raises(ValueError, match="save_checkpoint: step must be an int"):
            save_checkpoint(path, step=step)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_plain_values_come_back_as_they_were(path: Path) -> None:
    extra = {
        "numbers": [1, 2**70, -1.5, float("inf"), True, None],
        "nested": ({"a": ["b", ()]}, collections.OrderedDict(x=1)),
        5: torch.Size((2, 3)),
        "counted": collections.Counter("aab"),
        "dtype": torch.bfloat16,
        "tensors": [torch.arange(6).reshape(2, 3).t(), torch.ones((), dtype=torch.float8_e4m3fn)],
        "param": nn.Parameter(torch.ones(2)),
    }
    save_checkpoint(path, extra=extra)
    got = load_checkpoint(path)["extra"]
    assert as_bytes(got) == as_bytes(extra)
    assert list(map(type, got.values())) == list(map(type, extra.values()))


def test_folders_and_missing_ones(path: Path) -> None:
    for error, place in (
        (FileNotFoundError, path.parent / "none" / "run.pt"),
        (IsADirectoryError, path.parent),
    ):
        for call in (load_checkpoint, save_checkpoint):
            with pytest.raises(error):
                call(place)
    assert os.listdir(path.parent) == []


def test_written_flushed_renamed_in_this_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def recorded(word: str) -> Callable:
        real = getattr(os, word)

        def call(*args: Any) -> Any:
            what = args[0]
            is_folder = isinstance(what, int) and os.path.isdir(f"/proc/self/fd/{what}")
            calls.append(f"{word} folder" if is_folder else word)
            return real(*args)

        return call

    for word in ("fsync", "replace"):
        monkeypatch.setattr(os, word, recorded(word))
    save_checkpoint(path, step=1)
    assert calls == ["fsync", "replace", "fsync folder"]


def test_a_save_that_fails_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    save_checkpoint(path, step=1)
    for function in ("fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, function, fail)
            with pytest.raises(OSError, match="No space left"):
                save_checkpoint(path, step=2)
    assert load_checkpoint(path)["step"] == 1
    assert os.listdir(path.parent) == [path.name]


SAVES_AND_READS = """
import os, pathlib, random, signal, sys, time, torch
from mixprec.checkpoint import load_checkpoint, save_checkpoint

torch.set_num_threads(1)
path, seed = pathlib.Path(sys.argv[1]), random.Random(0)
model = torch.nn.Linear(1024, 4096)

def save(step):
    torch.nn.init.constant_(model.weight, step)
    save_checkpoint(path, model=model, step=step)

def read():
    step = load_checkpoint(path, model=model)["step"]
    assert model.weight.eq(step).all()
    return step

started = time.monotonic()
save(1)
longest = 5 * (time.monotonic() - started)
for _ in range(10):
    last = read()
    child = os.fork()
    if child == 0:
        for step in range(last + 1, 10**6):
            save(step)
    end = time.monotonic() + seed.uniform(0, longest)
    try:
        while time.monotonic() < end:
            before, last = last, read()
            assert last >= before
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert read() >= last
    left = [other for other in path.parent.iterdir() if other != path]
    print(read(), len(left))
    for other in left:
        other.unlink()
"""


def test_killed_while_it_saves(path: Path) -> None:
    """A process saves on and on; another reads all the time; again and again it is killed."""
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork")
    run = subprocess.run(
        [sys.executable, "-c", SAVES_AND_READS, str(path)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    steps, left = zip(*(map(int, line.split()) for line in run.stdout.splitlines()), strict=True)
    assert len(steps) == 10
    assert list(steps) == sorted(steps)
    assert steps[-1] > 2, "no save ended in time"
    assert sum(left) >= 3, "it was hardly ever killed in the middle"


def test_a_full_disk_is_an_oserror(path: Path) -> None:
    resource = pytest.importorskip("resource", reason="limits the size of files as POSIX does")
    model = nn.Linear(512, 512)
    save_checkpoint(path, model=model, step=1)
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, 1000, 2**19):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                save_checkpoint(path, model=model, step=2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
    assert load_checkpoint(path)["step"] == 1
    assert os.listdir(path.parent) == [path.name]


# Damage


def small(path: Path) -> tuple[bytes, Any]:
    """A checkpoint with a part of each kind, small enough to damage it everywhere."""
    model = nn.Linear(2, 1)
    save_checkpoint(path, model=model, step=5, extra=torch.arange(3), rng=False)
    return path.read_bytes(), as_bytes(model.state_dict())


def test_a_file_cut_off_anywhere_is_refused(path: Path) -> None:
    whole, _ = small(path)
    model = nn.Linear(2, 1)
    before = as_bytes(model.state_dict())
    for size in {*range(0, len(whole), 37), *range(len(whole) - 60, len(whole))}:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="is damaged or no checkpoint: ") as caught:
            load_checkpoint(path, model=model, rng=False)
        assert str(path) in str(caught.value)
    assert as_bytes(model.state_dict()) == before


def test_a_byte_that_changed_is_found_or_means_nothing(path: Path) -> None:
    whole, wanted = small(path)
    directory = whole.index(b"PK\x01\x02")  # of the archive: the only part without a checksum
    seed, problems = random.Random(0), []
    places = [(at, seed.randrange(1, 256)) for at in (*range(0, directory, 11), directory)]
    places += [(at, bit) for at in range(directory, len(whole)) for bit in (1, 16)]
    for at, change in places:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ change]) + whole[at + 1 :])
        model = nn.Linear(2, 1)
        before = as_bytes(model.state_dict())
        try:
            told = load_checkpoint(path, model=model, rng=False)
        except ValueError as error:
            problems.append(str(error))
            assert problems[-1].startswith(f"load_checkpoint: {path}")
            assert as_bytes(model.state_dict()) == before
        else:
            assert told["step"] == 5
            assert torch.equal(told["extra"], torch.arange(3))
            assert as_bytes(model.state_dict()) == wanted, at
    assert len(problems) > len(places) // 3
    assert any("is not what its checksum says" in problem for problem in problems)


def test_checksums_are_written_whatever_torch_is_told(path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        save_checkpoint(path, step=1)
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    assert load_checkpoint(path)["step"] == 1


def test_other_files_are_refused(path: Path) -> None:
    run, old = Run(), io.BytesIO()
    content = {"format": "mixprec checkpoint"}
    torch.save(content, old, _use_new_zipfile_serialization=False)
    for data in (b"", b"step: 1\n", old.getvalue()):
        path.write_bytes(data)
        refused(path, "is damaged or no checkpoint", run)
    parts = {"model": {}, "optimizer": {}}
    for value in (Thing(), run.optimizer, torch.ones(2), run.model.state_dict(), parts):
        torch.save(value, path)
        message = "(is damaged or no checkpoint|is no checkpoint that save_checkpoint wrote)"
        refused(path, message, run)


def test_too_little_memory_is_not_damage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise MemoryError

    save_checkpoint(path, step=1)
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(MemoryError):
        load_checkpoint(path)


EDITS: tuple[tuple[Callable[[dict], object], str], ...] = (
    (lambda c: c.update(version=2), "has version 2, and this mixprec reads 1"),
    (lambda c: c.pop("version"), "has version None"),
    (lambda c: c.pop("extra"), "it holds no extra"),
    *((lambda c, part=part: c.pop(part), f"holds no {part}, of") for part in PARTS),
    (lambda c: c.update(rng=None), "pass rng=False"),
    (lambda c: c["rng"].update(cpu=torch.zeros(4, dtype=torch.uint8)), "rng: "),
    (lambda c: c["rng"].update(cpu=c["rng"]["cpu"] * 0), "rng: "),
    (lambda c: c["rng"].update(cpu="x"), "rng: "),
    (lambda c: c["model"].pop("0.bias"), "lacks 1 entries: 0.bias"),
    (lambda c: c["model"].update(w=torch.ones(1)), "adds 1 entries: w"),
    (
        lambda c: c["model"].update({"0.bias": torch.ones(1, 16)}),
        r"0.bias must have shape \(16,\), got \(1, 16\)",
    ),
    (
        lambda c: c["model"].update({"0.bias": c["model"]["0.bias"].half()}),
        "0.bias must have torch.bfloat16, got torch.float16; convert_dtype=True",
    ),
    (
        lambda c: c["model"].update({"0.bias": c["model"]["0.bias"].int()}),
        "0.bias must have torch.bfloat16, got torch.int32$",
    ),
    (lambda c: c["model"].update({"0.bias": "x"}), "0.bias is a tensor only"),
    (lambda c: c.update(model=[]), "model must be a state dict, got list"),
    (lambda c: c["classes"].update(optimizer="Adam"), "optimizer was saved from Adam, got AdamW"),
    (
        lambda c: c["classes"].update(lr_scheduler="StepLR"),
        "lr_scheduler was saved from StepLR, got SequentialLR",
    ),
    (lambda c: c["optimizer"]["param_groups"].pop(), "optimizer: .*group"),
    (
        lambda c: c["optimizer"]["state"][5].update(exp_avg_sq=torch.ones(3).double()),
        "optimizer: AdamW.load_state_dict: exp_avg_sq must have dtype",
    ),
    (lambda c: c["scaler"].update(scale=-1.0), "scaler: GradScaler: scale must be"),
    (lambda c: c.update(scaler={}), "scaler: .*empty"),
    (lambda c: c["lr_scheduler"].pop("_schedulers"), "lr_scheduler: "),
)


@pytest.mark.parametrize("steps", [0, 2], ids=["into a fresh run", "into a run in progress"])
def test_what_does_not_fit_changes_nothing(steps: int, path: Path) -> None:
    run, other, expected = Run(), Run(init=1), Run(init=1)
    for step in range(STEPS):
        run.step(step)
    save_checkpoint(path, **run.parts(), step=1)
    whole = path.read_bytes()
    for each in (other, expected):
        torch.manual_seed(2)
        for step in range(steps):
            each.step(step)
    for change, message in EDITS:
        path.write_bytes(whole)
        edit(path, change)
        refused(path, message, other)
    for each in (other, expected):  # and it goes on as if nothing had been tried
        torch.manual_seed(3)
        each.step(OVERFLOW + 1)
    assert other.bits() == expected.bits()


def fail_once_halfway(patch: pytest.MonkeyPatch, part: Any) -> None:
    """Its load_state_dict writes on the state that it had, takes the given one, then fails."""
    real, calls = type(part).load_state_dict, itertools.count()

    def load_state_dict(self: Any, state: dict) -> None:
        first = next(calls) == 0
        for tensor in tensors_in(self.state_dict()) if first else ():
            tensor.zero_()
        real(self, state)
        if first:
            raise KeyError("halfway")

    patch.setattr(type(part), "load_state_dict", load_state_dict)


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [t for v in items for t in tensors_in(v)] if isinstance(value, dict | list) else []


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_fails_halfway_is_as_it_was(
    part: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, other = Run(), Run(init=1)
    for step, each in enumerate((run, other)):
        each.step(step)
    torch.manual_seed(0)
    expected = run.bits()
    save_checkpoint(path, **run.parts())
    fail_once_halfway(monkeypatch, getattr(other, part))
    refused(path, f"{part}: 'halfway'", other)
    load_checkpoint(path, **other.parts())
    assert other.bits() == expected


# Conversion


def test_another_dtype_is_converted_when_told_or_refused(path: Path) -> None:
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    for saved, mine in itertools.product(dtypes, dtypes):
        run, other = Run(saved), Run(mine, init=1)
        run.step(0)
        save_checkpoint(path, model=run.model)
        if saved != mine:
            message = f"must have {mine}, got {saved}; convert_dtype=True"
            refused(path, message, other, **NOTHING | {"model": other.model})
        load_checkpoint(path, model=other.model, convert_dtype=True)
        for key, value in other.model.state_dict().items():
            want = run.model.state_dict()[key]
            assert torch.equal(value, want.to(mine) if want.is_floating_point() else want)


@pytest.mark.parametrize(
    ("saved", "mine"),
    [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)],
    ids=["bf16 to fp16", "fp16 to bf16"],
)
def test_converted_weights_are_the_masters_roundings(
    saved: torch.dtype, mine: torch.dtype, path: Path
) -> None:
    run, other = Run(saved), Run(mine, init=1)
    for step in range(3):
        run.step(step)
    written = run.model[0].weight
    with torch.no_grad():  # after its last step, so that the master does not hold
        written[0, 0] = 1.5
    save_checkpoint(path, **run.parts())
    load_checkpoint(path, **other.parts(), convert_dtype=True)
    pairs = zip(run.model.parameters(), other.model.parameters(), strict=True)
    for p, q in pairs:
        master = run.optimizer.state[p]["master"].clone()
        if p is written:
            master[0, 0] = 1.5
        assert torch.equal(q, master.to(mine))
        assert not torch.equal(q, p.to(mine)) or saved == torch.float16
    masters = [s["master"].clone() for s in other.optimizer.state.values()]
    other.optimizer.param_groups[0]["lr"] = other.optimizer.param_groups[1]["lr"] = 0.0
    masters[0][0, 0] = 1.5
    other.step(0)
    after = [s["master"] for s in other.optimizer.state.values()]
    assert as_bytes(after) == as_bytes(masters)


def test_conversions_that_overflow_are_refused(path: Path) -> None:
    run = Run(torch.bfloat16)
    run.model[0].bias.data[3] = 1e5
    save_checkpoint(path, **run.parts())
    other = Run(torch.float16)
    refused(path, "0.bias holds values that overflow torch.float16", other, convert_dtype=True)
    run.model[0].bias.data[3] = torch.inf
    save_checkpoint(path, model=run.model)
    load_checkpoint(path, model=other.model, convert_dtype=True)
    assert other.model[0].bias[3] == torch.inf


def test_a_model_without_memory_is_refused(path: Path) -> None:
    save_checkpoint(path, model=nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"weight is on the meta device; use model.to_empty\(\)"):
        load_checkpoint(path, model=nn.Linear(3, 3, device="meta"))


# Ranks


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_sharded_tensors_are_refused(path: Path, mesh: DeviceMesh) -> None:
    model = nn.Linear(4, 4)
    save_checkpoint(path, model=model)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh))
    optimizer = AdamW(model.parameters())
    model.weight.grad = distribute_tensor(torch.ones(4, 4), mesh)
    optimizer.step()
    for call, place in (
        (lambda: save_checkpoint(path, model=model), "model['weight']"),
        (lambda: save_checkpoint(path, optimizer=optimizer), "optimizer['state'][0]['exp_avg']"),
        (lambda: load_checkpoint(path, model=model), "weight is a DTensor"),
    ):
        with pytest.raises(ValueError, match=r"torch\.distributed\.checkpoint") as caught:
            call()
        assert place in str(caught.value)
    assert os.listdir(path.parent) == [path.name]
