"""Lightning's Trainer and Fabric with MixprecPrecision."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import (
    CASES,
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

lightning = pytest.importorskip("lightning", reason="the package lightning is not installed")

from mixprec.integrations.lightning import MixprecPrecision  # noqa: E402


class Regression(lightning.LightningModule):
    def __init__(self, case: Case, manual: bool = False) -> None:
        super().__init__()
        self.net, self.case = network(), case
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, i: int) -> torch.Tensor | None:
        x, y = batch
        loss = loss_of(self.net(x), y)
        if self.automatic_optimization:
            return loss
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        self.manual_backward(loss / self.case.accumulate)
        if (i + 1) % self.case.accumulate == 0:
            for kind, limit in self.case.clip.items():
                self.clip_gradients(optimizer, limit, kind.removeprefix("max_grad_"))
            optimizer.step()
            if not optimizer.last_step_skipped:
                scheduler.step()
            optimizer.zero_grad()
        return None

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = optimizer_and_scheduler(self.parameters())
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def precision(case: Case) -> MixprecPrecision:
    return MixprecPrecision(case.recipe, params=case.params, scaler=case.make_scaler())


def fit(
    module: Any, plugin: Any, epochs: int, data: Any, ckpt_path: str | None = None, **options: Any
) -> Any:
    """Two epochs are a run: half of the steps each."""
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about workers and loggers that a test needs none of
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            plugins=plugin,
            enable_checkpointing=False,
            **{**quiet, **options},
        )

        class Half(torch.utils.data.Dataset):
            def __len__(self) -> int:
                return len(data) // 2

            def __getitem__(self, i: int) -> Any:
                return data[i + trainer.current_epoch * len(self)]

        loader = torch.utils.data.DataLoader(Half(), batch_size=None)
        trainer.fit(module, loader, ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_trainer(case: Case, manual: bool, tmp_path: Path) -> None:
    """Trainer: 50 steps with clipping, accumulation, an overflow and a resume from a checkpoint"""
    ((kind, limit),) = case.clip.items()
    clip = {"gradient_clip_val": limit, "gradient_clip_algorithm": kind.removeprefix("max_grad_")}
    options = {} if manual else {**clip, "accumulate_grad_batches": case.accumulate}
    data, path = batches(STEPS * case.accumulate), tmp_path / "half.ckpt"
    fit(Regression(case, manual), precision(case), 1, data, **options).save_checkpoint(path)

    module, plugin = Regression(case, manual), precision(case)
    module.load_state_dict(torch.load(path)["state_dict"])  # it is that of the plain module
    trainer = fit(module, plugin, 2, data, str(path), **options)
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    got = state(module.net, trainer.optimizers[0], scheduler, plugin.scaler)
    assert_same_bits(got, train(case)[0])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fabric(case: Case, tmp_path: Path) -> None:
    """Fabric: 50 steps with clipping, accumulation, an overflow and a resume from a checkpoint"""
    data = batches(STEPS * case.accumulate)

    def run(start: int, stop: int) -> dict[str, Any]:
        plugin = precision(case)
        fabric = lightning.Fabric(accelerator="cpu", plugins=plugin)
        model = network()
        plain, scheduler = optimizer_and_scheduler(model.parameters(), **case.clip)
        model, optimizer = fabric.setup(model, plain)
        saved = {"model": model, "optimizer": optimizer, "precision": plugin, "lr": scheduler}
        if start:
            fabric.load(tmp_path / "half.ckpt", saved)
        for i, (x, y) in enumerate(data[start:stop]):
            fabric.backward(loss_of(model(x), y) / case.accumulate)
            if (i + 1) % case.accumulate == 0:
                optimizer.step()
                if not optimizer.last_step_skipped:
                    scheduler.step()
                optimizer.zero_grad()
        fabric.save(tmp_path / "half.ckpt", saved)
        return state(model.module, plain, scheduler, plugin.scaler)

    run(0, len(data) // 2)
    assert_same_bits(run(len(data) // 2, len(data)), train(case)[0])


def test_fabric_clips_unscaled_gradients() -> None:
    """Fabric: clip_gradients after a scaled backward pass, of FP32 gradients"""

    def one(scale: float) -> tuple[float, torch.Tensor]:
        scaler = mixprec.GradScaler(init_scale=scale)
        plugin = MixprecPrecision("bf16", scaler=scaler)
        fabric = lightning.Fabric(accelerator="cpu", plugins=plugin)
        model = network()
        optimizer = mixprec.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = fabric.setup(model, optimizer)
        [(x, y)] = batches(1, infs=())
        fabric.backward(loss_of(model(x), y))
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        return norm.item(), model.module[0].weight.detach()

    norm, weight = one(2.0**10)
    want_norm, want_weight = one(1.0)
    assert norm == want_norm > 0.5
    assert torch.equal(weight, want_weight)


def test_a_skipped_step_moves_nothing() -> None:
    """Trainer: an overflow leaves parameters and the schedulers of steps, not those of epochs"""
    plugin = MixprecPrecision("fp16", params=torch.float16)
    module = Regression(CASES[1])
    optimizer, by_step = optimizer_and_scheduler(module.parameters())
    by_epoch = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    module.configure_optimizers = lambda: (
        [optimizer],
        [{"scheduler": by_step, "interval": "step"}, {"scheduler": by_epoch}],
    )
    before = [p.half() for p in network().parameters()]
    fit(module, plugin, 1, batches(2, infs=(0,)))
    assert plugin.scaler is not None
    assert plugin.scaler.skipped == 1
    assert [by_step.last_epoch, by_epoch.last_epoch] == [0, 1]
    for p, old in zip(module.net.parameters(), before, strict=True):
        assert torch.equal(p.half(), old)


def fabric_step(plugin: Any, optimizer: Any, *, clip: bool = False) -> None:
    fabric = lightning.Fabric(accelerator="cpu", plugins=plugin)
    model = network()
    model, optimizer = fabric.setup(model, optimizer(model.parameters()))
    fabric.backward(model(torch.ones(2, 16)).sum())
    if clip:
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()


def trainer_fit(plugin: Any, optimizer: Any, **options: Any) -> None:
    module = Regression(CASES[0])
    module.configure_optimizers = lambda: optimizer(module.parameters())
    fit(module, plugin, 1, batches(4, infs=()), **options)


FP16 = {"recipe": "fp16", "params": "fp16"}


def clips(params: Any) -> Any:
    return mixprec.optim.SGD(params, max_grad_norm=2.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: lightning.Trainer(precision="16-mixed", plugins=p), r"precision=16-mixed.*Mixp"),
        (lambda p: lightning.Fabric(precision="16-mixed", plugins=p), r"precision=16-mixed.*Mixp"),
        (lambda p: trainer_fit(p, torch.optim.SGD), r"fp16.* mixprec.optim.* torch.optim.sgd.SGD"),
        (lambda p: fabric_step(p, torch.optim.SGD), r"fp16.* mixprec.optim.* torch.optim.sgd.SGD"),
        (
            lambda p: trainer_fit(p, clips, gradient_clip_val=0.5),
            r"once, got gradient_clip_val=0.5 and .* max_grad_norm=2.0",
        ),
        (lambda p: fabric_step(p, clips, clip=True), r"once, got fabric.* max_grad_norm=2.0"),
        (lambda p: MixprecPrecision("fp9"), "fp9"),
        (lambda p: MixprecPrecision(params=torch.int8), r"params must be .* got torch.int8"),
        (
            lambda p: MixprecPrecision(None, overrides={"0": "bf16"}),
            r"overrides must .* recipe=None",
        ),
        (
            lambda p: MixprecPrecision(scaler=torch.amp.GradScaler("cpu")),
            r"scaler must be a mixprec.GradScaler.* torch.amp",
        ),
    ],
)
def test_wrong_combinations(call: Any, message: str) -> None:
    """Trainer and Fabric: wrong combinations are errors that name the argument"""
    with pytest.raises((ValueError, TypeError), match=message):
        call(MixprecPrecision(**FP16))


def test_torch_optimizer_of_fp32_params() -> None:
    """Trainer: torch's optimizers, clipped by Lightning, where nothing is scaled or 16 bits wide"""
    trainer_fit(MixprecPrecision("fp8"), torch.optim.SGD, gradient_clip_val=0.5)


@pytest.mark.parametrize("name", ["train_lightning.py", "train_fabric.py"])
def test_example(name: str, tmp_path: Path) -> None:
    """The programs in examples/ run as they stand"""
    assert "resumed" in run_program(tmp_path, name)


def test_two_ranks_of_fsdp2(tmp_path: Path) -> None:
    """FSDP2 by ModelParallelStrategy, on two ranks."""
    program = Path(__file__).with_name("lightning_ranks.py")
    assert run_program(tmp_path, program, tmp_path, launcher=TWO_RANKS).count("FSDP2 trains") == 2
