"""mixprec.nn.Conv2d in models: compile, checkpointing, reuse of weights, compare."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import for_each, normal
from independent import assert_same_lists as assert_same
from torch import nn
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec.functional import operands
from mixprec.nn import Conv2d, Linear
from mixprec.nn.convert import convert
from mixprec.recipes import RECIPES, Recipe
from mixprec.scaling import plain_state_dict, update_scales
from mixprec.testing import sqnr

NAMES = tuple(RECIPES)
FP8 = tuple(name for name, recipe in RECIPES.items() if recipe.is_fp8)
pytestmark = pytest.mark.filterwarnings("ignore:a model with an fp16 recipe")


class Net(nn.Module):
    """A residual block with everything in it: 3x3, 1x1, strided, depthwise; then a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 16, 1, stride=2, bias=False)
        self.depth = nn.Conv2d(16, 16, 3, padding="same", groups=16)
        self.wide = nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect")
        self.norm = nn.GroupNorm(4, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(F.relu(self.stem(x), inplace=True))
        x = x + F.relu(self.wide(self.norm(self.depth(x))))
        return self.head(x.mean((2, 3)))


def make(recipe: str) -> nn.Module:
    torch.manual_seed(0)
    return convert(Net(), recipe)


def batch(seed: int) -> torch.Tensor:
    return normal((2, 3, 9, 9), torch.float32, seed=seed)


def train(
    model: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """What two steps of two micro-batches leave behind: losses, parameters, buffers."""
    forward = model if forward is None else forward
    optimizer = mixprec.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    left: list[torch.Tensor] = []
    for step in range(2):
        optimizer.zero_grad()
        for i in range(2):
            loss = forward(batch(10 * step + i)).square().mean()
            loss.backward()
            left.append(loss.detach())
        optimizer.step()
    return [*left, *(p.detach() for p in model.parameters()), *model.buffers()]


# --- in a model --------------------------------------------------------------------------------


@for_each("recipe", NAMES)
def test_convert_converts_both_kinds(recipe: str) -> None:
    model = make(recipe)
    plain = Net()
    plain.load_state_dict(plain_state_dict(model))
    kinds = {fqn: type(m) for fqn, m in model.named_modules() if hasattr(m, "recipe")}
    convs = dict.fromkeys(("stem", "down", "depth", "wide"), Conv2d)
    assert kinds == {**convs, "head": Linear}
    assert all(m.name == fqn for fqn, m in model.named_modules() if fqn in kinds)
    x = batch(0)
    assert sqnr(plain(x), model(x)) > 18
    last = model.to(memory_format=torch.channels_last)
    y = last(x.contiguous(memory_format=torch.channels_last))
    assert sqnr(plain(x), y) > 18


@for_each("recipe", NAMES)
def test_checkpointing_changes_no_bit(recipe: str) -> None:
    plain, again = make(recipe), make(recipe)
    want = train(plain)
    assert_same(train(again, lambda x: checkpoint(again, x, use_reentrant=False)), want)


@pytest.mark.parametrize("recipe", ["fp8", "fp8-delayed", "fp16"])
def test_compiled_equals_eager_to_the_bit(recipe: str, fresh_compiler: None) -> None:
    plain, again = make(recipe), make(recipe)
    want = train(plain)
    assert_same(train(again, torch.compile(again, backend="aot_eager", fullgraph=True)), want)


@pytest.mark.parametrize("recipe", NAMES)
def test_reused_weights_change_no_bit(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models = make(recipe), make(recipe)
    casts: list[str] = []
    cast = operands.cast
    monkeypatch.setattr(
        operands, "cast", lambda x, role, *a, **k: (casts.append(role), cast(x, role, *a, **k))[1]
    )
    for model, reuse in zip(models, (False, True), strict=True):
        model.get_submodule("wide").weight.requires_grad_(False)
        casts.clear()
        with mixprec.reuse_weights(model) if reuse else torch.enable_grad():
            for i in range(3):
                model(batch(i)).square().mean().backward()
        if Recipe.parse(recipe).is_fp8:
            assert casts.count("w") == (5 if reuse else 15)
        assert model.get_submodule("wide")._quantized_weight is None
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)
    with mixprec.reuse_weights(models[1]):
        if models[1].get_submodule("stem")._quantized_weight is not None:
            with torch.no_grad():
                models[1].get_submodule("stem").weight.mul_(2)
            with pytest.raises(RuntimeError, match="weight of stem was changed inside the block"):
                models[1](batch(0))


@for_each("recipe", NAMES)
def test_functional_call_and_empty_batches(recipe: str) -> None:
    model = make(recipe)
    params = {name: p.detach() * 2 for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    got = torch.func.functional_call(model, (params, buffers), (batch(0),))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    assert torch.equal(got, model(batch(0)))
    nothing = model.get_submodule("stem")(torch.zeros(0, 3, 9, 9))
    nothing.sum().backward()
    assert nothing.shape == (0, 8, 9, 9)
    assert model.get_submodule("stem").weight.grad.abs().sum() == 0


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(x).float(), y)


def test_compare_runs_a_cnn() -> None:
    data = [(batch(i), torch.tensor([i % 5, (i + 1) % 5])) for i in range(4)]
    report = mixprec.compare(Classifier, data, recipes=("fp32", "bf16", "fp16", "fp8"), lr=1e-3)
    for recipe in ("fp32", "bf16", "fp16", "fp8"):
        run = report[recipe]
        assert (run.status, run.steps) == ("complete", 4)
        assert abs(run.losses[0] - report["fp32"].losses[0]) < 0.03
    counted = {layer for layer, _, _ in report["fp8"].gemms}
    assert counted == {f"net.{n}" for n in ("stem", "down", "depth", "wide", "head")}
    assert report["fp8"].gemms["net.wide", "grad_weight", "e5m2 x e4m3"] == 4
    assert not any(kind == "grad_input" for n, kind, _ in report["fp8"].gemms if n == "net.stem")


@for_each("dtype", [torch.bfloat16, torch.float16])
@for_each("recipe", NAMES)
def test_a_model_cast_as_a_whole(recipe: str, dtype: torch.dtype) -> None:
    model = make(recipe)
    wide = model(batch(0)).detach()
    update_scales(model)
    model.to(dtype)
    y = model(batch(0).to(dtype))
    assert y.dtype == dtype
    y.float().square().mean().backward()
    assert {p.grad.dtype for p in model.parameters()} == {dtype}
    assert sqnr(wide, y.detach().float()) > 20


@for_each("recipe", NAMES)
def test_made_on_the_meta_device(recipe: str) -> None:
    with torch.device("meta"):
        model = convert(Net(), recipe)
    model.to_empty(device="cpu")
    source = make(recipe)
    model.load_state_dict(source.state_dict())
    assert_same(train(model), train(source))
