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
        assert f"recipe {name}" in said or name.startswith("fp32"), line
    assert printed.count("audit of ") == 5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loss.png", "results.json"]

    results = json.loads((tmp_path / "results.json").read_text())
    rows = results["rows"]
    assert [row["recipe"] for row in rows] == ["fp32", "bf16", "fp16", "fp8", "fp32-reseeded"]
    again = rows.pop()
    assert again["reseeded"]
    assert again["data"] != rows[0]["data"]
    assert again["losses"][0] != rows[0]["losses"][0], "other initial weights"
    base = rows[0]["validation_loss"]
    chance = (
        f"another seed, which changes the loss by {abs(again['validation_loss'] / base - 1):.2%}"
    )
    assert chance in printed
    for row, cells in zip(rows, results["table"][1:5], strict=True):
        assert abs(row["validation_loss"] / base - 1) < 0.02
        assert cells[1] == f"{row['validation_loss'] / math.log(2):.4f}"
        assert row["data"] == rows[0]["data"]
        assert (row["status"], len(row["losses"]), row["wrong"]) == ("complete", STEPS, [])
    assert rows[1]["bytes"]["params"] < 0.52 * rows[0]["bytes"]["params"]
    assert results["options"]["seed"] == 5
    environment = results["environment"]
    assert {"torch", "processor", "threads", "commit"} < environment.keys()
    assert environment["problems"] == []
    assert math.isclose(environment["unigram_bits_per_byte"], 4.0, rel_tol=0.01)

    demo.main([*arguments, f"--out={tmp_path}", "--recipes=fp8"])
    (again,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert again["losses"] == rows[3]["losses"], "the same run, bit for bit"


def test_lean_training(demo: ModuleType, text: str, tmp_path: Path, capsys: Any) -> None:
    arguments = [*TINY, f"--steps={STEPS}", f"--text={text}", f"--out={tmp_path}", "--lean"]
    assert demo.main(arguments) == 0
    assert "optimizer: exp_avg_scale" in capsys.readouterr().out
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    names = ["fp32", "lean-high", "lean-balanced", "lean-small"]
    assert [row["recipe"] for row in rows] == names
    assert len({row["validation_loss"] for row in rows}) == 4
    saved = [row["bytes"]["saved"] for row in rows]
    assert saved[3] < saved[2] == saved[1] < 0.5 * saved[0]
    states = [row["bytes"]["optim"] for row in rows]
    assert states[3] < states[2] < 0.7 * states[1]


def test_failures_are_reported_and_the_other_precisions_run(
    demo: ModuleType, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """bf16 is out of memory; fp8 leaves a layer out."""
    convert = mixprec.convert

    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore of it")

    def faulty(model: Any, recipe: mixprec.Recipe, **options: Any) -> None:
        if recipe.name == "bf16":
            model.blocks[0].register_forward_hook(out_of_memory)
        convert(model, recipe, lambda module, fqn: fqn != "blocks.0.mlp.1", **options)

    monkeypatch.setattr(mixprec, "convert", faulty)
    options = ["--steps=2", f"--text={text}", f"--out={tmp_path}", "--recipes=fp32,bf16,fp8"]
    assert demo.main([*TINY, *options]) == 1
    failed = "failed: OutOfMemoryError: CUDA out of memory."
    written = json.loads((tmp_path / "results.json").read_text())
    assert [row["status"] for row in written["rows"]] == ["complete", failed, "complete"]
    problems = written["environment"]["problems"]
    assert problems[0] == f"bf16 {failed}"
    assert problems[1].startswith(
        "fp8: blocks.0.mlp.1 should have run three products by recipe fp8"
    )
    printed = capsys.readouterr().err.splitlines()
    assert [f"failed: {p}" for p in problems] == [p for p in printed if p.startswith("failed")]


def row(recipe: str, loss: float | None, status: str = "complete", **more: Any) -> Any:
    from gpt_report import Row

    return Row(recipe, status=status, validation_loss=loss, **more)


def test_every_condition_of_success(demo: ModuleType) -> None:
    unigram = "fp8 reached 3.010 bits per byte, which is not 25% below the 4.000 of single bytes"
    for fp32, fp8, status, problems in (
        (2.9, 2.95, "complete", []),
        (2.9, 2.97, "complete", ["fp8 is +2.41% from fp32, more than 2%"]),
        (2.9, 2.83, "complete", ["fp8 is -2.41% from fp32, more than 2%"]),
        (2.99, 3.01, "complete", [unigram]),
        (2.9, math.nan, "complete", ["fp8 has no finite validation loss"]),
        (2.9, 2.9, "diverged", ["fp8 diverged"]),
    ):
        rows = [row("fp32", fp32 * math.log(2)), row("fp8", fp8 * math.log(2), status)]
        assert demo.problems(demo.Report(rows), 4.0, 0.25) == problems

    rows = [row("fp32", 1.0, data=1), row("fp8", 1.0, data=2)]
    assert demo.problems(demo.Report(rows), 4.0, 0.25) == ["fp8 was trained on other data"]
    rows[1].reseeded = True
    assert demo.problems(demo.Report(rows), 4.0, 0.25) == []
