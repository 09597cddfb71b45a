"""examples/train_image.py: its images, models and training runs, and its error messages."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture
def example(examples: pytest.MonkeyPatch) -> ModuleType:
    import train_image

    return train_image


def test_the_glyphs(example: ModuleType) -> None:
    """All differ, none is cut off, and no glyph of the training images is in the held-out ones."""
    import image_data

    atlas = image_data.render()
    fonts, characters, side, _ = atlas.shape
    edges = (atlas[..., 0], atlas[..., -1], atlas[..., 0, :], atlas[..., -1, :])
    assert all(edge.count_nonzero() == 0 for edge in edges), "a glyph is cut off"
    assert len(atlas.view(-1, side * side).unique(dim=0)) == fonts * characters
    made, again = (image_data.glyph_images(train=360, held_out=180) for _ in range(2))
    for (x, y), same in ((made.train, again.train), (made.held_out, again.held_out)):
        assert torch.equal(x, same[0])
        assert torch.equal(y, same[1])
        assert y.bincount().tolist() == [len(y) // 36] * 36, "as many of each class"
    assert set(made.train_sources.tolist()).isdisjoint(made.held_out_sources.tolist())


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


def test_a_loss_that_is_not_finite_is_a_failure(
    example: ModuleType, few_glyphs: Any, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    make_model = example.make_model

    def faulty(*args: Any) -> Any:
        model, scaler = make_model(*args)
        model.head.weight.data[0, 0] = math.nan
        return model, scaler

    monkeypatch.setattr(example, "make_model", faulty)
    assert example.main(["--steps=1", f"--out={tmp_path}", "--recipes=bf16"]) == 1
    assert capsys.readouterr().err == "failed: bf16 has no finite loss on the held-out images\n"


# What a user of examples/ may get wrong: one line on stderr, nothing trained


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
    """ "nvfp4" is not the recipe published under that name."""
    words = ["--recipes=fp32,nvfp4,fused-nvfp4,hybrid@hopper-fast"]
    names = importlib.import_module("train_gpt").parse_arguments(words).recipes
    assert names == ["fp32", "nvfp4-1x16", "fused-nvfp4-1x16", "fp8@hopper-fast"]
    parse = importlib.import_module("train_image").parse_arguments
    assert parse(["--recipes=nvfp4,nvfp4-1x16,fp32"]).recipes == ["nvfp4-1x16", "fp32"]
    for program in ("train_pruned", "train_ddp"):
        parse = importlib.import_module(program).parse_arguments
        assert parse(["--recipe=nvfp4"]).recipe == "nvfp4-1x16"


# examples/train_pruned.py: masks that hold through low-precision training


@pytest.fixture
def pruned(few_glyphs: Any) -> ModuleType:
    import train_pruned

    return train_pruned


@pytest.mark.parametrize(
    ("model", "recipe", "forms"),
    [("vit", "fp32", ["param"]), ("cnn", "fp8", ["param", "master", "FP8"])],
)
def test_pruned_weights_stay_zero_and_the_others_move(
    pruned: ModuleType, model: str, recipe: str, forms: list[str]
) -> None:
    pruner = pruned.Pruner(0.7, last_dense_step=2)
    before: dict[str, torch.Tensor] = {}

    def after_step(step: int, model: Any, optimizer: Any) -> None:
        pruner(step, model, optimizer)
        if step == 2:
            before.update({name: p.detach().clone() for name, p in model.named_parameters()})

    pruned.train(model, recipe, 0, 14, "cpu", after_step)
    shares = pruner.shares()
    assert list(shares) == forms
    assert all(0.699 < shares[form] < 0.701 for form in forms if form != "FP8")
    in_order = [shares[form] for form in ("master", "param", "FP8") if form in shares]
    assert in_order == sorted(in_order), "a cast may underflow; none brings a weight back"
    assert len(pruner.masks) >= 7
    for name, mask in pruner.masks.items():
        weight = pruner.model.get_submodule(name).weight
        assert weight[mask == 0].count_nonzero() == 0
        moved = weight != before[f"{name}.weight"]
        assert moved[mask == 1].float().mean() > 0.5, f"{name} is not trained any more"
        moments = [pruner.optimizer.state[weight][key] for key in ("exp_avg", "exp_avg_sq")]
        assert all(m[mask == 0].count_nonzero() == 0 for m in moments)
        assert all(m[mask == 1].count_nonzero() > 0 for m in moments)
    weight.data[mask == 0] = 0.5
    with pytest.raises(pruned.PruningError, match=f"{name}: a pruned weight is not zero in the"):
        pruner.shares()


def test_an_overflow_in_a_pruned_place_still_skips_the_step(pruned: ModuleType) -> None:
    pruner, layer, skipped = pruned.Pruner(0.5, last_dense_step=0), "blocks.0.up", []

    def after_step(step: int, model: Any, optimizer: Any) -> None:
        pruner(step, model, optimizer)
        if step == 1:
            weight = model.get_submodule(layer).weight
            weight.grad = torch.where(pruner.masks[layer] == 0, torch.inf, 0.0).to(weight)
            optimizer.step()
            skipped.append(int(optimizer.skipped))

    pruned.train("vit", "bf16", 0, 3, "cpu", after_step)
    assert skipped == [1]


def test_the_program_that_prunes(pruned: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert pruned.main(["--model=cnn", "--recipe=fp8", "--steps=4", "--sparsity=0.6"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "60.0% in the param, 60.0% in the master, " in printed[2]
    assert printed[3] == "passed: all pruned weights of 7 layers are exactly zero"
