"""Steps of the Trainer of transformers, and of ours, are audited as docs/audit.md does it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

import transformers
from by_hand import assert_same_bits
from test_transformers import arguments, dataset, tiny_model

import mixprec
from mixprec.integrations.transformers import Trainer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "audit.md"


@pytest.fixture
def callback() -> Any:
    code = re.search(r"```python\n(import transformers\n.*?)```", PAGE.read_text(), re.S)
    names: dict[str, Any] = {"mixprec": mixprec}
    exec(code[1], names)
    return names["AuditStep"](3)


def run(folder: Path, *callbacks: Any, kind: type = Trainer, **options: Any) -> Any:
    """Four steps of two micro-batches."""
    settings = options.pop("settings", {})
    args = arguments(folder / "out", max_steps=4, save_strategy="no", **settings)
    trainer = kind(tiny_model(), args, train_dataset=dataset(), callbacks=[*callbacks], **options)
    trainer.train()
    return trainer


def test_a_step_is_audited(tmp_path: Path, callback: Any) -> None:
    """It changes no bit."""
    options = {"recipe": "fp8", "overrides": {"lm_head": None}, "params": torch.bfloat16}
    plain = run(tmp_path, **options).model.state_dict()
    assert_same_bits(run(tmp_path, callback, **options).model.state_dict(), plain)
    summed, left_out = callback.audit.findings
    assert summed.startswith("gradients are summed in bf16 over 2 backward passes, of ")
    assert left_out.startswith("lm_head (Linear): bf16, because mixprec.convert has left it out")
    ops = callback.audit.ops
    calls = {op.calls for op in ops if op.module == "lm_head" and op.phase == "forward"}
    assert calls == {2}  # of a step with two micro-batches


def test_of_transformers_trainer(tmp_path: Path, callback: Any) -> None:
    run(tmp_path, callback, kind=transformers.Trainer, settings={"bf16": True})
    assert callback.audit.decided.keys() == {"torch.autocast"}
    assert {op.precision for op in callback.audit.ops if op.flops} == {"bf16"}


def test_it_knows_the_scaler(tmp_path: Path, callback: Any) -> None:
    """In fp16 nothing is wrong with it."""
    settings = {"gradient_accumulation_steps": 1}
    run(tmp_path, callback, settings=settings, params="fp16", recipe="fp16")
    assert callback.audit.findings == []
