"""linear and conv2d as tests call them, classes derived from torch's layers, what autograd saves,
and the numbers that an operand stands for once cast."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import mixprec
from mixprec import functional
from mixprec.functional.operands import Delayed
from mixprec.ops._reference.block_formats import hadamard
from mixprec.ops.delayed_scales import UNUSED
from mixprec.recipes import READ_BY, Recipe

# Elements of other formats, and two kinds of blocks in one product.
BLOCK_MIXES = (
    Recipe("mxfp6", "e3m2", "e2m3", "e3m2", *(True, "mx", "mx", "mx"), scale_mode="even"),
    Recipe("w4a8", "e4m3", "e2m1", "e5m2", *(True, "mx", "nvfp4", "mx"), scale_mode="ceil"),
)


class Own(nn.Linear):
    """A subclass without a forward pass of its own."""


class Twice(nn.Linear):
    """With a forward pass of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Adapted(nn.Module):
    """In the place of peft's, as it wraps a layer: y = base_layer(x) + B(A(x))."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(width, width)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(width, 8, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(8, width, bias=False)})


def leaf(t: torch.Tensor) -> torch.Tensor:
    return t.detach().requires_grad_()


@contextmanager
def saved_tensors() -> Iterator[list[torch.Tensor]]:
    """What is saved for backward inside."""
    found: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        found.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield found


def unused_scales() -> Delayed:
    return Delayed(torch.zeros(2), torch.tensor(UNUSED), torch.tensor(UNUSED))


def _with_state(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """With scales that have not been used yet, where the recipe wants some, and with a seed: each
    backward pass rounds stochastically in the same way."""

    def call(*args: object, recipe: str | Recipe = "fp8", **options: object) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            torch.manual_seed(0)
        if Recipe.parse(recipe).is_delayed:
            options["delayed"] = unused_scales()
        return function(*args, recipe=recipe, **options)

    return call


linear, conv2d = _with_state(functional.linear), _with_state(functional.conv2d)
convolution = _with_state(functional.convolution)

# The function, and shapes of x and weight that fit.
OPS = {
    "linear": (linear, (6, 16), (8, 16)),
    "1x1": (conv2d, (2, 4, 6, 5), (8, 4, 1, 1)),
    "3x3": (conv2d, (2, 4, 6, 5), (8, 4, 3, 3)),
}


def value(t: torch.Tensor, role: str, recipe: Recipe, *, transposed: bool = False) -> torch.Tensor:
    """The numbers that a tensor stands for once it is cast, [rows, columns] in FP64.

    transposed: as an operand of the GEMM that sums over its rows, where scales lie along these.
    """
    if transposed and recipe.backward and role != "g":
        t = value(t, role, recipe).reshape(t.shape).to(t.dtype)
    product = READ_BY[role][transposed]
    recipe = recipe.product(product)
    fmt, granularity = getattr(recipe, role), getattr(recipe, f"{role}_granularity")
    rows = t.detach().reshape(math.prod(t.shape[:-1]), t.shape[-1])
    if fmt.bits == 16:
        return rows.to(fmt.dtype).double()
    rows = rows.t() if transposed else rows
    if size := recipe.rotation(product):
        rows = hadamard(rows, size)
    options = {"power_of_two_scale": recipe.power_of_two_scale, "granularity": granularity}
    if granularity.startswith("mx"):
        options["scale_mode"] = recipe.scale_mode
    cast = mixprec.dequantize(mixprec.quantize(rows, fmt, **options)).double()
    return cast.t() if transposed else cast


# Models with parts that convert(fuse=True) knows, and their gradients


WIDTH, HIDDEN, ROWS = 48, 160, 70


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False))
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x).view(*x.shape[:2], 3, 3, 16)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(x.shape))


def feed_forward(norm: nn.Module | None = None, hidden: int = HIDDEN) -> nn.Sequential:
    norm = nn.LayerNorm(WIDTH) if norm is None else norm
    return nn.Sequential(norm, nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), feed_forward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


def model_and_batch() -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 8))
    return model, torch.randn(2, ROWS, WIDTH)


def converted(model: nn.Module, recipe: Any = "bf16") -> tuple[Any, Any]:
    """A copy of the model that is not fused, and the model, which is."""
    plain = mixprec.convert(copy.deepcopy(model), recipe)
    return plain, mixprec.convert(model, recipe, fuse=True)


def gradients(
    model: nn.Module, x: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """The output, of `run` or the model, and the gradients of its mean square: of x and of the
    parameters. Delayed scales are updated."""
    x = x.clone().requires_grad_()
    y = (run or model)(x)
    y.float().square().mean().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    mixprec.update_scales(model)
    return {"y": y.detach(), "x": x.grad, **grads}  # type: ignore[dict-item]


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
