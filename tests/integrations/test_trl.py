"""Trainers of TRL with the Trainer of mixprec as their mixin."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import assert_same_bits

import mixprec

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
trl = pytest.importorskip("trl", reason="trl is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

from mixprec.integrations.transformers import Trainer  # noqa: E402

pytestmark = pytest.mark.slow

WORDS = [f"w{i}" for i in range(40)]


class LowPrecisionSFT(Trainer, trl.SFTTrainer):
    pass


def tokenizer() -> Any:
    vocab = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=44, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def trainer(folder: Path, **settings: Any) -> LowPrecisionSFT:
    texts = [" ".join(WORDS[(i + 3 * k) % 40] for k in range(8 + i % 4)) for i in range(32)]
    given = {
        "output_dir": str(folder), "bf16": False, "max_steps": 8, "save_steps": 4,
        "logging_steps": 1, "learning_rate": 1e-2, "per_device_train_batch_size": 4,
        "report_to": "none", "disable_tqdm": True, "use_cpu": True,
    }  # fmt: skip
    return LowPrecisionSFT(
        model(),
        trl.SFTConfig(**{**given, **settings}),
        train_dataset=datasets.Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
        recipe="fp8-delayed",
        params=torch.bfloat16,
    )


def test_sft_trains_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    """SFTTrainer, 8 steps with masters, and a resume half way."""
    ended = []
    for resume in (None, str(tmp_path / "checkpoint-4")):
        sft = trainer(tmp_path)
        sft.train(resume_from_checkpoint=resume)
        optimizer = sft.optimizer.optimizer
        assert isinstance(optimizer, mixprec.optim.AdamW)
        ended.append(
            {"model": dict(sft.model.state_dict()), "state": optimizer.state_dict()["state"]}
        )
        assert all("master" in state or "exp_avg" in state for state in ended[-1]["state"].values())
        losses = [log["loss"] for log in sft.state.log_history if "loss" in log]
    assert losses[-1] < losses[0]
    assert_same_bits(ended[1], ended[0])


def test_its_default_of_bf16_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    """SFTConfig without bf16=False is an error."""
    with pytest.raises(ValueError, match=r"args\.bf16 must be False, got True.*SFTConfig"):
        trainer(tmp_path, bf16=None)


class Args:
    """What the mixin reads of TrainingArguments."""

    fp16 = bf16 = fp16_full_eval = bf16_full_eval = False
    mixed_precision, deepspeed, fsdp, n_gpu, world_size = "no", None, None, 1, 1


TRAINERS = [
    kind
    for kind in map(partial(getattr, trl), sorted(set(dir(trl))))
    if isinstance(kind, type) and issubclass(kind, transformers.Trainer)
]


@pytest.mark.parametrize("kind", TRAINERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("by_name", [False, True])
def test_arguments_arrive_as_they_are_given(kind: Any, by_name: bool) -> None:
    """whichever positional arguments a trainer has"""
    signature, got = inspect.signature(kind.__init__), {}

    class Recorder(kind):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            got.update(signature.bind(self, *args, **kwargs).arguments)
            self.optimizer = None

    class Low(Trainer, Recorder):
        pass

    names = [n for n, p in signature.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    low = torch.nn.Sequential(torch.nn.Linear(4, 4))
    given: dict[str, Any] = {name: f"the {name}" for name in names} | {"model": low, "args": Args()}
    made = Low(**given, recipe="bf16") if by_name else Low(*given.values(), recipe="bf16")
    assert got == {"self": made, **given}
    assert isinstance(low[0], mixprec.nn.Linear)


class LowPrecisionDPO(Trainer, trl.DPOTrainer):
    pass


def test_dpo(tmp_path: Path) -> None:
    """log probabilities of the reference that are in the dataset stay FP32"""
    words = [" ".join(WORDS[i : i + 6]) for i in range(16)]
    rows = {"prompt": words, "chosen": words[::-1], "rejected": words[3:] + words[:3]}
    given = {
        "output_dir": str(tmp_path), "bf16": False, "max_steps": 4, "report_to": "none",
        "disable_tqdm": True, "use_cpu": True, "per_device_train_batch_size": 4,
        "logging_steps": 1, "precompute_ref_log_probs": True,
    }  # fmt: skip
    trainer = LowPrecisionDPO(
        model(), args=trl.DPOConfig(**given), train_dataset=datasets.Dataset.from_dict(rows),
        processing_class=tokenizer(), recipe="bf16", params=torch.bfloat16,
    )  # fmt: skip
    batch = next(iter(trainer.get_train_dataloader()))
    logps = trainer._prepare_inputs(batch)["ref_chosen_logps"]
    assert logps.dtype == torch.float32
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert 0.6 < losses[0] < 0.8
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16, torch.float32}
