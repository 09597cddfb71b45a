"""Training on two and four ranks is that of one process; they skip, resume and end together."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import nearest
from distributed_models import (
    BF16,
    FP16,
    gradients_in_turn,
    local_part,
    loss_of,
    make_model,
    whole,
    wrapped,
)
from ranks import KILLED, on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import mixprec
from mixprec.distributed import reduce_gradients_in_fp32

pytestmark = pytest.mark.filterwarnings("ignore:.*backward hooks.*")


@dataclass(frozen=True)
class Setup:
    """One way to train on several ranks."""

    wrap: str  # "ddp", "fsdp", or "hsdp": two replicas of two shards
    params: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    optimizer: str = "mixprec"  # or of torch: "fused", or "foreach", which clips through torch
    hook: bool = False  # reduce_gradients_in_fp32, which leaves the gradients in main_grad
    moments: Any = torch.float32
    sizes: tuple[int, ...] = (6, 5, 7, 3, 1)  # over four ranks uneven shards, and empty ones
    recipe: str = ""  # of layers, whose steps are of several micro-batches
    reuse: bool = False  # reuse_weights around the micro-batches


MAX_NORM, STEPS, BAD_STEP, BAD_RANK = 0.02, 6, 2, 1


def data(setup: Setup, step: int, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches, of sizes that differ: the largest x is on the one rank, then on the other."""
    generator, made = torch.Generator().manual_seed(100 * step + rank), []
    for _ in range(3 if setup.recipe else 1):
        x, y = (torch.randn(4, setup.sizes[i], generator=generator) for i in (0, -1))
        made.append((x.to(setup.compute) * (1 + (step + rank) % 2 * 5), y))
    return made


class Training:
    """A model, its optimizer and scaler; on several ranks, or alone with the data of them all."""

    def __init__(self, setup: Setup, seed: int = 0, alone_with: int | None = None) -> None:
        self.setup, self.world = setup, alone_with
        self.model: nn.Module = make_model(*setup.sizes, seed=seed).to(setup.params)
        if setup.recipe:  # without stochastic rounding, which draws by rank
            mixprec.convert(self.model, nearest(setup.recipe))
        if alone_with is None:
            cast = setup.compute if setup.compute != setup.params else None
            self.model = wrapped(setup.wrap, self.model, cast)
            if setup.hook:
                reduce_gradients_in_fp32(self.model)
        self.params = list(self.model.parameters())
        # An eps well above the rounding errors of these small gradients, which Adam would magnify.
        options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-4}
        self.optimizer: torch.optim.Optimizer
        if setup.optimizer == "mixprec":
            # Norms of shards differ in their last bits, which a recipe must not.
            clip = None if setup.recipe else MAX_NORM
            options |= {"max_grad_norm": clip, "state_dtype": setup.moments}
            self.optimizer = mixprec.optim.AdamW(self.params, **options)
        else:
            options[setup.optimizer] = True
            self.optimizer = torch.optim.AdamW(self.params, **options)
        self.scaler = mixprec.GradScaler(init_scale=2.0**10, growth_interval=2)

    def backward(self, step: int, bad_rank: int | None = None) -> None:
        """bad_rank: whose second micro-batch has a NaN."""

        def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
            found = data(self.setup, step, rank)
            if rank == bad_rank:
                found[1][0][0, 0] = math.nan
            return found

        self.optimizer.zero_grad()
        if self.world is None:
            reuse = mixprec.reuse_weights(self.model) if self.setup.reuse else None
            with reuse or contextlib.nullcontext():
                *first, last = batches(dist.get_rank())
                self.accumulate(first, False)
                self.accumulate([last], True)
            return
        ranks = map(batches, range(self.world))
        grads = gradients_in_turn(self.model, self.scaler, self.setup.compute, ranks)
        for p, grad in zip(self.params, grads, strict=True):
            if self.setup.hook:
                p.main_grad = grad
            else:
                p.grad = grad.to(p.dtype)

    def accumulate(self, batches: list[tuple[torch.Tensor, torch.Tensor]], sync: bool) -> None:
        """Backward passes, after which the ranks communicate or do not."""
        around: Any = contextlib.nullcontext()
        if self.setup.wrap != "ddp":
            self.model.set_requires_gradient_sync(sync)
        elif not sync:
            around = self.model.no_sync()
        with around:
            for x, y in batches:
                self.scaler.scale(loss_of(self.model(x), y)).backward()

    def overflow(self, rank: int) -> None:
        """An Inf in one gradient; where it is sharded, in the part of one rank."""
        for p in self.params:
            grad = p.main_grad if self.setup.hook else p.grad
            part = local_part(grad)
            if part.numel() and (part is grad or rank == dist.get_rank()):
                part.view(-1)[-1] = math.inf
                return

    def step(self) -> float | None:
        """Clip, step and update; the gradients' norm, if the setup clips."""
        norm = None
        if self.setup.optimizer == "foreach":
            self.scaler.unscale_(self.optimizer)
            norm = whole([nn.utils.clip_grad_norm_(self.params, MAX_NORM)])[0]
        if self.setup.recipe:
            mixprec.update_scales(self.model, dist.group.WORLD if self.world is None else None)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if isinstance(self.optimizer, mixprec.optim.AdamW):
            norm = self.optimizer.grad_norm
        return None if norm is None else norm.item()

    def run(self, first: int, last: int, *, overflow: bool = False) -> dict[str, list[Any]]:
        """Norm and scale after each step, and the weights around the step that may overflow."""
        log: dict[str, list[Any]] = {"norms": [], "scales": [], "weights": []}
        for step in range(first, last):
            bad = overflow and step == BAD_STEP
            self.backward(step, BAD_RANK if bad and self.setup.recipe else None)
            if bad and not self.setup.recipe:
                self.overflow(BAD_RANK)
            log["norms"].append(self.step())
            log["scales"].append(self.scaler.get_scale())
            if step in (BAD_STEP - 1, BAD_STEP):
                log["weights"].append(whole(self.params))
        return log

    def state(self) -> dict[str, list[torch.Tensor]]:
        """All that a checkpoint holds of the optimizer and the model, unsharded."""
        states = list(self.optimizer.state_dict()["state"].values())
        found = {key: whole(s[key] for s in states) for key in states[0]}
        for name, buffer in self.model.named_buffers():
            found[name.removeprefix("module.")] = whole([buffer])
        return {"param": whole(self.params), **found}


def train(setup: Setup, alone_with: int | None = None) -> dict[bool, dict[str, Any]]:
    """STEPS steps without and with an overflow."""
    logs = {}
    for overflow in (False, True):
        training = Training(setup, alone_with=alone_with)
        log = training.run(0, STEPS, overflow=overflow)
        skipped = int(training.scaler.skipped)
        logs[overflow] = {**log, "state": training.state(), "skipped": skipped}
    return logs


SETUPS: dict[int, tuple[Setup, ...]] = {
    2: (
        Setup("ddp"),
        Setup("ddp", optimizer="fused"),
        Setup("ddp", params=BF16, compute=BF16),
        Setup("fsdp", params=FP16, compute=FP16),
        Setup("fsdp", params=BF16, compute=BF16),
        Setup("ddp", recipe="fp8"),
        Setup("ddp", recipe="fp8-delayed"),
        Setup("ddp", recipe="fp8-delayed", reuse=True),
        Setup("ddp", recipe="mxfp4"),
        Setup("fsdp", compute=BF16, recipe="fp8"),
        Setup("fsdp", compute=BF16, recipe="fp8-delayed", reuse=True),
        Setup("fsdp", compute=BF16, recipe="fp8-rowwise", reuse=True),
        Setup("fsdp", compute=BF16, recipe="nvfp4-1x16", reuse=True),
    ),
    4: (
        Setup("ddp", params=BF16, compute=BF16, hook=True),
        Setup("fsdp", params=BF16, compute=BF16),
        Setup("fsdp"),
        Setup("fsdp", compute=BF16),
        Setup("fsdp", compute=BF16, optimizer="fused"),
        Setup("fsdp", compute=BF16, optimizer="foreach"),
        Setup("hsdp", compute=BF16),
    ),
}


def train_all() -> dict[Setup, dict[bool, dict[str, Any]]]:
    return {setup: train(setup) for setup in SETUPS[dist.get_world_size()]}


@pytest.mark.parametrize("world", SETUPS)
def test_training_is_that_of_a_single_process(world: int) -> None:
    by_rank = on_ranks(world, train_all)
    for setup in SETUPS[world]:
        results = [each[setup] for each in by_rank]
        check_training(setup, train(setup, alone_with=world), results)


def check_training(setup: Setup, alone: dict[bool, Any], results: list[dict[bool, Any]]) -> None:
    """With a recipe in every bit: an FP32 sum of two ranks, halved, has one rounding."""
    for overflow, result in itertools.product((False, True), results):
        mine, expected, first = result[overflow], alone[overflow], results[0][overflow]
        assert mine["skipped"] == overflow
        assert mine["scales"] == expected["scales"]
        assert mine["scales"][BAD_STEP] == 2.0**10 * (1 if overflow else 2)
        assert all(count == STEPS - overflow for count in mine["state"]["step"])
        assert ("master" in mine["state"]) == (setup.params != torch.float32)
        if setup.optimizer != "fused":
            assert mine["norms"] == pytest.approx(expected["norms"], rel=1e-5, nan_ok=True)
            finite = [norm for norm in mine["norms"] if math.isfinite(norm)]
            assert len(finite) == STEPS - overflow
            assert min(finite) > MAX_NORM, "nothing is clipped: this would test nothing"
        for key, values in mine["state"].items():
            # A rounding up here may have been one down there.
            rtol = 2**-7 if values[0].dtype in (BF16, FP16) else 1e-5
            limits = {"rtol": 0, "atol": 0} if setup.recipe else {"rtol": rtol, "atol": 1e-6}
            torch.testing.assert_close(values, expected["state"][key], **limits)
            if key.endswith("amax_history"):
                recorded = (values[0] > 0).sum(1).tolist()
                assert recorded == [STEPS - overflow] * 2, f"{key}: x and g"
            assert all(map(torch.equal, values, first["state"][key])), f"{key} differs by rank"
        # Exactly the step with the Inf was skipped.
        assert all(map(torch.equal, *mine["weights"])) == overflow


OTHER = mixprec.Recipe("fp8-delayed", "e4m3", "e4m3", "e5m2", scaling="delayed", history=4)
# Of the two ranks, and how the error on the first says that they differ.
OTHERS: list[tuple[list[str | mixprec.Recipe], str]] = [
    (["fp8-delayed", "fp8"], r"4 here and 0 on rank 1; .*'0: fp8-delayed: x e4m3"),
    (["fp8-delayed", OTHER], r"4 here and 4 on rank 1; .*delayed\(16,max\).*delayed\(4,max\)"),
    (["fp8", "fp8-delayed"], r"0 here and 4 on rank 1; .*'0: fp8-delayed: x e4m3"),
]


def check_other_recipes() -> None:
    rank = dist.get_rank()
    for recipes, differs in OTHERS:
        model = mixprec.convert(make_model(6, 5, 7, 3, 1), recipes[rank])
        loss_of(model(torch.ones(4, 6)), 0.0).backward()
        before = copy.deepcopy(model.state_dict())
        differs = f"all ranks of process_group must.*{'on rank 0' if rank else differs}"
        with pytest.raises(ValueError, match=f"(?s)^update_scales: {differs}"):
            mixprec.update_scales(model, dist.group.WORLD)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_ranks_with_other_recipes_are_refused() -> None:
    """On both ranks, which leaves scales and histories as they were."""
    on_ranks(2, check_other_recipes)


SHARDED = Setup("fsdp", params=BF16, compute=BF16)
# The shards of four ranks end within a block of the codes.
CODES = Setup("fsdp", params=BF16, compute=BF16, moments="int8", sizes=(96, 50, 90, 1))


def dcp_state(training: Training) -> dict[str, Any]:
    model, optimizer = get_state_dict(training.model, training.optimizer)
    return {"model": model, "optimizer": optimizer, "scaler": training.scaler.state_dict()}


def before_and_after(training: Training) -> dict[str, Any]:
    """The state now, and at the end of the training."""
    state, scaler = training.state(), training.scaler.state_dict()
    training.run(3, STEPS)
    return {"saved": state, "scaler": scaler, "end": training.state()}


def save_in_the_middle(setup: Setup, path: str) -> dict[str, Any]:
    training = Training(setup)
    training.run(0, 3, overflow=True)
    dcp.save(dcp_state(training), checkpoint_id=path)
    return before_and_after(training)


def resume(setup: Setup, path: str) -> dict[str, Any]:
    training = Training(setup, seed=1)
    state = dcp_state(training)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    training.scaler.load_state_dict(state["scaler"])
    return before_and_after(training)


@pytest.mark.parametrize("setup", [SHARDED, CODES], ids=["fp32", "int8"])
def test_a_distributed_checkpoint_resumes(setup: Setup, tmp_path: Path) -> None:
    """On as many ranks as it was saved from, on more and on fewer."""
    paths = {world: str(tmp_path / f"of {world}") for world in (2, 4)}
    saved_by = {
        w: on_ranks(w, save_in_the_middle, setup=setup, path=path)[0] for w, path in paths.items()
    }
    for before, after in ((2, 2), (4, 2), (2, 4)):
        saved, results = saved_by[before], on_ranks(after, resume, setup=setup, path=paths[before])
        for result in results:
            assert result["scaler"] == saved["scaler"]
            for when in ("saved", "end") if before == after else ("saved",):
                assert result[when].keys() == {"param", "master", "exp_avg", "exp_avg_sq", "step"}
                for key, values in result[when].items():
                    low = key == "param", setup is CODES and key.startswith("exp")
                    for value in values:
                        small = low[1] and value.numel() < 4096
                        assert value.dtype == (BF16 if any(low) and not small else torch.float32)
                    if setup is CODES and before != after:
                        # Of blocks that end elsewhere: rounded once more.
                        for value, want in zip(values, saved[when][key], strict=True):
                            limit = 2.0**-11 * want.abs().max().item()
                            torch.testing.assert_close(value, want, rtol=2**-4, atol=limit)
                        continue
                    assert all(map(torch.equal, values, saved[when][key])), (when, key)
        steps, masters = saved["saved"]["step"], saved["saved"]["master"]
        assert all(step == 2 for step in steps), "of three steps, one overflowed"
        wide = [not torch.equal(m, m.to(BF16).float()) for m in masters]
        assert sum(wide) > 5, "the masters hold no more than the params: rounding would not show"


def lose_a_rank(how: str) -> dict[str, Any]:
    """Two steps; then rank 1 is gone, or too slow, after its backward."""
    training = Training(Setup("fsdp"))
    training.run(0, 2)
    training.backward(2)
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.5)  # whatever the others still have to receive is on its way
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(6)  # longer than the others wait
        return {}
    before = [local_part(p).detach().clone() for p in training.params]
    start = time.monotonic()
    try:
        training.step()
    except RuntimeError as error:
        message, cause = str(error), error.__cause__
    return {
        "seconds": time.monotonic() - start,
        "message": message,
        "caused": isinstance(cause, RuntimeError),
        "unchanged": all(map(torch.equal, before, map(local_part, training.params))),
    }


@pytest.mark.parametrize(("how", "timeout"), [("killed", 20.0), ("slow", 5.0)])
def test_the_others_end_when_a_rank_is_lost(how: str, timeout: float) -> None:
    results = on_ranks(4, lose_a_rank, how=how, timeout=timeout)
    assert results.pop(1) == (KILLED if how == "killed" else {})
    for rank, result in zip((0, 2, 3), results, strict=True):
        assert f"rank {rank} could not agree with the other ranks" in result["message"]
        assert "most likely one of them has ended" in result["message"]
        assert result["caused"]
        assert result["unchanged"]
        assert result["seconds"] < 15
