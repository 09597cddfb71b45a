"""save_checkpoint, load_checkpoint: exact resuming, parts of a run, converted weights."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from cases import normal
from checkpoint_runs import NOTHING, STEPS, Run, as_bytes, edit, refused
from torch import nn
from torch.optim.lr_scheduler import StepLR

from mixprec.checkpoint import load_checkpoint, save_checkpoint
from mixprec.optim import SGD, Adam, AdamW, fp32_state_dict

TORCH_SCALER = {"scales": partial(torch.amp.GradScaler, "cpu")}
STOCHASTIC = {"stochastic_rounding": True, "seed": 5, "state_dtype": torch.bfloat16}
# tests/training/test_optim_state.py resumes every optimizer.
MIXES: dict[str, tuple[torch.dtype, Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "bf16 remainder16": (torch.bfloat16, Adam, {"master_weights": "remainder16"}),
    "bf16 remainder8": (torch.bfloat16, AdamW, {"master_weights": "remainder8"}),
    "bf16 stochastic": (torch.bfloat16, AdamW, STOCHASTIC),
    "fp16 master": (torch.float16, Adam, {"max_grad_norm": 0.5}),
    "torch AdamW": (torch.float32, torch.optim.AdamW, TORCH_SCALER),
}


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


def test_a_part_alone(path: Path) -> None:
    run, other = Run(), Run(init=1)
    run.step(0)
    save_checkpoint(path, **run.parts(), step=8, extra=[1.5, None, "a"])
    before = other.bits()
    assert load_checkpoint(path, model=other.model, rng=False)["extra"] == [1.5, None, "a"]
    assert as_bytes(other.model.state_dict()) == as_bytes(run.model.state_dict())
    (now, *rest), (then, *old) = other.bits(), before
    assert now | {"model": 0, "optimizer": 0} == then | {"model": 0, "optimizer": 0}
    assert rest == old
    masters = fp32_state_dict(run.model)  # which are the model's
    assert as_bytes(fp32_state_dict(other.model)) == as_bytes(masters)
    assert load_checkpoint(path, rng=False)["step"] == 8


class WithExtraState(nn.Linear):
    bits = 8

    def get_extra_state(self) -> int:
        return self.bits

    def set_extra_state(self, state: int) -> None:
        self.bits = state


def test_a_state_of_a_model_that_is_no_tensor(path: Path) -> None:
    model, other = WithExtraState(2, 1), WithExtraState(2, 1)
    model.bits = 4
    save_checkpoint(path, model=model)
    load_checkpoint(path, model=other)
    assert other.bits == 4


@pytest.mark.parametrize("of_file", [None, "whole", "part"])
@pytest.mark.parametrize("of_model", [None, "whole", "part"])
def test_compiled_models_have_the_names_of_plain_ones(
    of_file: str | None, of_model: str | None, path: Path
) -> None:
    def make(compiled: str | None) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        if compiled == "part":
            model[1] = torch.compile(model[1], backend="eager")
        return torch.compile(model, backend="eager") if compiled == "whole" else model

    saved, loaded = make(of_file), make(of_model)
    save_checkpoint(path, model=saved)
    assert "0.weight" in torch.load(path)["model"]
    load_checkpoint(path, model=loaded)
    assert as_bytes([*saved.parameters()]) == as_bytes([*loaded.parameters()])


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


def test_generators_of_python_and_numpy(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw() -> list[float]:
        return [random.gauss(0, 1), random.random(), numpy.random.normal(), numpy.random.random()]

    for drawn in (0, 1):  # of the normal numbers, which are made in pairs
        for _ in range(drawn):
            random.gauss(0, 1), numpy.random.normal()
        save_checkpoint(path)
        wanted = draw()
        load_checkpoint(path)
        assert draw() == wanted
    edit(path, lambda content: [content["rng"].pop(name) for name in ("python", "numpy")])
    before = random.getstate()
    load_checkpoint(path)  # of a version that did not save them
    assert random.getstate() == before
    monkeypatch.delitem(sys.modules, "numpy.random")
    save_checkpoint(path)
    assert "numpy" not in torch.load(path, weights_only=True)["rng"]
    monkeypatch.undo()
    other = {"bit_generator": "PCG64"}
    monkeypatch.setattr(numpy.random, "get_state", lambda legacy: other)
    with pytest.raises(ValueError, match="default generator, MT19937, got PCG64; pass rng=False"):
        save_checkpoint(path)


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
        wide = fp32_state_dict(run.model)  # rounded once
        want = {name: t.to(mine) if t.is_floating_point() else t for name, t in wide.items()}
        assert as_bytes(other.model.state_dict()) == as_bytes(want)


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
