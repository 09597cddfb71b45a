"""The file of save_checkpoint: plain, written as a whole or not at all, damage is found."""

from __future__ import annotations

import collections
import io
import itertools
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from checkpoint_runs import OVERFLOW, PARTS, STEPS, Run, as_bytes, edit, refused, seed_all
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.utils._pytree import tree_leaves

from mixprec.checkpoint import load_checkpoint, save_checkpoint
from mixprec.optim import AdamW


def test_the_file_is_plain_and_reads_without_us(path: Path) -> None:
    run = Run()
    run.step(0)
    save_checkpoint(path, **run.parts(), step=3)
    content = torch.load(path, weights_only=True)
    keys = ("format", "version", "step", "extra", "rng", "classes", "masters", *PARTS)
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


def small(path: Path) -> tuple[bytes, Any]:
    """A checkpoint with a part of each kind, small enough to damage it everywhere."""
    model = nn.Linear(2, 1)
    save_checkpoint(path, model=model, step=5, extra=torch.arange(3), rng=False)
    return path.read_bytes(), as_bytes(model.state_dict())


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
        refused(path, "(is damaged: it holds|is no checkpoint that save_checkpoint wrote)", run)


def test_code_in_a_file_is_not_run_and_torchs_advice_to_run_it_not_passed_on(path: Path) -> None:
    torch.save({"format": "mixprec checkpoint", "model": Thing()}, path)
    with pytest.raises(ValueError, match="code that runs when it is read, and was not loaded") as e:
        load_checkpoint(path)
    assert "weights_only" not in str(e.value)


def test_too_little_memory_is_not_damage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(path, step=1)
    monkeypatch.setattr(torch, "load", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        load_checkpoint(path)


# A checkpoint that does not fit is refused, and nothing of the run changes


GONE = object()
MOMENT = ("optimizer", "state", 5, "exp_avg_sq")
LOADS = "optimizer: AdamW.load_state_dict: exp_avg_sq"
# What an entry of the file becomes, or what it is changed with, and what the error says.
EDITS: tuple[tuple[tuple, Any, str], ...] = (
    (("version",), 2, "has version 2, and this mixprec reads 1"),
    (("extra",), GONE, "it holds no extra"),
    *(((part,), GONE, f"holds no {part}, of") for part in PARTS),
    (("rng",), None, "pass rng=False"),
    (("rng",), [], "is damaged: rng must hold"),
    (("rng", "cuda"), GONE, "is damaged: rng must hold"),
    *((("rng", "cpu"), bad, "rng: ") for bad in (torch.zeros(4).byte(), lambda c: c * 0, GONE)),
    *((("rng", "python"), bad, "rng: ") for bad in ((3, (0,), None), "x")),
    (("rng", "numpy"), (3, (1,) * 624 + (625,), None), "rng: "),
    (("rng", "numpy"), (3, (1,) * 625, "x"), "rng: the state of numpy must end"),
    (("classes",), None, "is damaged: classes must be a dict"),
    (("classes", "optimizer"), "Adam", "optimizer was saved from Adam, got AdamW"),
    (("model",), [], "model must be a state dict, got list"),
    (("model", "0.bias"), GONE, "lacks 1 entries: 0.bias"),
    (("model", "w"), torch.ones(1), "adds 1 entries: w"),
    (("model", "0.bias"), torch.ones(1, 16), r"0.bias must have shape \(16,\), got \(1, 16\)"),
    (("model", "0.bias"), torch.Tensor.half, "bfloat16, got torch.float16; convert_dtype=True"),
    (("model", "0.bias"), torch.Tensor.int, "0.bias must have torch.bfloat16, got torch.int32$"),
    (("optimizer", "param_groups"), lambda groups: groups[:1], "optimizer: .*group"),
    (MOMENT, torch.ones(3).double(), f"{LOADS} must have dtype"),
    (("scaler", "scale"), -1.0, "scaler: GradScaler: scale must be"),
    (("lr_scheduler", "_schedulers"), GONE, "lr_scheduler: "),
)


def change(content: dict, place: tuple, new: Any) -> None:
    *parents, last = place
    for key in parents:
        content = content[key]
    if new is GONE:
        del content[last]
    else:
        content[last] = new(content[last]) if callable(new) else new


@pytest.mark.parametrize("steps", [0, 2], ids=["into a fresh run", "into a run in progress"])
def test_what_does_not_fit_changes_nothing(steps: int, path: Path) -> None:
    run, other, expected = Run(), Run(init=1), Run(init=1)
    for step in range(STEPS):
        run.step(step)
    save_checkpoint(path, **run.parts(), step=1)
    whole = path.read_bytes()
    for each in (other, expected):
        seed_all(2)
        for step in range(steps):
            each.step(step)
    for place, new, message in EDITS:
        path.write_bytes(whole)
        edit(path, partial(change, place=place, new=new))
        refused(path, message, other)
    for each in (other, expected):  # and it goes on as if nothing had been tried
        seed_all(3)
        each.step(OVERFLOW + 1)
    assert other.bits() == expected.bits()


def fail_once_halfway(patch: pytest.MonkeyPatch, part: Any) -> None:
    """Its load_state_dict writes on the state that it had, takes the given one, then fails."""
    real, calls = type(part).load_state_dict, itertools.count()

    def load_state_dict(self: Any, state: dict) -> None:
        first = next(calls) == 0
        for leaf in tree_leaves(self.state_dict()) if first else ():
            if isinstance(leaf, torch.Tensor):
                leaf.zero_()
        real(self, state)
        if first:
            raise KeyError("halfway")

    patch.setattr(type(part), "load_state_dict", load_state_dict)


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


def test_a_model_without_memory_is_refused(path: Path) -> None:
    save_checkpoint(path, model=nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"weight is on the meta device; use model.to_empty\(\)"):
        load_checkpoint(path, model=nn.Linear(3, 3, device="meta"))


def test_sharded_tensors_are_refused(path: Path, one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
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
