"""Accelerate's loop against one written by hand, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

from same_bits import assert_same_bits  # noqa: E402

import mixprec  # noqa: E402
from mixprec.integrations.accelerate import attach  # noqa: E402

pytestmark = pytest.mark.slow

STEPS, HALF, OVERFLOWS, NORM = 50, 25, (7, 31), 0.5
RECIPES = ("bf16", "fp16", "fp8", "fp8-delayed")


def recipe_of(name: str) -> mixprec.Recipe:
    """Delayed scales depend on all steps before, and change the bits of every product."""
    recipe = mixprec.Recipe.parse(name)
    return replace(recipe, history=STEPS, power_of_two_scale=False) if recipe.history else recipe


def dtype_of(name: str) -> torch.dtype:
    return torch.float16 if name == "fp16" else torch.bfloat16


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """Accelerators share their state."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def make(recipe: str) -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, scheduler, scaler."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 48), torch.nn.GELU(), torch.nn.LayerNorm(48)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(48, 16))
    mixprec.cast_parameters(mixprec.convert(model, recipe_of(recipe)), dtype_of(recipe))
    optimizer = mixprec.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    scaler = mixprec.GradScaler(init_scale=2.0**12, growth_interval=6)
    return model, optimizer, scheduler, scaler if recipe == "fp16" else None


def loss_of(model: Any, step: int, half: int, recipe: str) -> torch.Tensor:
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(2 * step + half))
    error = model(x.to(dtype_of(recipe))).float() - x[:, :16]
    return error.square().mean()


def overflow(model: Any, step: int) -> None:
    if step in OVERFLOWS:
        model[0].weight.grad[3, 1] = torch.inf


def state_of(model: Any, optimizer: Any, scheduler: Any, scaler: Any) -> dict[str, Any]:
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    return {name: part.state_dict() for name, part in parts.items() if part is not None}


def by_hand(recipe: str) -> tuple[dict[str, Any], list[float]]:
    model, optimizer, scheduler, scaler = make(recipe)
    optimizer.max_grad_norm, norms = NORM, []
    scale = scaler or mixprec.GradScaler(enabled=False)
    for step in range(STEPS):
        for half in (0, 1):
            scale.scale(loss_of(model, step, half, recipe) / 2).backward()
        overflow(model, step)
        before = [p.clone() for p in model.parameters()]
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm.float().item())
        if not optimizer.last_step_skipped:
            scheduler.step()
        else:
            assert all(map(torch.equal, before, model.parameters()))
    return state_of(model, optimizer, scheduler, scaler), norms


class Owned(accelerate.Accelerator):
    """A class of the user's own, which stays one."""


def by_accelerate(recipe: str, folder: Path, resume: bool) -> tuple[dict[str, Any], list[float]]:
    accelerator = attach(Owned(gradient_accumulation_steps=2, cpu=True), make(recipe)[3])
    assert isinstance(accelerator, Owned)
    model, optimizer, scheduler, _ = make(recipe)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    if resume:
        accelerator.load_state(str(folder))
    norms = []
    for step in range(HALF if resume else 0, STEPS):
        if step == HALF and not resume:
            accelerator.save_state(str(folder))
        for half in (0, 1):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, step, half, recipe))
                if accelerator.sync_gradients:
                    overflow(model, step)
                    norm = accelerator.clip_grad_norm_(model.parameters(), NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        norms.append(norm.item())
        assert accelerator.optimizer_step_was_skipped == optimizer.optimizer.last_step_skipped
        assert optimizer.step_was_skipped or step not in OVERFLOWS
        assert optimizer.optimizer.max_grad_norm is None  # set for the step only
    return state_of(model, optimizer, scheduler, accelerator.scaler), norms


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_equals_the_loop_and_resumes_bit_for_bit(recipe: str, tmp_path: Path) -> None:
    """50 steps of two micro-batches, clipped, two of them with an Inf, and a resume half way."""
    want, norms = by_hand(recipe)
    assert any("master" in state for state in want["optimizer"]["state"].values())
    del want["scheduler"]["_step_count"]  # Accelerate counts micro-batches in it too
    for resume in (False, True):
        got, own = by_accelerate(recipe, tmp_path, resume)
        del got["scheduler"]["_step_count"]
        assert_same_bits(got, want)
        assert list(map(repr, own)) == list(map(repr, norms[HALF:] if resume else norms))


def test_clipping_by_value_and_a_norm_without_clipping() -> None:
    """clip_grad_value_, and the norm without clipping, under a scaler."""
    model, optimizer, _, scaler = make("fp16")
    accelerator = attach(accelerate.Accelerator(cpu=True), scaler)
    model, optimizer = accelerator.prepare(model, optimizer)
    other, reference, _, scale = make("fp16")
    reference.max_grad_value = 1e-3
    for step in range(3):
        accelerator.backward(loss_of(model, step, 0, "fp16"))
        accelerator.clip_grad_value_(model.parameters(), 1e-3)
        norm = accelerator.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        scale.scale(loss_of(other, step, 0, "fp16")).backward()
        reference.max_grad_norm = float("inf")  # reads the norm
        scale.step(reference)
        scale.update()
        reference.zero_grad()
        assert norm == reference.grad_norm.float() > 0
    assert_same_bits(model.state_dict(), other.state_dict())


def test_optimizers_of_torch_are_unscaled_clipped_and_skipped() -> None:
    """torch.optim.AdamW under mixprec.GradScaler: unscaled once, clipped, skipped."""

    def linear() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 16))
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = linear()
    accelerator = attach(accelerate.Accelerator(cpu=True), mixprec.GradScaler(init_scale=64.0))
    model, optimizer = accelerator.prepare(model, optimizer)
    other, reference = linear()
    scaler = mixprec.GradScaler(init_scale=64.0)
    for step in range(10):
        accelerator.backward((model(torch.ones(4, 32) + step) - 1).square().mean())
        overflow(model, step)
        accelerator.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
        scaler.scale((other(torch.ones(4, 32) + step) - 1).square().mean()).backward()
        overflow(other, step)
        scaler.unscale_(reference)
        torch.nn.utils.clip_grad_norm_(other.parameters(), NORM)
        scaler.step(reference)
        scaler.update()
        reference.zero_grad()
        assert accelerator.optimizer_step_was_skipped == (step in OVERFLOWS)
    assert_same_bits(model.state_dict(), other.state_dict())


def test_wrong_combinations_name_the_argument() -> None:
    """Wrong arguments, and clipping that the optimizer cannot do, are errors."""
    scaler = mixprec.GradScaler()
    with pytest.raises(TypeError, match=r"accelerator must be an accelerate.Accelerator, got int"):
        attach(3)
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(TypeError, match=r"scaler must be a mixprec.GradScaler, got GradScaler"):
        attach(accelerator, torch.amp.GradScaler("cpu"))
    attach(attach(accelerator), scaler)
    model, optimizer, _, _ = make("fp16")
    accelerator.prepare(model, optimizer)
    with pytest.raises(ValueError, match="must not have prepared an optimizer yet"):
        attach(accelerator, scaler)
    accelerator.backward(loss_of(model, 0, 0, "fp16"))
    params = list(model.parameters())
    with pytest.raises(ValueError, match=r"all those of one optimizer.*it has 6, got 2, of them 2"):
        accelerator.clip_grad_norm_(params[:2], 1.0)
    with pytest.raises(ValueError, match="norm_type must be 2, got 1"):
        accelerator.clip_grad_norm_(params, 1.0, norm_type=1)
    optimizer.max_grad_norm = 2.0
    accelerator.clip_grad_norm_(params, 2.0)
    with pytest.raises(
        ValueError, match=r"max_grad_norm must be 2.0, as the optimizer has it, got"
    ):
        accelerator.clip_grad_norm_(params, 1.0)


@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_precisions_of_accelerate_with_their_own_scaler_or_layers(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mixed_precision "fp16" and "fp8" are errors."""
    accelerator = accelerate.Accelerator(cpu=True)
    monkeypatch.setattr(type(accelerator), "mixed_precision", precision)
    with pytest.raises(ValueError, match=f"mixed_precision 'no' or 'bf16', got '{precision}'"):
        attach(accelerator)


EXAMPLE = Path(__file__).parents[2] / "examples" / "train_accelerate.py"


@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--nproc-per-node=2"]])
def test_the_example_learns(launcher: list[str]) -> None:
    """examples/train_accelerate.py in one process, and in two."""
    command = [sys.executable, *launcher, EXAMPLE, "--recipe", "fp16", "--dtype", "fp16"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    lines = done.stdout.splitlines()
    bits = [float(line.split()[2]) for line in lines if line.startswith("step")]
    assert len(bits) == 4, "one process prints"
    assert bits[-1] < 4.0  # of 8 bits for a byte
