"""examples/train_image.py: its images, its models, its runs, and what a newcomer may get wrong."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train_image

    return train_image


def test_the_glyphs(example: ModuleType) -> None:
    import image_data

    made = image_data.glyph_images(train=720, held_out=360)
    again = image_data.glyph_images(train=720, held_out=360)
    for (x, y), (x_again, y_again) in zip(
        (made.train, made.held_out), (again.train, again.held_out), strict=True
    ):
        assert torch.equal(x, x_again)
        assert torch.equal(y, y_again)
        assert x.dtype == torch.float32
        assert x.shape[1:] == (1, 28, 28)
        assert y.bincount().tolist() == [len(y) // 36] * 36, "as many of each class"
    other = image_data.glyph_images(train=720, held_out=360, seed=1)
    assert not torch.equal(made.train[0], other.train[0])
    assert set(made.train_sources.tolist()).isdisjoint(made.held_out_sources.tolist())
    assert abs(made.train[0].mean()) < 1e-4
    assert abs(made.train[0].std() - 1) < 1e-4
    # No image shows another's pixels, and each shows its glyph: in the middle there is more ink.
    assert len(made.train[0].flatten(1).unique(dim=0)) == 720
    middle = made.train[0][..., 6:22, 6:22].mean(dim=(1, 2, 3))
    assert (middle > made.train[0].mean(dim=(1, 2, 3))).float().mean() > 0.98


def test_each_glyph_is_drawn_whole_and_unlike_the_others(example: ModuleType) -> None:
    import image_data

    atlas = image_data.render()
    fonts, characters, side, _ = atlas.shape
    assert (fonts, characters) == (21, 36)
    assert atlas.min() == 0
    assert 0.99 < atlas.amax(dim=(2, 3)).min() <= atlas.max() <= 1
    edges = (atlas[..., 0], atlas[..., -1], atlas[..., 0, :], atlas[..., -1, :])
    assert all(edge.count_nonzero() == 0 for edge in edges), "a glyph is cut off"
    assert len(atlas.view(-1, side * side).unique(dim=0)) == fonts * characters
    cross = image_data.CHARACTERS.index("H")
    middle = atlas[:, cross, side // 2 - 3 : side // 2 + 3].amax(dim=1)
    assert (middle.count_nonzero(dim=1) > 12).all(), "the bar of an H"


def test_the_digits(example: ModuleType) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn, which brings the digits, is not installed")
    import image_data

    made = image_data.digit_images()
    assert made.side == 8
    assert len(made.train[1]) + len(made.held_out[1]) == 1797
    assert set(made.train_sources.tolist()).isdisjoint(made.held_out_sources.tolist())
    assert made.train[1].bincount().min() > 100


def test_the_batches(example: ModuleType) -> None:
    import image_data

    data = torch.arange(10.0).view(10, 1, 1, 1), torch.arange(10)
    batches = image_data.Batches(data, batch=4, count=5, seed=3)
    first = [labels.tolist() for _, labels in batches]
    assert len(first) == len(batches) == 5
    assert first == [labels.tolist() for _, labels in batches]
    flat = [label for labels in first for label in labels]
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10)), "two epochs"
    assert flat[:10] != flat[10:]
    assert all(torch.equal(x.flatten(), y.float()) for x, y in batches)
    other = image_data.Batches(data, batch=4, count=5, seed=4)
    assert first != [labels.tolist() for _, labels in other]


@pytest.fixture
def few_glyphs(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Six characters, large and in few: learned in a few steps."""
    import image_data

    monkeypatch.setattr(image_data, "CHARACTERS", "0147XS")
    images = image_data.glyph_images(train=600, held_out=300)
    monkeypatch.setattr(image_data, "load", lambda name: images)
    return images


@pytest.mark.parametrize(
    ("model", "recipe"), [("cnn", "fp32"), ("cnn", "fp8-delayed"), ("vit", "fp8"), ("vit", "fp16")]
)
def test_learns_what_it_has_not_seen(
    example: ModuleType, few_glyphs: Any, model: str, recipe: str
) -> None:
    result = example.train(model, recipe, seed=1, steps=60)
    assert len(result["losses"]) == 60
    assert result["samples"] == 300
    assert result["accuracy"] == result["correct"] / 300
    assert result["accuracy"] > 0.5, "chance is 1 in 6"
    assert 0 < result["loss"] < math.log(6)
    assert result["skipped"] <= (5 if recipe == "fp16" else 0)


def test_every_layer_runs_in_the_recipe_and_its_weights_are_16_bits(example: ModuleType) -> None:
    import image_data

    images = image_data.glyph_images(train=36, held_out=36)
    for name in ("cnn", "vit"):
        for recipe, dtype in (("fp8", torch.bfloat16), ("fp16", torch.float16)):
            model, scaler = example.make_model(name, recipe, images, seed=0)
            layers = [
                m for m in model.modules() if isinstance(m, (torch.nn.Linear, torch.nn.Conv2d))
            ]
            assert len(layers) > 5
            assert all(layer.recipe.name == recipe for layer in layers)
            assert all(layer.weight.dtype == dtype for layer in layers)
            assert scaler.is_enabled() == (recipe == "fp16")
        model, _ = example.make_model(name, "fp32", images, seed=0)
        same, _ = example.make_model(name, "fp8", images, seed=0)
        assert not any(type(m).__module__.startswith("mixprec") for m in model.modules())
        pairs = zip(model.parameters(), same.parameters(), strict=True)
        assert all(torch.equal(a.to(b.dtype), b) for a, b in pairs), "a seed has its weights"
        assert 1e5 < sum(p.numel() for p in model.parameters()) < 5e5


def test_the_program(
    example: ModuleType, few_glyphs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["--model=cnn", "--recipes=fp32,bf16,fp32", "--steps=30", f"--out={out}"]
    assert example.main(words) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("cnn on 600 glyphs, 6 classes; judged on 300 others; 30 steps")
    assert [row.split()[0] for row in printed[1:4]] == ["recipe", "fp32", "bf16"]
    assert printed[2].split()[3] == "-"
    assert "points" in printed[3]
    assert sorted(p.name for p in out.iterdir()) == ["image.png", "results.json"]
    assert (out / "image.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((out / "results.json").read_text())
    assert [result["recipe"] for result in written["results"]] == ["fp32", "bf16"]
    assert len(written["results"][0]["predictions"]) == 24
    assert written["options"]["steps"] == 30
    again = example.train("cnn", "bf16", seed=0, steps=30)
    assert again["losses"] == written["results"][1]["losses"], "the same run, bit for bit"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--recipes=fp32,fp4", 'recipe must be "bf16", "fp16", "fp8"'),
        ("--steps=0", "--steps must be at least 1, got 0"),
        ("--model=rnn", "invalid choice: 'rnn'"),
        ("--data=mnist", "invalid choice: 'mnist'"),
    ],
)
def test_bad_options(example: ModuleType, capsys: Any, argument: str, message: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        example.main([argument])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a usable GPU")
def test_no_gpu(example: ModuleType) -> None:
    with pytest.raises(SystemExit, match="--device cuda: there is no GPU to use"):
        example.main(["--device=cuda"])


@pytest.mark.parametrize(
    ("package", "data", "install"),
    [("sklearn", "digits", "scikit-learn"), ("matplotlib", "glyphs", "matplotlib")],
)
def test_a_package_that_is_not_installed(
    package: str, data: str, install: str, tmp_path: Path
) -> None:
    program = (
        f"import sys; sys.modules[{package!r}] = None; sys.path.insert(0, {str(EXAMPLES)!r}); "
        f"import train_image; sys.exit(train_image.main(['--data={data}', '--out={tmp_path}']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.endswith(f"pip install {install}\n")
    assert done.stderr.count("\n") == 1


def test_a_directory_that_cannot_be_made(example: ModuleType, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").touch()
    assert example.main([f"--out={tmp_path}/file/out"]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path}/file/out: Not a directory\n"


def test_ctrl_c_keeps_what_there_is(
    example: ModuleType, few_glyphs: Any, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    train = example.train

    def interrupted(model: str, recipe: str, *args: Any) -> dict[str, Any]:
        if recipe == "fp8":
            raise KeyboardInterrupt
        return train(model, recipe, *args)

    monkeypatch.setattr(example, "train", interrupted)
    words = ["--recipes=bf16,fp8,fp16", "--steps=2", f"--out={tmp_path}"]
    assert example.main(words) == 130
    assert "interrupted" in capsys.readouterr().err
    written = json.loads((tmp_path / "results.json").read_text())
    assert [result["recipe"] for result in written["results"]] == ["bf16"]


def test_a_run_without_a_finite_loss_fails(
    example: ModuleType, few_glyphs: Any, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    make_model = example.make_model

    def broken(*args: Any) -> Any:
        model, scaler = make_model(*args)
        model.head.weight.data[0, 0] = math.nan
        return model, scaler

    monkeypatch.setattr(example, "make_model", broken)
    assert example.main(["--recipes=bf16", "--steps=2", f"--out={tmp_path}"]) == 1
    error = capsys.readouterr().err
    assert error == "failed: bf16 has no finite loss on the held-out images\n"
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["results"][0]["skipped"] == 2
