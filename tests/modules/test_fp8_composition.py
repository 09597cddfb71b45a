"""Models of our layers together with everything else: compile, checkpointing, reuse, copies, ..."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import for_each, nearest, normal, pairwise
from independent import assert_same_lists as assert_same
from test_convert import Block
from torch import nn
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec.functional import operands
from mixprec.nn import Conv2d, Linear
from mixprec.nn.convert import cast_parameters, convert
from mixprec.nn.reuse_weights import reuse_weights
from mixprec.recipes import RECIPES, Recipe
from mixprec.scaling import plain_state_dict, update_scales
from mixprec.testing import sqnr

NAMES = tuple(RECIPES)
WIDTH = 160  # more than one block of 128
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


KINDS = ("mlp", "cnn")
EVERY = pairwise(NAMES, KINDS)


def plain_model(kind: str) -> nn.Sequential:
    return nn.Sequential(Block(WIDTH), Block(WIDTH)) if kind == "mlp" else nn.Sequential(Net())


def make(recipe: str | Recipe, kind: str = "mlp") -> nn.Sequential:
    torch.manual_seed(0)
    return convert(plain_model(kind), recipe)


def batch(seed: int, kind: str = "mlp") -> torch.Tensor:
    return normal((3, 5, WIDTH) if kind == "mlp" else (2, 3, 9, 9), torch.float32, seed=seed)


def train(
    model: nn.Module,
    forward: Callable[[torch.Tensor], torch.Tensor] | None = None,
    steps: int = 3,
    micro_batches: int = 1,
    around: Callable[[nn.Module], object] = lambda model: contextlib.nullcontext(),
) -> list[torch.Tensor]:
    """All that training leaves behind: each loss, then every parameter and buffer. Two runs take
    the same random numbers."""
    torch.manual_seed(0)
    forward = forward or model
    optimizer = mixprec.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    kind = "cnn" if isinstance(model[0], Net) else "mlp"
    left: list[torch.Tensor] = []
    for step in range(steps):
        optimizer.zero_grad()
        with around(model):
            for i in range(micro_batches):
                loss = forward(batch(10 * step + i, kind)).square().mean()
                loss.backward()
                left.append(loss.detach())
        optimizer.step()
    return [*left, *(p.detach() for p in model.parameters()), *model.buffers()]


# --- recompute, accumulation, compile ----------------------------------------------------------


def checkpointed(model: nn.Sequential, use_reentrant: bool) -> Callable:
    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_() if use_reentrant else x
        for block in model:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        return x

    return forward


@for_each("use_reentrant", [False, True])
@for_each("recipe, kind", EVERY)
def test_checkpointing_changes_no_bit(recipe: str, kind: str, use_reentrant: bool) -> None:
    plain, again = make(recipe, kind), make(recipe, kind)
    want = train(plain, micro_batches=2)
    got = train(again, checkpointed(again, use_reentrant), micro_batches=2)
    assert_same(got, want)


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        *pairwise(["fp8", "fp8-delayed", "fp8-rowwise", "fp8-block"], ["mlp"]),
        *pairwise(["fp8", "fp8-delayed", "fp16"], ["cnn"]),
    ],
)
def test_compiled_equals_eager_to_the_bit(recipe: str, kind: str, fresh_compiler: None) -> None:
    """fullgraph; with accumulation, and the scales of delayed scaling across steps."""
    plain, again = make(recipe, kind), make(recipe, kind)
    want = train(plain, micro_batches=2)
    got = train(again, torch.compile(again, backend="aot_eager", fullgraph=True), micro_batches=2)
    assert_same(got, want)


@pytest.mark.parametrize("where", ["x", "g"])
def test_a_skipped_step_among_compiled_ones(where: str, fresh_compiler: None) -> None:
    """Delayed scales, checkpointing, three micro-batches: one of the third step overflows."""
    plain, again = make("fp8-delayed"), make("fp8-delayed")
    compiled = torch.compile(checkpointed(again, False), backend="aot_eager", fullgraph=True)
    left: list[list[torch.Tensor]] = []
    for model, forward in ((plain, plain), (again, compiled)):
        optimizer = mixprec.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = mixprec.GradScaler(init_scale=2.0**8, growth_interval=100)
        left.append([])
        for step in range(5):
            for i in range(3):
                bad = step == 2 and i == 1
                x = batch(10 * step + i)
                if bad and where == "x":
                    x[0, 0, 0] = torch.inf
                loss = forward(x).square().mean()
                scaler.scale(loss * (1e38 if bad and where == "g" else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            left[-1] += [t.clone() for t in model.state_dict().values()]
        assert int(scaler.skipped) == 1
    assert_same(*left)
    assert all(t.isfinite().all() for t in left[0])


def test_two_compiled_passes_before_their_backwards(fresh_compiler: None) -> None:
    models = make("fp8-delayed"), make("fp8-delayed")
    compiled = torch.compile(models[1], backend="aot_eager", fullgraph=True)
    for model, forward in zip(models, (models[0], compiled), strict=True):
        for sizes in ((3, 2, 1), (4, 5, 6)):  # the largest in the first, and in the last pass
            sum(forward(batch(i) * sizes[i]).square().mean() for i in range(3)).backward()
        update_scales(model)
    for plain, again in zip(models[0].buffers(), models[1].buffers(), strict=True):
        assert torch.equal(plain, again)
    assert (models[0][0].up.scale > 0).all()


# --- reuse_weights -----------------------------------------------------------------------------


def casts_of_weights(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    seen: list[tuple[int, ...]] = []
    cast = operands.cast

    def spy(x: torch.Tensor, role: str, *args: object, **kwargs: object) -> object:
        if role == "w":
            seen.append(tuple(x.shape))
        return cast(x, role, *args, **kwargs)

    monkeypatch.setattr(operands, "cast", spy)
    return seen


@pytest.mark.parametrize(("recipe", "kind"), EVERY)
def test_reused_weights_change_no_bit(
    recipe: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = make(recipe, kind), make(recipe, kind)
    if kind == "cnn":
        for model in models:
            model[0].wide.weight.requires_grad_(False)
    want = train(models[0], micro_batches=3)
    seen = casts_of_weights(monkeypatch)
    assert_same(train(models[1], micro_batches=3, around=reuse_weights), want)
    if kind == "mlp":
        assert len(seen) == 3 * 4, "steps times layers"
    elif RECIPES[recipe].is_scaled:
        assert len(seen) == 3 * 5
        assert models[1][0].wide._quantized_weight is None


@pytest.mark.parametrize("recipe", ["fp8", "fp8-delayed", "fp8-rowwise"])
def test_compiled_checkpointed_accumulated_and_reused(recipe: str, fresh_compiler: None) -> None:
    want = train(make(recipe), micro_batches=3)
    again = make(recipe)
    forward = torch.compile(checkpointed(again, False), backend="aot_eager", fullgraph=True)
    assert_same(train(again, forward, micro_batches=3, around=reuse_weights), want)


def test_cast_weights_are_freed_when_the_block_ends() -> None:
    model = make("fp8")
    with contextlib.suppress(KeyError), reuse_weights(model):
        data = weakref.ref(model[0].up._quantized_weight.operand.data)
        with reuse_weights(model):  # the outermost counts
            pass
        assert data() is not None
        raise KeyError
    gc.collect()
    assert data() is None
    assert model[0].up._quantized_weight is None


def test_without_grad_mode_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("fp8")
    seen = casts_of_weights(monkeypatch)
    with torch.no_grad(), reuse_weights(model):
        model(batch(0))
        model(batch(1))
    assert len(seen) == 8
    with reuse_weights(model), torch.no_grad():  # and what is kept may be read without
        model(batch(0))
    assert len(seen) == 12


def test_a_weight_that_changes_inside_the_block_is_noticed() -> None:
    for kind, first in (("mlp", "up"), ("cnn", "stem")):
        model = make("fp8", kind)
        optimizer = mixprec.optim.AdamW(model.parameters())
        with reuse_weights(model):
            model(batch(0, kind)).sum().backward()
            optimizer.step()
            with pytest.raises(RuntimeError, match=rf"weight of 0\.{first} was changed inside the"):
                model(batch(0, kind))
        model(batch(0, kind))
    with pytest.raises(TypeError, match=r"reuse_weights: model must be a torch.nn.Module"):
        reuse_weights([model]).__enter__()


def test_another_weight_that_stands_in_is_cast_itself() -> None:
    layer = Linear(8, 8, bias=False)
    other = {"weight": torch.ones(8, 8)}
    x = torch.ones(2, 8)
    with reuse_weights(layer):
        y = torch.func.functional_call(layer, other, (x,))
    assert y.tolist() == [[8.0] * 8] * 2


# --- main_grad ---------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", NAMES)
def test_main_grad_takes_the_weight_gradients(
    recipe: str, compiled: bool, fresh_compiler: None
) -> None:
    layers = [cast_parameters(make(nearest(recipe))[0].up, torch.bfloat16) for _ in range(2)]
    plain, main = layers
    main.weight.main_grad = torch.zeros_like(main.weight, dtype=torch.float32)
    forward = torch.compile(main, backend="aot_eager", fullgraph=True) if compiled else main
    exact = torch.zeros(main.weight.shape)
    for i in range(3):
        x = batch(i).bfloat16()
        y = plain(x)
        (grad,) = torch.autograd.grad(y, plain.weight, torch.ones_like(y))
        exact += grad.float()
        forward(x).backward(torch.ones_like(y))
    assert main.weight.grad is None
    assert main.bias.grad is not None
    if RECIPES[recipe].x.bits > 4:  # sums of so few bits may be exact in bf16
        assert not torch.equal(main.weight.main_grad, main.weight.main_grad.bfloat16().float())
    assert sqnr(exact, main.weight.main_grad) > 45  # bf16's rounding of the three
    optimizer = mixprec.optim.AdamW(main.parameters())
    before = main.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, main.weight)


def test_main_grad_gives_way_to_a_gradient_that_is_there() -> None:
    """Under DDP, whose hooks need it: mixprec's own writes main_grad and leaves grad in place."""
    layer = Linear(8, 8)
    layer(torch.ones(2, 8)).sum().backward()
    layer.weight.main_grad = torch.zeros(8, 8)
    layer(torch.ones(2, 8)).sum().backward()
    assert layer.weight.main_grad.count_nonzero() == 0
    assert layer.weight.grad.flatten()[0] == 4.0


@for_each(
    "wrong, match",
    [
        (torch.zeros(8, 8).bfloat16(), "weight.main_grad must have dtype float32, got"),
        (torch.zeros(8), "weight.main_grad must have shape weight's shape"),
        ([1.0], "weight.main_grad must be a torch.Tensor, got list"),
    ],
)
def test_a_main_grad_that_does_not_fit(wrong: object, match: str) -> None:
    layer = Linear(8, 8)
    layer.weight.main_grad = wrong
    with pytest.raises((ValueError, TypeError), match=match):
        layer(torch.ones(2, 8))


# --- the rest of torch -------------------------------------------------------------------------


@for_each("recipe, kind", EVERY)
def test_functional_call(recipe: str, kind: str) -> None:
    model = make(recipe, kind)
    params = {name: p.detach() * 2 for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    got = torch.func.functional_call(model, (params, buffers), (batch(0, kind),))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    assert torch.equal(got, model(batch(0, kind)))
    used = [b for name, b in buffers.items() if name.endswith(".amax")]
    assert all((b >= 0).all() for b in used), "what was handed in was written to"


@for_each("recipe, kind", EVERY)
def test_an_exported_program_computes_the_same_and_shares_the_scales(
    recipe: str, kind: str
) -> None:
    """With gradients too: a scale that became part of a graph could not be copied any more."""
    model, x = make(recipe, kind), batch(0, kind)
    want = copy.deepcopy(model)(x)
    exported = torch.export.export(model, (x,)).module()
    assert torch.equal(exported(x), want)
    assert not any(buffer.requires_grad for buffer in model.buffers())
    copy.deepcopy(model)(x).sum().backward()


@for_each("recipe, kind", EVERY)
def test_made_on_the_meta_device(recipe: str, kind: str) -> None:
    with torch.device("meta"):
        model = convert(plain_model(kind), recipe)
    model.to_empty(device="cpu")
    source = make(recipe, kind)
    model.load_state_dict(source.state_dict())
    assert_same(train(model), train(source))


@for_each("recipe", NAMES)
def test_deepcopy_and_averaged_models(recipe: str) -> None:
    model = make(recipe)
    ema = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(2):  # the first one copies
        ema.update_parameters(model)
    want = train(copy.deepcopy(model))
    assert_same(train(model), want)
    assert_same(train(ema.module), want)


def test_resuming_with_delayed_scales_is_not_noticed() -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for i in steps:
            optimizer.zero_grad()
            model(batch(i)).square().mean().backward()
            optimizer.step()

    models = [make("fp8-delayed") for _ in range(2)]
    optimizers = [mixprec.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    run(models[0], optimizers[0], range(2))
    for source, target in (models, optimizers):
        target.load_state_dict(copy.deepcopy(source.state_dict()))
    for model, optimizer in zip(models, optimizers, strict=True):
        run(model, optimizer, range(2, 4))
    assert_same(*(list(model.state_dict().values()) for model in models))


@for_each("recipe", NAMES)
def test_tied_weights(recipe: str) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    model[2].weight = model[0].weight
    convert(model, recipe)
    assert model[2].weight is model[0].weight
    plain = copy.deepcopy(model)
    assert_same(train(model, around=reuse_weights, micro_batches=2), train(plain, micro_batches=2))


@for_each("dtype", [torch.bfloat16, torch.float16])
@for_each("recipe, kind", EVERY)
def test_a_model_cast_as_a_whole(recipe: str, kind: str, dtype: torch.dtype) -> None:
    model = make(recipe, kind)
    plain = plain_model(kind)
    plain.load_state_dict(plain_state_dict(model))
    wide = model(batch(0, kind)).detach()
    assert sqnr(plain(batch(0, kind)), wide) > 18
    update_scales(model)
    model.to(dtype)
    y = model(batch(0, kind).to(dtype))
    assert y.dtype == dtype
    y.float().square().mean().backward()
    assert {p.grad.dtype for p in model.parameters()} == {dtype}
    assert sqnr(wide, y.detach().float()) > 20
