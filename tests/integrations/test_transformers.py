"""The Trainer of transformers against a loop written by hand, bit for bit."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import (
    BF16,
    DELAYED,
    FP16,
    STEPS,
    TWO_RANKS,
    Case,
    assert_same_bits,
    run_program,
    state,
)

import mixprec

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from safetensors.torch import load_file  # noqa: E402

from mixprec.integrations.transformers import Trainer  # noqa: E402

pytestmark = pytest.mark.slow

HALF, OVERFLOWS = STEPS // 2, (7, 31)
LR, WARMUP, DECAY, BETAS, EPS, NORM = 3e-3, 5, 0.1, (0.9, 0.95), 1e-8, 0.5
GROWS = {"init_scale": 2.0**12, "growth_interval": 6}
CASES = [
    *(Case(recipe, torch.bfloat16) for recipe in (BF16, mixprec.Recipe.parse("fp8"), DELAYED)),
    Case(FP16, torch.float16, scaler=GROWS),
]


def llama(tied: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def tiny_model() -> torch.nn.Module:
    return llama(True)


def tokens() -> torch.Tensor:
    """For each step two micro-batches of two sequences, with a pattern to learn."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randint(64, (STEPS * 4, 1), generator=generator)
    return (start + torch.arange(12) * 5) % 64


def overflow(model: torch.nn.Module, step: int) -> None:
    if step in OVERFLOWS:
        next(iter(model.parameters())).grad[3, 1] = torch.inf


def dataset() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": row, "labels": row} for row in tokens()]


def by_hand(case: Case) -> tuple[dict[str, Any], list[tuple[float, float]]]:
    """The state at the end, and the norm and the learning rate at each step."""
    model, logs = tiny_model(), []
    mixprec.cast_parameters(mixprec.convert(model, case.recipe), case.params)
    groups: list[dict[str, Any]] = [{"weight_decay": DECAY}, {"weight_decay": 0.0}]
    for norms, group in enumerate(groups):
        named = model.named_parameters()
        group["params"] = [p for name, p in named if ("norm" in name) == bool(norms)]
    optimizer = mixprec.optim.AdamW(groups, LR, BETAS, EPS, max_grad_norm=NORM)
    own = case.make_scaler()
    scaler = own or mixprec.GradScaler(enabled=False)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, WARMUP, STEPS)
    for step, samples in enumerate(tokens().split(4)):
        for x in samples.split(2):
            loss = model(input_ids=x, labels=x, num_items_in_batch=torch.tensor(4 * 11)).loss
            scaler.scale(loss).backward()
        overflow(model, step)
        scaler.step(optimizer)
        scaler.update()
        logs.append((optimizer.grad_norm.item(), scheduler.get_last_lr()[0]))
        if not optimizer.last_step_skipped:
            scheduler.step()
        model.zero_grad()
    return state(model, optimizer, scheduler, own), logs


class Overflow(transformers.TrainerCallback):
    """Puts an Inf into a gradient; the step must then change no weight and no learning rate."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        self.first = state.global_step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        overflow(of["model"], state.global_step)
        self.before = {name: p.clone() for name, p in of["model"].named_parameters()}
        self.epoch = of["lr_scheduler"].last_epoch

    def on_step_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        now = dict(of["model"].named_parameters())
        same = all(torch.equal(p, now[name]) for name, p in self.before.items())
        skipped = of["optimizer"].step_was_skipped
        assert skipped or state.global_step - 1 not in OVERFLOWS
        assert same or not skipped
        assert of["lr_scheduler"].last_epoch == self.epoch + (not skipped)


class InOrder(transformers.Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class LowPrecision(Trainer, InOrder):
    """As a mixin."""


def arguments(folder: Path, **more: Any) -> Any:
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": LR,
        "warmup_steps": WARMUP,
        "weight_decay": DECAY,
        "adam_beta2": BETAS[1],
        "max_grad_norm": NORM,
        "logging_steps": 1,
        "save_steps": HALF,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return transformers.TrainingArguments(**settings | more)


def by_trainer(
    folder: Path, case: Case, resume: str | None = None
) -> tuple[dict[str, Any], list[tuple[float, float]]]:
    callback = Overflow()
    trainer = LowPrecision(
        tiny_model(),
        arguments(folder),
        train_dataset=dataset(),
        callbacks=[callback],
        recipe=case.recipe,
        params=case.params,
        scaler=case.make_scaler(),
    )
    trainer.train(resume_from_checkpoint=resume)
    assert callback.first == (HALF if resume else 0)
    logs = [each for each in trainer.state.log_history if "grad_norm" in each]
    scaler, scheduler = trainer.accelerator.scaler, trainer.lr_scheduler
    ended = state(trainer.model, trainer.optimizer, scheduler, scaler)
    return ended, [(each["grad_norm"], each["learning_rate"]) for each in logs]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_equals_the_loop_and_resumes_bit_for_bit(case: Case, tmp_path: Path) -> None:
    """50 steps of two micro-batches, clipped, two of them with an Inf, and a resume half way."""
    want, wanted_logs = by_hand(case)
    assert sum(not math.isfinite(norm) for norm, _ in wanted_logs) >= len(OVERFLOWS)
    assert sum("master" in s for s in want["optimizer"].values()) == 1 + 2 * 7
    for resume in (None, str(tmp_path / f"checkpoint-{HALF}")):
        got, logs = by_trainer(tmp_path, case, resume)
        assert_same_bits(got, want)
        assert [repr(log) for log in logs] == [repr(log) for log in wanted_logs]  # NaN is NaN


def test_adapters_of_peft_resume_in_16_bits(tmp_path: Path) -> None:
    """LoRA of peft, resumed half way."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    trained = []
    for resume in (None, str(tmp_path / "checkpoint-3")):
        trainer = LowPrecision(
            peft.get_peft_model(tiny_model(), peft.LoraConfig(target_modules=["q_proj"])),
            arguments(tmp_path, max_steps=6, save_steps=3),
            train_dataset=dataset(),
            recipe="fp8",
            params=torch.bfloat16,
        )
        trainer.train(resume_from_checkpoint=resume)
        trained.append(dict(trainer.optimizer.state_dict(), model=trainer.model.state_dict()))
    assert len(trained[0]["state"]) == 4  # A and B of two layers
    assert_same_bits(trained[1], trained[0])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", ["50GB", "8KB"])
def test_masters_are_saved_and_loaded_bit_for_bit(tied: bool, size: str, tmp_path: Path) -> None:
    """Masters, by save_pretrained and from_pretrained, tied and in several files."""

    def trained(model: Any, optimizer: Any, batches: Any) -> dict[str, torch.Tensor]:
        for x in batches:
            model(input_ids=x, labels=x).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return mixprec.optim.fp32_state_dict(model, optimizer)

    model, batches = mixprec.cast_parameters(llama(tied), torch.bfloat16), tokens().split(4)
    optimizer = mixprec.optim.SGD(model.parameters(), lr=0.1)
    want = trained(model, optimizer, batches[:3])
    model.save_pretrained(tmp_path, state_dict=dict(want), max_shard_size=size)
    files = [load_file(path) for path in tmp_path.glob("*.safetensors")]
    assert (len(files) > 1) == (size == "8KB")
    saved = {name: tensor for each in files for name, tensor in each.items()}
    assert ("lm_head.weight" in saved) != tied
    assert_same_bits(saved, {name: want[name] for name in saved})
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    assert_same_bits(dict(loaded.state_dict()), dict(want))
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == tied
    mixprec.cast_parameters(loaded, torch.bfloat16)
    again = mixprec.optim.SGD(loaded.parameters(), lr=0.1)
    got, want = trained(loaded, again, batches[3:6]), trained(model, optimizer, batches[3:6])
    assert_same_bits(dict(got), dict(want))
    assert any((each.bfloat16().float() != each).any() for each in got.values())


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"recipe": "fp8"}, {"bf16": True}, "args.bf16 must be False, got True.*pass bf16=False"),
    ({"params": torch.bfloat16}, {"bf16_full_eval": True}, "args.bf16_full_eval must be False"),
    ({"recipe": "fp8"}, {"use_cpu": True}, "accelerate launch sets must be 'no'.*got 'bf16'"),
    ({}, {"optim_args": "a=1"}, "args.optim_args must be None, got 'a=1'"),
    ({}, {"optim": "adafactor"}, "args.optim must be 'adamw_torch'.*got.*adafactor"),
    ({"overrides": {"lm_head": None}}, {}, "overrides need a recipe, got recipe=None"),
    (
        {"params": torch.bfloat16, "optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 1e-3})},
        {},
        "must be of mixprec.optim, which keeps masters of torch.bfloat16.*got torch.optim.adamw",
    ),
    (
        {"optimizer_cls_and_kwargs": (mixprec.optim.AdamW, {"max_grad_norm": 2.0})},
        {},
        "max_grad_norm must be 2.0, as the optimizer has it, got 0.5",
    ),
]


@pytest.mark.parametrize(("options", "settings", "message"), REFUSED)
def test_wrong_combinations_name_the_argument(
    options: dict[str, Any],
    settings: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Arguments that cannot be combined are errors."""
    if "accelerate launch" in message:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ValueError, match=message):
        Trainer(
            tiny_model(), arguments(tmp_path, **settings), train_dataset=dataset(), **options
        ).train()


def test_an_optimizer_is_made_after_the_cast(tmp_path: Path) -> None:
    """An optimizer that was made before the cast is an error."""
    model = tiny_model()
    optimizers = (mixprec.optim.AdamW(model.parameters()), None)
    with pytest.raises(ValueError, match="params casts before an optimizer is made"):
        Trainer(model, arguments(tmp_path), optimizers=optimizers, params=torch.bfloat16)


def test_a_model_that_was_loaded_in_16_bits_warns(tmp_path: Path) -> None:
    """A model in BF16, whose masters start rounded, warns; one cast here or frozen does not."""
    mixed = tiny_model()
    mixed.model.layers.requires_grad_(False).bfloat16()
    cast = mixprec.cast_parameters(tiny_model(), torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for model in (tiny_model(), mixed, cast):
            Trainer(model, arguments(tmp_path), params=torch.bfloat16)
    with pytest.warns(UserWarning, match=r"20 of 20 trained.*bfloat16 already.*dtype=torch.float"):
        Trainer(tiny_model().bfloat16(), arguments(tmp_path), params=torch.bfloat16)


def test_a_scaler_is_made_for_fp16_and_models_of_model_init_are_converted(tmp_path: Path) -> None:
    """A scaler where fp16 needs one; model_init."""
    trainer = Trainer(
        model_init=tiny_model,
        args=arguments(tmp_path),
        recipe="fp8",
        overrides={"lm_head": "fp16"},
    )
    assert trainer.model.lm_head.recipe.name == "fp16"
    assert trainer.model.model.layers[0].mlp.up_proj.recipe.name == "fp8"
    assert isinstance(trainer.accelerator.scaler, mixprec.GradScaler)
    trainer = Trainer(tiny_model(), arguments(tmp_path), params="fp16")
    assert isinstance(trainer.accelerator.scaler, mixprec.GradScaler)


def test_the_example_learns_and_resumes(tmp_path: Path) -> None:
    """examples/train_transformers.py, and with --resume."""
    losses = []
    for more in (["20"], ["30", "--resume"]):
        options = ("--output", tmp_path, "--steps", *more)
        lines = run_program(tmp_path, "train_transformers.py", *options).splitlines()
        logs = [line for line in lines if "'grad_norm'" in line]
        losses.append([float(line.split("'loss': '")[1].split("'")[0]) for line in logs])
    assert len(losses[1]) == 2, "steps 25 and 30"
    assert losses[1][-1] < losses[0][-1] < 0.7 * losses[0][0]


def test_two_ranks_share_delayed_scales(tmp_path: Path) -> None:
    """Two ranks (DDP), whose delayed scales stay the same; a resume half way."""
    program = Path(__file__).with_name("trainer_ranks.py")
    printed = run_program(tmp_path, program, tmp_path, launcher=TWO_RANKS)
    assert printed.count("15 layers with the same scales") == 2


def test_two_ranks_of_fsdp2(tmp_path: Path) -> None:
    """Two ranks of FSDP2, by Accelerate and the Trainer (their state set to what it is on GPUs)."""
    program = Path(__file__).with_name("fsdp2_ranks.py")
    assert run_program(tmp_path, program, tmp_path, launcher=TWO_RANKS).count("FSDP2 trains") == 2


class Regression(torch.nn.Module):
    """Of signals, and of a list of more of them, which come in FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = torch.nn.Conv1d(1, 8, 3), torch.nn.Linear(8, 1)
        self.dtypes: dict[str, torch.dtype] = {}

    def forward(self, signal: Any, more: Any, index: Any, labels: Any) -> dict[str, torch.Tensor]:
        self.dtypes |= {"signal": signal.dtype, "more": more[0].dtype, "labels": labels.dtype}
        assert index.dtype == torch.int64
        y = self.head(torch.conv1d(signal, self.conv.weight).mean(-1) + more[0]).squeeze(-1)
        return {"loss": torch.nn.functional.mse_loss(y, labels), "logits": y}


@pytest.mark.parametrize("params", [None, torch.bfloat16, torch.float16])
def test_floating_point_inputs_are_cast(tmp_path: Path, params: Any) -> None:
    torch.manual_seed(0)
    signals = torch.randn(16, 1, 32)
    data = [
        {"signal": s, "more": torch.ones(8), "index": i, "labels": s.mean()}
        for i, s in enumerate(signals)
    ]
    args = transformers.TrainingArguments(
        str(tmp_path), max_steps=4, use_cpu=True, report_to="none", disable_tqdm=True,
        remove_unused_columns=False,
    )  # fmt: skip
    model = Regression()

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = transformers.default_data_collator(rows)
        return {**batch, "more": [batch["more"]]}

    options = {"train_dataset": data, "eval_dataset": data, "data_collator": collate}
    trainer = Trainer(model, args, **options, recipe="bf16", params=params)
    trainer.train()
    trainer.evaluate()
    dtype = params or torch.float32
    assert model.dtypes == {"signal": dtype, "more": dtype, "labels": torch.float32}
