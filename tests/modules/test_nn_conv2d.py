"""mixprec.nn.Conv2d: an nn.Conv2d in everything but the arithmetic, and together with the rest."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import WIDE, for_each, normal, pairwise
from independent import assert_same_lists as assert_same
from torch import nn
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec import functional
from mixprec.functional import operands
from mixprec.functional.operands import Delayed
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


# --- the module --------------------------------------------------------------------------------


@for_each("recipe", NAMES)
def test_computes_functional_conv2d(recipe: str) -> None:
    for dtype in WIDE:
        layer = Conv2d(4, 6, 3, 2, 1, 2, 2, dtype=dtype, recipe=recipe)
        assert isinstance(layer, nn.Conv2d)
        for x_dtype in WIDE:
            x, state = normal((2, 4, 9, 7), x_dtype), None
            y = layer(x)
            if layer.recipe.is_delayed:
                state = Delayed(torch.zeros(2), torch.zeros(()), torch.zeros(()))
            want = functional.conv2d(
                x, layer.weight, layer.bias, 2, 1, 2, 2, recipe=recipe, delayed=state
            )
            assert y.dtype == x_dtype
            assert torch.equal(y, want)
        layer(x).sum().backward()
        assert layer.weight.grad.dtype == layer.bias.grad.dtype == dtype


MODES, PADDINGS = ["zeros", "reflect", "replicate", "circular"], [2, (1, 2), "same", "valid"]


@for_each("mode, padding, recipe", pairwise(MODES, PADDINGS, ["fp8", "fp8-delayed", "fp16"]))
def test_padding_as_torch_does(recipe: str, padding: int | str, mode: str) -> None:
    for kernel in (1, 3):
        ours = Conv2d(4, 6, kernel, 1, padding, padding_mode=mode, recipe=recipe)
        theirs = nn.Conv2d(4, 6, kernel, 1, padding, padding_mode=mode)
        theirs.load_state_dict(plain_state_dict(ours))
        for x in (normal((2, 4, 6, 5), torch.float32), normal((4, 6, 5), torch.float32)):
            with mixprec.reuse_weights(ours):
                y = ours(x)
            assert torch.equal(y, ours(x))
            assert y.shape == theirs(x).shape
            assert sqnr(theirs(x), y) > 18


def test_under_autocast_the_output_has_the_autocast_dtype() -> None:
    for kernel in (1, 3):
        layer = Conv2d(4, 6, kernel)
        x = normal((2, 4, 5, 5), torch.float32).requires_grad_()
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                y = layer(x)
            assert y.dtype == dtype
            y.sum().backward()
            assert x.grad.dtype == layer.weight.grad.dtype == torch.float32
        assert layer(x).dtype == torch.float32


def test_repr_says_everything() -> None:
    tensors = "x e4m3/tensor, w e4m3/tensor, g e5m2/tensor"
    assert repr(Conv2d(3, 8, 3, padding="same")) == (
        f"Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1), padding=same, fp8: {tensors})"
    )
    assert repr(Conv2d(4, 8, 1, groups=2, bias=False, recipe="bf16")) == (
        "Conv2d(4, 8, kernel_size=(1, 1), stride=(1, 1), groups=2, bias=False, bf16)"
    )


def test_state_dict_and_initialisation_are_those_of_nn_conv2d() -> None:
    torch.manual_seed(1)
    plain = nn.Conv2d(4, 8, 3)
    torch.manual_seed(1)
    ours = Conv2d(4, 8, 3)
    assert torch.equal(ours.weight, plain.weight)
    assert list(ours.state_dict()) == list(plain.state_dict()) == ["weight", "bias"]
    delayed = Conv2d(4, 8, 3, recipe="fp8-delayed")
    assert list(delayed.state_dict()) == ["weight", "bias", "amax_history", "scale"]
    delayed.load_state_dict(plain.state_dict())
    assert torch.equal(delayed.weight, plain.weight)
    plain.load_state_dict(plain_state_dict(delayed))
    delayed.scale.fill_(2.0)
    delayed.reset_parameters()
    assert delayed.scale.tolist() == [0.0, 0.0]


@for_each("recipe", ["bf16", "fp8-delayed"])
def test_copies_and_pickles(recipe: str) -> None:
    layer = Conv2d(4, 8, 3, padding=1, recipe=recipe, name="stem")
    x = normal((1, 4, 5, 5), torch.float32)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert type(other) is Conv2d
        assert (other.recipe, other.name) == (layer.recipe, "stem")
        assert other.weight is not layer.weight
        assert torch.equal(other(x), layer(x))
    assert (Linear.__module__, Conv2d.__module__) == ("mixprec.nn", "mixprec.nn")


def test_from_conv_shares_parameters_hooks_and_attributes() -> None:
    conv = nn.Conv2d(4, 8, 3, dilation=2).eval()
    conv.tag = "mine"
    calls: list[str] = []
    handle = conv.register_forward_hook(lambda *_: calls.append("forward"))
    layer = Conv2d.from_conv(conv, "fp16", name="stem")
    assert type(layer) is Conv2d
    assert layer.weight is conv.weight
    assert (layer.training, layer.dilation, layer.tag) == (False, (2, 2), "mine")
    assert (layer.name, layer.recipe) == ("stem", Recipe.parse("fp16"))
    layer(torch.zeros(1, 4, 5, 5))
    handle.remove()
    layer(torch.zeros(1, 4, 5, 5))
    assert calls == ["forward"]
    with pytest.raises(TypeError, match=r"from_conv: conv must be a torch.nn.Conv2d, got Linear"):
        Conv2d.from_conv(nn.Linear(1, 1))
    conv.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"plain torch.nn.Conv2d, but stem has its own forward"):
        Conv2d.from_conv(conv, name="stem")


def test_on_the_meta_device() -> None:
    for kernel in (1, 3):
        layer = Conv2d(4, 8, kernel, stride=2, device="meta", recipe="fp8-delayed")
        y = layer(torch.empty(2, 4, 7, 7, device="meta", dtype=torch.bfloat16))
        want = nn.Conv2d(4, 8, kernel, stride=2, device="meta")(
            torch.empty(2, 4, 7, 7, device="meta")
        )
        assert (y.shape, y.dtype, y.device.type) == (want.shape, torch.bfloat16, "meta")
        y.sum().backward()
        assert layer.weight.grad.shape == (8, 4, kernel, kernel)


def test_inside_a_region_with_another_recipe() -> None:
    layer, x = Conv2d(4, 6, 3, recipe="fp8-delayed"), normal((2, 4, 5, 5), torch.float32)
    with mixprec.autocast("bf16"):
        y = layer(x)
    want = functional.conv2d(x, layer.weight, layer.bias, recipe="bf16")
    assert torch.equal(y, want)
    with mixprec.autocast(enabled=False):
        assert torch.equal(layer(x), F.conv2d(x, layer.weight, layer.bias))
    assert layer.amax == -1.0, "its own scales have not been used"
    with mixprec.autocast():
        layer(x)
    assert layer.amax > 0
    with mixprec.reuse_weights(layer), mixprec.autocast("bf16"):
        assert torch.equal(layer(x), want)


@for_each("kernel", [1, 3])
@for_each("recipe", NAMES)
def test_the_output_may_be_written_to(recipe: str, kernel: int) -> None:
    for x in (
        normal((2, 4, 5, 5), torch.float32),
        normal((2, 4, 5, 5), torch.float32).contiguous(memory_format=torch.channels_last),
        normal((4, 5, 5), torch.float32),
    ):
        results = []
        for inplace in (False, True):
            torch.manual_seed(0)
            layer = Conv2d(4, 6, kernel, recipe=recipe)
            y = F.relu(layer(x), inplace=inplace)
            y.sum().backward()
            results.append([y.detach(), layer.weight.grad])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_delayed_scales_of_a_convolution() -> None:
    """The scale of a step comes from the amax of the steps before; the weight's from its own."""
    for kernel in (1, 3):
        layer = Conv2d(4, 6, kernel, bias=False, recipe="fp8-delayed")
        x = normal((2, 4, 5, 5), torch.float32)
        for factor in (1.0, 4.0):
            y = layer(x * factor)
            y.backward(torch.full_like(y, factor))
        assert layer.amax == 4 * x.abs().max()
        assert layer.grad_amax == 4.0
        update_scales(layer)
        fits = 2.0 ** torch.floor(torch.log2(448 / (4 * x.abs().max())))
        assert layer.scale.tolist() == [fits, 57344 / 4 // 8192 * 8192]
        with torch.no_grad():
            layer(x * 100)
        assert layer.amax == -1.0, "a pass without grad mode records nothing"
        layer(x * torch.inf)
        update_scales(layer)
        assert layer.scale[0] == fits


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


@pytest.mark.parametrize("recipe", NAMES)
def test_trains_like_fp32(recipe: str) -> None:
    """Bars at one of two places: as good as in FP32, within 3 % of the loss at the start."""
    generator = torch.Generator().manual_seed(0)
    x = 0.3 * torch.randn(64, 1, 8, 8, generator=generator)
    target = (torch.arange(64) % 4).float()
    for i in range(64):
        x[i, 0, :, i % 4 * 2] += 1.0

    def run(recipe: str | None) -> tuple[float, float]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 8, 1),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(72, 1),
        )
        model = model if recipe is None else convert(model, recipe)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x).flatten(), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses[0], losses[-1]

    start, want = run(None)
    _, got = run(recipe)
    assert want < 0.05 * start
    assert got < want + 0.03 * start, (got, want, start)


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


@for_each("padding_mode", ["zeros", "reflect"])
def test_what_is_no_tensor_is_named(padding_mode: str) -> None:
    layer = Conv2d(3, 4, 3, padding=1, padding_mode=padding_mode)
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor, got list"):
        layer([1.0])
