"""examples/train_image.py and train_pruned.py, and what all examples say of wrong arguments."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def example(examples: pytest.MonkeyPatch) -> ModuleType:
    import train_image

    return train_image


@pytest.mark.parametrize(("model", "recipe"), [("cnn", "fp8-delayed"), ("vit", "fp16")])
def test_it_generalizes_to_held_out_images(
    example: ModuleType, few_glyphs: Any, model: str, recipe: str
) -> None:
    steps = {"cnn": 20, "vit": 60}[model]
    result = example.train(model, recipe, seed=1, steps=steps)
    assert result["accuracy"] == result["correct"] / 120
    assert result["accuracy"] > 0.5, "chance is 1 in 6"
    assert 0 < result["loss"] < math.log(6)
    assert result["skipped"] <= (5 if recipe == "fp16" else 0)


def test_the_program(
    example: ModuleType, few_glyphs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert example.main(["--recipes=fp32,bf16,fp32", "--steps=4", f"--out={out}"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("cnn on 300 glyphs, 6 classes; 120 held out; 4 steps of 32 on cpu")
    assert [line.split()[0] for line in printed[1:4]] == ["recipe", "fp32", "bf16"]
    assert "points" in printed[3]
    assert sorted(p.name for p in out.iterdir()) == ["loss.png", "results.json"]
    written = json.loads((out / "results.json").read_text())
    assert [result["recipe"] for result in written["results"]] == ["fp32", "bf16"]
    again = example.train("cnn", "bf16", seed=0, steps=4)
    assert again["losses"] == written["results"][1]["losses"], "the same run, bit for bit"


# What a user of examples/ may get wrong: one line on stderr, nothing trained


IMAGE = ("--model=cnn", "--steps=2", "--batch=4", "--out={tmp}", "--recipes=fp8")
GPT = ("--text={tmp}/text", "--out={tmp}/out", "--layers=1", "--width=64", "--context=32")
ROWS: tuple[tuple[str, str, str, str], ...] = (
    # program, argument, what it says, a package that is not installed
    ("train_image", "--recipes=fp32,fp9", 'recipe must be "bf16", "fp16", "fp8"', ""),
    ("train_image", "--steps=0", "--steps must be at least 1, got 0", ""),
    ("train_image", "--seed=1", "error: the glyphs need matplotlib", "matplotlib"),
    ("train_image", "--out={tmp}/text/out", "error: {tmp}/text/out: Not a directory", ""),
    ("train_pruned", "--sparsity=1", "--sparsity must be between 0 and 1, got 1.0", ""),
    ("train_pruned", "--steps=1", "--steps must be at least 2, got 1", ""),
    ("train_pruned", "--recipe=fp9", '--recipe: recipe must be "bf16"', ""),
    ("train_pruned", "--model=rnn", "invalid choice: 'rnn'", ""),
    ("train_gpt", "--recipes=fp32,fp9", "error: --recipes: ", ""),
    ("train_gpt", "--recipes=tf32", "error: --recipes: tf32 needs --device cuda", ""),
    ("train_gpt", "--width=33", "error: --width must be a multiple of 64, got 33", ""),
    ("train_gpt", "--device=cuda", "error: --device cuda: there is no GPU to use", ""),
    ("train_gpt", "--text=/none", "cannot read the text file /none: No such file or dir", ""),
    ("train_gpt", "--text={tmp}/short", "({tmp}/short) has 2500 bytes, too short to hold", ""),
    ("train_gpt", "--out={tmp}/text/out", "error: {tmp}/text/out: Not a directory", ""),
)


@pytest.mark.parametrize(("program", "argument", "says", "absent"), ROWS)
def test_one_line_names_what_is_wrong(
    program: str,
    argument: str,
    says: str,
    absent: str,
    examples: pytest.MonkeyPatch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, size in (("empty", 0), ("short", 2500), ("text", 9000)):
        (tmp_path / name).write_text("a" * size)
    module = importlib.import_module(program)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    packages = absent.split()
    if packages:  # not those that an earlier test has drawn
        monkeypatch.setattr(module.image_data, "load", module.image_data.glyph_images)
    for loaded in [*packages, *(m for m in sys.modules if m.partition(".")[0] in packages)]:
        monkeypatch.setitem(sys.modules, loaded, None)
    more = {"train_image": IMAGE, "train_gpt": GPT, "train_pruned": ()}[program]
    try:
        status = module.main([word.format(tmp=tmp_path) for word in (*more, argument)])
        error = capsys.readouterr().err
    except SystemExit as stopped:
        status, error = stopped.code, capsys.readouterr().err or str(stopped)
    assert status not in (0, None)
    assert says.format(tmp=tmp_path) in error.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_an_alias_prints_as_the_recipe_that_it_is(examples: pytest.MonkeyPatch) -> None:
    """A name of another library is shown as ours."""
    words = ["--recipes=fp32,NVFP4BlockScaling,fused-nvfp4,hybrid@hopper-fast"]
    names = importlib.import_module("train_gpt").parse_arguments(words).recipes
    assert names == ["fp32", "nvfp4", "fused-nvfp4", "fp8@hopper-fast"]
    parse = importlib.import_module("train_image").parse_arguments
    assert parse(["--recipes=nvfp4,NVFP4,fp32"]).recipes == ["nvfp4", "fp32"]
    for program in ("train_pruned", "train_ranks"):
        parse = importlib.import_module(program).parse_arguments
        assert parse(["--recipe=NVFP4"]).recipe == "nvfp4"


# examples/train_pruned.py: masks that hold through low-precision training


@pytest.fixture
def pruned(few_glyphs: Any) -> ModuleType:
    import train_pruned

    return train_pruned


def test_the_program_that_prunes(pruned: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert pruned.main(["--model=cnn", "--recipe=fp8", "--steps=4", "--sparsity=0.6"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "60.0% in the param, 60.0% in the master, " in printed[2]
    assert printed[3] == "passed: all pruned weights of 7 layers are exactly zero"
