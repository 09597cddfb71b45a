"""examples/train_image.py: its images, models and training runs, and its error messages."""

from __future__ import annotations

import json
import math
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
