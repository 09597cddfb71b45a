"""Experts of transformers: every implementation and flag, switched after convert."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from cases import observed
from torch import nn
from torch.nn.utils import parametrize

import mixprec
from mixprec.testing import sqnr

transformers = pytest.importorskip("transformers")

# The class, and what its config has beside the sizes.
FORMS = {
    "concatenated": ("mixtral.MixtralExperts", {}),
    "interleaved, transposed, bias": ("gpt_oss.GptOssExperts", {}),
    "transposed, bias": ("openai_privacy_filter.OpenAIPrivacyFilterExperts", {}),
    "no gate": ("nemotron_h.NemotronHExperts", {}),
    "transposed": ("aria.AriaExperts", {}),
    "norm": ("muse_spark.MuseSparkExperts", {}),
}
E_, H, F_ = 4, 32, 48


class Config:
    """Sizes, by all names that models have for them."""

    _experts_implementation = "eager"

    def __init__(self, **options: Any) -> None:
        for name in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"):
            setattr(self, name, E_)
        for name in ("intermediate_size", "moe_intermediate_size"):
            setattr(self, name, F_)
        self.hidden_size = H
        self.hidden_act = self.mlp_hidden_act = self.hidden_activation = "silu"
        self.moe_latent_size = None
        self.moe_hidden_size, self.post_norm_eps = H, 1e-6
        self.swiglu_alpha, self.swiglu_limit = 1.7, 7.0
        vars(self).update(options)


def make(form: str) -> Any:
    place, options = FORMS[form]
    module, name = place.split(".")
    library = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    torch.manual_seed(0)
    experts = getattr(library, name)(Config(**options))
    for p in experts.parameters():
        nn.init.normal_(p, std=0.2)
    return experts


def batch() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    weights, index = torch.randn(12, E_).softmax(-1).topk(2, dim=-1)
    index[index == 2] = 3  # an expert without a token, and one that a token has twice
    return torch.randn(12, H, requires_grad=True), index, weights.requires_grad_()


def results(experts: nn.Module, implementation: str) -> list[torch.Tensor]:
    """The output, and all gradients."""
    experts.config._experts_implementation = implementation
    x, index, weights = batch()
    y = experts(x, index, weights)
    return [y, *torch.autograd.grad(y.sin().sum(), [x, weights, *experts.parameters()])]


IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")


@pytest.mark.parametrize(("recipe", "bar"), [("bf16", 38), ("fp8", 15), ("fp8-rowwise", 15)])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_and_implementation(form: str, recipe: str, bar: int) -> None:
    plain = make(form)
    experts = mixprec.convert(copy.deepcopy(plain), recipe)
    assert isinstance(experts, mixprec.nn.Experts)
    want = results(plain, "eager")
    found = {name: results(experts, name) for name in IMPLEMENTATIONS}
    for name, got in found.items():
        for mine, theirs in zip(got, want, strict=True):
            assert sqnr(theirs, mine) > bar, name
    assert all(map(torch.equal, found["batched_mm"], found["grouped_mm"]))
    if recipe == "fp8-rowwise":  # scales lie along K of the weight as a product reads it
        assert sqnr(found["grouped_mm"][0], found["eager"][0]) > 45
    with torch.no_grad():
        x, *choice = batch()
        compiled = torch.compile(experts, backend="aot_eager")
        assert torch.equal(compiled(x, *choice), experts(x, *choice))
    mixprec.unconvert(experts)
    assert type(experts) is type(plain)
    assert all(map(torch.equal, results(experts, "eager"), want))


class Half(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 0.5 * weight


def halved(experts: Any) -> Any:
    for name in ("gate_up_proj", "down_proj"):
        parametrize.register_parametrization(experts, name, Half())
    return experts


@pytest.mark.parametrize("form", ["concatenated", "interleaved, transposed, bias"])
def test_parametrized_experts(form: str) -> None:
    """the recipe computes with what a parametrization makes of the weights, in each pass anew"""
    want = results(halved(make(form)), "eager")
    for experts in (mixprec.convert(halved(make(form)), "bf16"),
                    halved(mixprec.convert(make(form), "bf16"))):  # fmt: skip
        assert isinstance(experts, mixprec.nn.Experts)
        for name in IMPLEMENTATIONS:
            seen: set[str] = set()
            with parametrize.cached(), observed(lambda *a, s=seen: s.add(a[0])):
                got = results(experts, name)
            assert seen == {"forward", "grad_input", "grad_weight"}
            for mine, theirs in zip(got, want, strict=True):
                assert sqnr(theirs, mine) > 38, name
        parametrize.remove_parametrizations(experts, "down_proj", leave_parametrized=False)
        parametrize.remove_parametrizations(experts, "gate_up_proj", leave_parametrized=False)
        assert type(experts).__name__ == "Experts"


def test_an_implementation_of_the_program_is_not_replaced() -> None:
    moe = importlib.import_module("transformers.integrations.moe")
    moe.ALL_EXPERTS_FUNCTIONS["mine"] = lambda self, x, index, weights: 3 * x
    experts = mixprec.convert(make("concatenated"), "bf16")
    try:
        experts.config._experts_implementation = "mine"
        x, *choice = batch()
        with pytest.warns(UserWarning, match="does not use the recipe bf16"):
            assert torch.equal(experts(x, *choice), 3 * x)
    finally:
        del moe.ALL_EXPERTS_FUNCTIONS["mine"]


def test_implementations_of_another_interface_are_not_replaced() -> None:
    """Of a class that the program has decorated, with functions of its own."""
    moe = importlib.import_module("transformers.integrations.moe")
    interface = moe.ExpertsInterface()
    interface["grouped_mm"] = lambda self, x, index, weights: 3 * x
    own = type("Own", (type(make("concatenated")),), {})
    moe.use_experts_implementation(own, experts_interface=interface)
    experts = make("concatenated")
    experts.__class__ = own
    experts = mixprec.convert(experts, "bf16")
    experts.config._experts_implementation = "grouped_mm"
    x, *choice = batch()
    with pytest.warns(UserWarning, match="does not use the recipe bf16"):
        assert torch.equal(experts(x, *choice), 3 * x)


def test_experts_of_other_ranks() -> None:
    """As expert parallelism of transformers calls them."""
    plain, (x, index, weights) = make("concatenated"), batch()
    experts = mixprec.convert(copy.deepcopy(plain), "bf16")
    index = torch.where(index == 0, E_, index)
    weights = torch.where(index == E_, 0.0, weights)
    for each in (plain, experts):
        each.config._experts_implementation = "grouped_mm"
        each._is_expert_parallel = True
    assert sqnr(plain(x, index, weights), experts(x, index, weights)) > 38


def test_falcon() -> None:
    from transformers.models.falcon.modeling_falcon import FalconLinear

    layer, x = FalconLinear(32, 16), torch.randn(4, 32)
    want = layer(x)
    assert isinstance(mixprec.convert(layer, "bf16"), mixprec.nn.Linear)
    assert 40 < sqnr(want, layer(x)) < 80
