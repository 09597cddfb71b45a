"""A checkpoint that does not fit is refused, and nothing of the run changes."""

from __future__ import annotations

import itertools
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import for_each
from checkpoint_runs import OVERFLOW, PARTS, STEPS, Run, edit, refused, seed_all
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.utils._pytree import tree_leaves

import mixprec
from mixprec.checkpoint import load_checkpoint, save_checkpoint
from mixprec.optim import AdamW

GONE = object()
MOMENT = ("optimizer", "state", 5, "exp_avg_sq")
LOADS = "optimizer: AdamW.load_state_dict: exp_avg_sq"
# What an entry of the file becomes, or what it is changed with, and what the error says.
EDITS: tuple[tuple[tuple, Any, str], ...] = (
    (("version",), 2, "has version 2, and this mixprec reads 1"),
    (("version",), GONE, "has version None"),
    (("extra",), GONE, "it holds no extra"),
    *(((part,), GONE, f"holds no {part}, of") for part in PARTS),
    (("rng",), None, "pass rng=False"),
    (("rng",), [], "is damaged: rng must hold"),
    (("rng", "cuda"), GONE, "is damaged: rng must hold"),
    *(
        (("rng", "cpu"), bad, "rng: ")
        for bad in (torch.zeros(4).byte(), lambda c: c * 0, "x", GONE)
    ),
    *((("rng", "python"), bad, "rng: ") for bad in ((3, (0,), None), "x")),
    (("rng", "numpy"), (3, (1,) * 624 + (625,), None), "rng: "),
    (("rng", "numpy"), (3, (1,) * 625, "x"), "rng: the state of numpy must end"),
    (("classes",), None, "is damaged: classes must be a dict"),
    (("classes", "optimizer"), GONE, "optimizer was saved from None, got AdamW"),
    (("classes", "optimizer"), "Adam", "optimizer was saved from Adam, got AdamW"),
    (("classes", "lr_scheduler"), "StepLR", "lr_scheduler was saved from StepLR, got SequentialLR"),
    (("model",), [], "model must be a state dict, got list"),
    (("model", "0.bias"), GONE, "lacks 1 entries: 0.bias"),
    (("model", "w"), torch.ones(1), "adds 1 entries: w"),
    (("model", "0.bias"), torch.ones(1, 16), r"0.bias must have shape \(16,\), got \(1, 16\)"),
    (("model", "0.bias"), torch.Tensor.half, "bfloat16, got torch.float16; convert_dtype=True"),
    (("model", "0.bias"), torch.Tensor.int, "0.bias must have torch.bfloat16, got torch.int32$"),
    (("model", "0.bias"), "x", "0.bias is a tensor only"),
    (("optimizer", "param_groups"), lambda groups: groups[:1], "optimizer: .*group"),
    (MOMENT, torch.ones(3).double(), f"{LOADS} must have dtype"),
    (MOMENT, torch.ones(3).to_sparse(), f"{LOADS} must be dense, got layout torch.sparse_coo"),
    (("scaler", "scale"), -1.0, "scaler: GradScaler: scale must be"),
    (("scaler",), {}, "scaler: .*empty"),
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


@for_each(
    "content, held",
    [({"0.weight": torch.ones(2)}, "a dict with '0.weight'"), ({}, "a dict"), ([1], "a list")],
)
def test_a_file_of_torch_save(content: Any, held: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "x.pt")
    hint = r"model\.load_state_dict\(torch\.load\(path\)\)"
    with pytest.raises(ValueError, match=f"save_checkpoint wrote: it holds {held}; .*{hint}"):
        load_checkpoint(tmp_path / "x.pt", model=nn.Linear(2, 2))


def test_delayed_scales_on_one_side_only(tmp_path: Path) -> None:
    plain, delayed = nn.Linear(2, 2), mixprec.convert(nn.Linear(2, 2), "fp8-delayed")
    save_checkpoint(tmp_path / "delayed", model=delayed)
    save_checkpoint(tmp_path / "plain", model=plain)
    with pytest.raises(ValueError, match=r"adds 4 entries: .*delayed scales .*: convert the model"):
        load_checkpoint(tmp_path / "delayed", model=plain)
    with pytest.raises(ValueError, match=r"lacks 4 entries: .*: load it before convert"):
        load_checkpoint(tmp_path / "plain", model=delayed)
