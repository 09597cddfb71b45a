"""mixprec.integrations.torchtitan: its models built with MixprecConverter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mixprec

pytest.importorskip("torchtitan", reason="torchtitan is not installed")
titan = pytest.importorskip("titan_ranks", reason="this torchtitan is not that of the adapter")

PROGRAM = Path(__file__).with_name("titan_ranks.py")


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "mxfp8"])
def test_a_model_is_that_of_convert(recipe: str) -> None:
    model, by_hand = titan.built(recipe)[1], titan.built(None)[1]
    assert isinstance(model.layers["0"].feed_forward.w1, mixprec.nn.Linear)
    assert type(model.lm_head) is type(by_hand.lm_head)
    mixprec.convert(by_hand, recipe, overrides={"lm_head": None})
    assert titan.losses(model) == titan.losses(by_hand)
    for name, p in by_hand.named_parameters():
        assert torch.equal(model.get_parameter(name), p), name


def test_the_config_stays_one_of_torchtitan() -> None:
    plain = titan.model_registry("debugmodel").model
    config = titan.built("fp8")[0].model
    assert isinstance(config, type(plain))
    assert config.to_dict().keys() == plain.to_dict().keys()
    with torch.device("meta"):
        model = config.build()
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize(
    ("recipe", "needed"), [("fp8-delayed", "update_scales"), ("fp16", "GradScaler")]
)
def test_recipes_with_state_are_errors(recipe: str, needed: str) -> None:
    for config in ({"recipe": recipe}, {"overrides": {"*.w1": recipe}}):
        with pytest.raises(ValueError, match=f"got '{recipe}': it needs mixprec.{needed}|{needed}"):
            titan.MixprecConverter.Config(**config).build()


@pytest.mark.slow
def test_two_ranks_split_by_torchtitan_have_the_losses_of_one() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    done = subprocess.run([*command, "2", str(PROGRAM)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
