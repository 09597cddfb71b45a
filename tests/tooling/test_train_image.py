"""examples/train_image.py: its images, models and training runs, and its error messages."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import train_image

        yield train_image


@pytest.fixture(scope="module")
def few_glyphs(example: ModuleType) -> Iterator[Any]:
    """Six characters, learned in a few steps, in place of the data sets."""
    import image_data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_data, "CHARACTERS", "0147XS")
        images = image_data.glyph_images(train=300, held_out=120)
        patch.setattr(image_data, "load", lambda name: images)
        yield images


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


def test_large_models_need_torchvision_or_timm(
    example: ModuleType, few_glyphs: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    for package in ("timm", "torchvision"):
        monkeypatch.setitem(sys.modules, package, None)
    words = ["--model=resnet50", "--steps=2", "--batch=4", f"--out={tmp_path}", "--recipes=fp8"]
    assert example.main(words) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: --model resnet50 needs torchvision or timm (")
    assert error.endswith(": pip install torchvision\n")


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


def test_bad_options(example: ModuleType, capsys: Any) -> None:
    for argument, message in (
        ("--recipes=fp32,fp9", 'recipe must be "bf16", "fp16", "fp8"'),
        ("--steps=0", "--steps must be at least 1, got 0"),
        ("--batch=0", "--batch must be at least 1, got 0"),
        ("--data=mnist", "invalid choice: 'mnist'"),
    ):
        with pytest.raises(SystemExit):
            example.main([argument])
        assert message in capsys.readouterr().err


def test_packages_and_folders_that_are_missing(tmp_path: Path) -> None:
    """In one process without scikit-learn and matplotlib: each error is one line."""
    (tmp_path / "file").touch()
    program = (
        "import sys; sys.modules['sklearn'] = sys.modules['matplotlib'] = None; "
        f"sys.path.insert(0, {str(EXAMPLES)!r}); import train_image; "
        "print([train_image.main([f'--data={data}', '--out=' + out]) for data, out in "
        f"(('digits', {str(tmp_path)!r}), ('glyphs', {str(tmp_path)!r}), "
        f"('glyphs', {str(tmp_path / 'file' / 'out')!r}))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[1, 1, 1]\n", done.stderr
    digits, glyphs, folder = done.stderr.splitlines()
    assert digits.startswith("error: --data digits needs scikit-learn")
    assert digits.endswith("pip install scikit-learn")
    assert glyphs.startswith("error: the glyphs need matplotlib")
    assert glyphs.endswith("pip install matplotlib")
    assert folder == f"error: {tmp_path}/file/out: Not a directory"
