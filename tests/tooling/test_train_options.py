"""What a user of the programs in examples/ may get wrong: one line on stderr, nothing trained."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

IMAGE = ("--model=cnn", "--steps=2", "--batch=4", "--out={tmp}", "--recipes=fp8")
GPT = ("--text={tmp}/text", "--out={tmp}/out", "--layers=1", "--width=64", "--context=32")
ROWS: tuple[tuple[str, str, str, str], ...] = (
    # program, argument, what it says, a package that is not installed
    ("train_image", "--recipes=fp32,fp9", 'recipe must be "bf16", "fp16", "fp8"', ""),
    ("train_image", "--steps=0", "--steps must be at least 1, got 0", ""),
    ("train_image", "--batch=0", "--batch must be at least 1, got 0", ""),
    ("train_image", "--seed=1", "error: the glyphs need matplotlib", "matplotlib"),
    ("train_image", "--out={tmp}/text/out", "error: {tmp}/text/out: Not a directory", ""),
    ("train_pruned", "--sparsity=1", "--sparsity must be between 0 and 1, got 1.0", ""),
    ("train_pruned", "--warmup=0", "--warmup must be between 0 and 1, got 0.0", ""),
    ("train_pruned", "--steps=1", "--steps must be at least 2, got 1", ""),
    ("train_pruned", "--recipe=fp9", '--recipe: recipe must be "bf16"', ""),
    ("train_pruned", "--model=rnn", "invalid choice: 'rnn'", ""),
    ("train_gpt", "--recipes=fp32,fp9", "error: --recipes: ", ""),
    ("train_gpt", "--recipes=tf32", "error: --recipes: tf32 needs --device cuda", ""),
    ("train_gpt", "--steps=0", "error: --steps must be at least 1, got 0", ""),
    ("train_gpt", "--width=33", "error: --width must be a multiple of 64, got 33", ""),
    ("train_gpt", "--device=cuda", "error: --device cuda: there is no GPU to use", ""),
    ("train_gpt", "--text=/none", "cannot read the text file /none: No such file or dir", ""),
    ("train_gpt", "--text={tmp}/empty", "({tmp}/empty) has 0 bytes, too short to hold out", ""),
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
    """ "nvfp4" is not the recipe published under that name."""
    words = ["--recipes=fp32,nvfp4,fused-nvfp4,hybrid@hopper-fast"]
    names = importlib.import_module("train_gpt").parse_arguments(words).recipes
    assert names == ["fp32", "nvfp4-1x16", "fused-nvfp4-1x16", "fp8@hopper-fast"]
    parse = importlib.import_module("train_image").parse_arguments
    assert parse(["--recipes=nvfp4,nvfp4-1x16,fp32"]).recipes == ["nvfp4-1x16", "fp32"]
    for program in ("train_pruned", "train_ddp"):
        parse = importlib.import_module(program).parse_arguments
        assert parse(["--recipe=nvfp4"]).recipe == "nvfp4-1x16"
