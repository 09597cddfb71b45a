"""Accelerate's loop against one written by hand, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import (
    CASES,
    INFS,
    STEPS,
    TWO_RANKS,
    Case,
    assert_same_bits,
    batches,
    loss_of,
    network,
    optimizer_and_scheduler,
    run_program,
    state,
    train,
)

import mixprec

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

from mixprec.integrations.accelerate import attach  # noqa: E402

pytestmark = pytest.mark.slow

FP16 = CASES[1]


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """Accelerators share their state."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


class Owned(accelerate.Accelerator):
    """A class of the user's own, which stays one."""


def by_accelerate(case: Case, folder: Path, resume: bool) -> tuple[dict[str, Any], list[float]]:
    accelerator = Owned(gradient_accumulation_steps=case.accumulate, cpu=True)
    accelerator = attach(accelerator, case.make_scaler())
    assert isinstance(accelerator, Owned)
    model = case.make_model()
    optimizer, scheduler = optimizer_and_scheduler(model.parameters())
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    data, norms = batches(STEPS * case.accumulate), []
    half = len(data) // 2
    if resume:
        accelerator.load_state(str(folder))
    for i in range(half if resume else 0, len(data)):
        if i == half and not resume:
            accelerator.save_state(str(folder))
        with accelerator.accumulate(model):
            accelerator.backward(case.loss(model, *data[i]))
            if accelerator.sync_gradients:
                for name, limit in case.clip.items():
                    clip = getattr(accelerator, name.replace("max_grad", "clip_grad") + "_")
                    norm = clip(model.parameters(), limit)
                    norms += [] if norm is None else [norm.item()]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            skipped = accelerator.optimizer_step_was_skipped
            assert skipped == optimizer.step_was_skipped == optimizer.optimizer.last_step_skipped
            own = [getattr(optimizer.optimizer, name) for name in case.clip]
            assert own == [None], "set for the step only"
    return state(model, optimizer, scheduler, accelerator.scaler), norms


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_equals_the_loop_and_resumes_bit_for_bit(case: Case, tmp_path: Path) -> None:
    """50 steps with clipping, accumulation, two overflows, and a resume half way."""
    want, norms = train(case)
    for resume in (False, True):
        got, own = by_accelerate(case, tmp_path, resume)
        assert_same_bits(got, want)
        assert list(map(repr, own)) == list(map(repr, norms[-len(own) or len(norms) :]))


def test_optimizers_of_torch_are_unscaled_clipped_and_skipped() -> None:
    """torch.optim.AdamW under mixprec.GradScaler: unscaled once, clipped, skipped."""
    accelerator = attach(accelerate.Accelerator(cpu=True), mixprec.GradScaler(init_scale=64.0))
    scaler, model, other = mixprec.GradScaler(init_scale=64.0), network(), network()
    reference = torch.optim.AdamW(other.parameters())
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for x, y in batches(2 * INFS[0]):
        accelerator.backward(loss_of(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scaler.scale(loss_of(other(x), y)).backward()
        scaler.unscale_(reference)
        torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        scaler.step(reference)
        scaler.update()
        reference.zero_grad()
        assert accelerator.optimizer_step_was_skipped == bool(x.isinf().any())
    assert scaler.skipped == 1
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
    model = FP16.make_model()
    optimizer, _ = optimizer_and_scheduler(model.parameters())
    accelerator.prepare(model, optimizer)
    with pytest.raises(ValueError, match="must not have prepared an optimizer yet"):
        attach(accelerator, scaler)
    accelerator.backward(FP16.loss(model, *batches(1, infs=())[0]))
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


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("clips", [False, True])
def test_without_attach_it_is_right_or_says_what_is_wrong(
    case: Case, clips: bool, recwarn: pytest.WarningsRecorder
) -> None:
    """A scaler without attach: the same as the loop; clipping scaled gradients warns."""
    case = replace(case, clip={}, scaler={"init_scale": 64.0})
    want, _ = train(case)
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=case.accumulate, cpu=True)
    model, scaler = case.make_model(), case.make_scaler()
    optimizer, scheduler = optimizer_and_scheduler(model.parameters())
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for i, batch in enumerate(batches(STEPS * case.accumulate)):
        with accelerator.accumulate(model):
            accelerator.backward(scaler.scale(case.loss(model, *batch)))
            if accelerator.sync_gradients:
                if clips:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                assert optimizer.step_was_skipped == optimizer.optimizer.last_step_skipped
            elif i == 0:
                for call in (scaler.step, scaler.unscale_):
                    with pytest.raises(ValueError, match=r"sync_gradients=False: use .*attach\("):
                        call(optimizer)
            scheduler.step()
            optimizer.zero_grad()
    if not clips:
        assert_same_bits(state(model, optimizer.optimizer, scheduler, scaler), want)
    told = [str(each.message) for each in recwarn if "attach(" in str(each.message)]
    assert len(told) == clips
    assert all(each.filename == __file__ for each in recwarn if str(each.message) in told)


@pytest.mark.parametrize("launcher", [(), TWO_RANKS])
def test_the_example_learns(launcher: tuple[str, ...], tmp_path: Path) -> None:
    """examples/train_accelerate.py in one process, and in two."""
    options = ("--recipe", "fp16", "--dtype", "fp16")
    lines = run_program(tmp_path, "train_accelerate.py", *options, launcher=launcher).splitlines()
    bits = [float(line.split()[2]) for line in lines if line.startswith("step")]
    assert len(bits) == 4, "one process prints"
    assert bits[-1] < 4.0  # of 8 bits for a byte
