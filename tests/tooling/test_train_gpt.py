"""examples/train_gpt.py, the demo: its runs and its error handling."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import mixprec
from mixprec.diagnostics.report import Report

TINY = ["--layers=1", "--width=64", "--context=32", "--batch=8", "--lr=1e-2"]
BLOCK_LINEARS = [
    f"blocks.0.{name}" for name in ("attention.qkv.1", "attention.proj", "mlp.1", "mlp.3")
]
STEPS = 50


@pytest.fixture(scope="module")
def demo(examples: pytest.MonkeyPatch) -> ModuleType:
    import gpt_runs
    import train_gpt

    examples.setattr(gpt_runs, "VALIDATION_BYTES", 4096)
    return train_gpt


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four sets of four letters take turns: 4 bits per byte, 2 given the byte before."""
    turns = ("abcd", "efgh", "ijkl", "mnop")
    draw = random.Random(1)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(draw.choice(turns[i % 4]) for i in range(9000)))
    return str(path)


def test_the_demo_end_to_end(demo: ModuleType, text: str, tmp_path: Path, capsys: Any) -> None:
    arguments = [*TINY, f"--steps={STEPS}", f"--text={text}", "--seed=5"]
    assert demo.main([*arguments, f"--out={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert "bits/byte" in printed
    assert "passed: every matrix product" in printed
    for line in re.findall("audit of (.*)", printed):
        name, _, said = line.partition(": ")
        assert f"% {name}" in said
        assert f"recipe {name}" in said or name == "fp32", line
    assert printed.count("audit of ") == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loss.png", "results.json"]

    results = json.loads((tmp_path / "results.json").read_text())
    rows = results["rows"]
    assert [row["recipe"] for row in rows] == ["fp32", "bf16", "fp16", "fp8", "fp32-reseeded"]
    again = rows.pop()
    assert again["reseeded"]
    assert again["data_crc32"] != rows[0]["data_crc32"]
    assert again["train_losses"][0] != rows[0]["train_losses"][0], "other initial weights"
    chance = f"from another seed, which changes the loss by {abs(again['difference_to_fp32']):.2%}"
    assert chance in printed
    for row in rows:
        assert abs(row["difference_to_fp32"]) < 0.02
        expected = row["validation_loss"] / math.log(2)
        assert math.isclose(row["validation bits/byte"], expected)
        assert set(BLOCK_LINEARS) < set(row["gemms_by_module"])
        assert row["data_crc32"] == rows[0]["data_crc32"]
    assert rows[3]["gemms"]["forward"] == {"e4m3 x e4m3": STEPS * 5}
    assert rows[3]["gemms"]["grad_weight"] == {"e5m2 x e4m3": STEPS * 5}
    assert results["options"]["seed"] == 5
    environment = results["environment"]
    assert {"torch", "processor", "threads", "commit"} < environment.keys()
    assert environment["problems"] == []
    assert math.isclose(environment["unigram_bits_per_byte"], 4.0, rel_tol=0.01)

    demo.main([*arguments, f"--out={tmp_path}", "--recipes=fp8"])
    (again,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert again["train_losses"] == rows[3]["train_losses"], "the same run, bit for bit"


def test_lean_training(demo: ModuleType, text: str, tmp_path: Path, capsys: Any) -> None:
    arguments = [*TINY, f"--steps={STEPS}", f"--text={text}", f"--out={tmp_path}", "--lean"]
    assert demo.main(arguments) == 0
    assert "optimizer: exp_avg_scale" in capsys.readouterr().out
    assert (tmp_path / "memory.png").stat().st_size > 10_000
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    names = ["fp32", "lean-high", "lean-balanced", "lean-small"]
    assert [row["recipe"] for row in rows] == names
    assert len({row["validation_loss"] for row in rows}) == 4
    saved = [row["saved_for_backward_bytes"] for row in rows]
    assert saved[3] < saved[2] == saved[1] < 0.5 * saved[0]
    states = [row["optimizer_bytes"] for row in rows]
    assert states[3] < states[2] < 0.7 * states[1]


def test_failures_are_reported_and_the_other_precisions_run(
    demo: ModuleType, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """bf16 is out of memory; fp8 leaves a layer out."""
    compare = mixprec.compare

    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore of it")

    def faulty(make: Any, batches: Any, recipe: str, **more: Any) -> Report:
        def made() -> torch.nn.Module:
            model = make()
            if recipe == "bf16":
                model.blocks[0].register_forward_hook(out_of_memory)
            return model

        skip = {"module_filter_fn": lambda module, fqn: fqn != "blocks.0.mlp.1"}
        return compare(made, batches, recipe, **more, **skip)

    monkeypatch.setattr(mixprec, "compare", faulty)
    options = ["--steps=2", f"--text={text}", f"--out={tmp_path}", "--recipes=fp32,bf16,fp8"]
    assert demo.main([*TINY, *options]) == 1
    failed = "failed: OutOfMemoryError: CUDA out of memory."
    written = json.loads((tmp_path / "results.json").read_text())
    assert [row["status"] for row in written["rows"]] == ["complete", failed, "complete"]
    problems = written["environment"]["problems"]
    assert problems[0] == f"bf16 {failed}"
    assert problems[1].startswith("fp8: forward of blocks.0.mlp.1 should have run as")
    printed = capsys.readouterr().err.splitlines()
    assert [f"failed: {p}" for p in problems] == [p for p in printed if p.startswith("failed")]
