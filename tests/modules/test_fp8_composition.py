"""Models of our layers together with everything else: compile, checkpointing, reuse, copies, ..."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import for_each, normal, pairwise
from independent import assert_same_lists as assert_same
from test_convert import Block
from torch import nn
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec.nn.reuse_weights import reuse_weights
from mixprec.recipes import RECIPES
from mixprec.scaling import update_scales

WIDTH = 160  # more than one block of 128
pytestmark = pytest.mark.filterwarnings("ignore:a model with an fp16 recipe")


class Net(nn.Module):
    """A residual block with everything in it: 3x3, 1x1, strided, depthwise, frozen; then linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 16, 1, stride=2, bias=False)
        self.depth = nn.Conv2d(16, 16, 3, padding="same", groups=16)
        self.wide = nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect")
        self.wide.weight.requires_grad_(False)
        self.norm = nn.GroupNorm(4, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(F.relu(self.stem(x), inplace=True))
        x = x + F.relu(self.wide(self.norm(self.depth(x))))
        return self.head(x.mean((2, 3)))


KINDS = ("mlp", "cnn")
# But for those whose backward products round x and w at random.
NAMED = [name for name, recipe in RECIPES.items() if not recipe.backward]
EVERY = pairwise(NAMED, KINDS)


def make(recipe: str, kind: str = "mlp") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Net()) if kind == "cnn" else nn.Sequential(Block(WIDTH), Block(WIDTH))
    return mixprec.convert(model, recipe)


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


# --- ways of training -----------------------------------------------------------------------------


def checkpointed(model: nn.Sequential, use_reentrant: bool = False) -> Callable:
    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_() if use_reentrant else x
        for block in model:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        return x

    return forward


def compiled(forward: Callable) -> Callable:
    return torch.compile(forward, backend="aot_eager", fullgraph=True)


WAYS: dict[str, Callable[[nn.Sequential], Callable]] = {
    "checkpointed": checkpointed,
    "reentrant": lambda model: checkpointed(model, use_reentrant=True),
    "all": lambda model: compiled(checkpointed(model)),
}


@pytest.mark.parametrize(
    ("way", "recipe", "kind"),
    [
        *((way, *case) for way in ("checkpointed", "reentrant") for case in EVERY),
        *(("all", r, "mlp") for r in ("fp8", "fp8-delayed", "fp8-rowwise", "fp8-block")),
        *(("all", r, "cnn") for r in ("fp8", "fp8-delayed", "fp16")),
    ],
)
def test_bits_do_not_depend_on_the_way(way: str, recipe: str, kind: str) -> None:
    """With accumulation, and the scales of delayed scaling across steps."""
    model = make(recipe, kind)
    around = {"around": reuse_weights} if way == "all" else {}
    got = train(model, WAYS[way](model), micro_batches=3, **around)
    assert_same(got, train(make(recipe, kind), micro_batches=3))


def test_two_compiled_passes_before_their_backwards() -> None:
    models = make("fp8-delayed"), make("fp8-delayed")
    for model, forward in zip(models, (models[0], compiled(models[1])), strict=True):
        for sizes in ((3, 2, 1), (4, 5, 6)):  # the largest in the first, and in the last pass
            sum(forward(batch(i) * sizes[i]).square().mean() for i in range(3)).backward()
        update_scales(model)
    assert_same(*(list(model.buffers()) for model in models))
    assert (models[0][0].up.scale > 0).all()


# --- the rest of torch -------------------------------------------------------------------------


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
