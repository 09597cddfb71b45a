"""AuditCallback in the Trainer of transformers, and in ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

import transformers
from by_hand import assert_same_bits
from test_transformers import arguments, dataset, tiny_model

from mixprec.integrations.transformers import AuditCallback, Trainer


def run(
    folder: Path,
    *callbacks: transformers.TrainerCallback,
    kind: type[transformers.Trainer] = Trainer,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Four steps of two micro-batches."""
    args = arguments(folder / "out", max_steps=4, save_strategy="no", **settings or {})
    trainer = kind(tiny_model(), args, train_dataset=dataset(), callbacks=[*callbacks], **options)
    trainer.train()
    return trainer


def test_chosen_steps_are_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """AuditCallback in steps 1 and 3, which change no bit; its files and numbers."""
    options = {"recipe": "fp8", "overrides": {"lm_head": None}, "params": torch.bfloat16}
    plain = run(tmp_path, **options).model.state_dict()
    writer = Mock(spec=["add_scalar"])
    callback = AuditCallback(range(1, 4, 2), tmp_path / "audits", logger=writer)
    assert_same_bits(run(tmp_path, callback, **options).model.state_dict(), plain)
    assert list(callback.audits) == [1, 3]
    audit = callback.audits[3]
    summed, left_out = audit.findings
    assert summed.startswith("gradients are summed in bf16 over 2 backward passes, of ")
    assert left_out.startswith("lm_head (Linear): bf16, because mixprec.convert has left it out")
    calls = {op.calls for op in audit.ops if op.module == "lm_head" and op.phase == "forward"}
    assert calls == {2}  # of a step with two micro-batches
    assert f"audit of step 3: {audit.summary()}; 2 findings; {summed}\n" in capsys.readouterr().err
    names = sorted(path.name for path in (tmp_path / "audits").iterdir())
    assert names == ["audit-1.html", "audit-1.json", "audit-3.html", "audit-3.json", "audit.jsonl"]
    lines = (tmp_path / "audits" / "audit.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == callback.records
    assert callback.records[1]["findings"] == [summed, left_out]
    added = {call.args for call in writer.add_scalar.call_args_list}
    share = audit.flops["fp8"] / sum(audit.flops.values())
    assert {("audit/findings", 2, 3), ("audit/precision/fp8", share, 3)} <= added
    assert sum(value for tag, value, step in added if "decided" in tag and step == 1) == 1


def test_of_transformers_trainer(tmp_path: Path) -> None:
    """AuditCallback in their Trainer, with bf16=True; nothing is written."""
    callback = AuditCallback()
    run(tmp_path, callback, kind=transformers.Trainer, settings={"bf16": True})
    (audit,) = callback.audits.values()
    assert audit.decided.keys() == {"torch.autocast"}
    assert {op.precision for op in audit.ops if op.flops} == {"bf16"}
    assert not [path for path in tmp_path.iterdir() if path.name != "out"]


def test_it_knows_the_scaler(tmp_path: Path) -> None:
    """AuditCallback in fp16, whose scaler is used, finds nothing that is wrong with it."""
    callback = AuditCallback((1, 2))
    settings = {"gradient_accumulation_steps": 1}
    run(tmp_path, callback, settings=settings, params="fp16", recipe="fp16")
    assert [audit.findings for audit in callback.audits.values()] == [[], []]


class Stops(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, *_: Any, **of: Any) -> None:
        raise KeyError("stopped")


def test_a_step_that_an_exception_left(tmp_path: Path) -> None:
    """AuditCallback.close after an exception."""
    callback = AuditCallback()
    with pytest.raises(KeyError, match="stopped"):
        run(tmp_path, callback, Stops())
    callback.close()
    assert callback.audits == {}
    callback.close()


def test_wrong_arguments(tmp_path: Path) -> None:
    """Wrong arguments of AuditCallback are errors."""
    for steps in (5, "all"):
        with pytest.raises(TypeError, match="steps must be a collection of numbers of steps"):
            AuditCallback(steps)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"AuditCallback: logger must have add_scalar\(tag"):
        AuditCallback(logger=print)
