"""examples/train_pruned.py: masks that hold through low-precision training."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture
def example(few_glyphs: Any) -> ModuleType:
    import train_pruned

    return train_pruned


@pytest.mark.parametrize(
    ("model", "recipe", "forms"),
    [("vit", "fp32", ["param"]), ("cnn", "fp8", ["param", "master", "FP8"])],
)
def test_pruned_weights_stay_zero_and_the_others_move(
    example: ModuleType, model: str, recipe: str, forms: list[str]
) -> None:
    pruner = example.Pruner(0.7, last_dense_step=2)
    before: dict[str, torch.Tensor] = {}

    def after_step(step: int, model: Any, optimizer: Any) -> None:
        pruner(step, model, optimizer)
        if step == 2:
            before.update({name: p.detach().clone() for name, p in model.named_parameters()})

    example.train(model, recipe, 0, 14, "cpu", after_step)
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
    with pytest.raises(example.PruningError, match=f"{name}: a pruned weight is not zero in the"):
        pruner.shares()


def test_an_overflow_in_a_pruned_place_still_skips_the_step(example: ModuleType) -> None:
    pruner, layer, skipped = example.Pruner(0.5, last_dense_step=0), "blocks.0.up", []

    def after_step(step: int, model: Any, optimizer: Any) -> None:
        pruner(step, model, optimizer)
        if step == 1:
            weight = model.get_submodule(layer).weight
            weight.grad = torch.where(pruner.masks[layer] == 0, torch.inf, 0.0).to(weight)
            optimizer.step()
            skipped.append(int(optimizer.skipped))

    example.train("vit", "bf16", 0, 3, "cpu", after_step)
    assert skipped == [1]


def test_the_program(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--model=cnn", "--recipe=fp8", "--steps=4", "--sparsity=0.6"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "60.0% in the param, 60.0% in the master, " in printed[2]
    assert printed[3] == "passed: all pruned weights of 7 layers are exactly zero"
