"""A linear layer whose weight is a DTensor: its products on the parts of this rank.

Of each dimension of the weight's mesh, weight [N, K] is
    Shard(0): x is replicated, y sharded in its last dimension (ColwiseParallel);
    Shard(1): x is sharded in its last dimension, y a partial sum (RowwiseParallel);
    Replicate: x and y are sharded alike, in a batch or sequence dimension, or not at all.
Scales that the recipe has for a whole tensor are those of the parts of all ranks together, but for
that of NVFP4 beside its blocks'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._local_gradients import PLAIN, local
from ..recipes import Recipe
from ._products import Over, Product
from .operands import Delayed

_PACKAGE: Any = torch.distributed
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, Product], torch.Tensor]


class _OnFirst(torch.autograd.Function):
    """A bias that is added once to what is summed over ranks, of which each has its gradient."""

    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor, is_first: bool) -> torch.Tensor:
        return bias.clone() if is_first else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        return g, None


def is_sharded(weight: torch.Tensor) -> bool:
    """Whether it is a DTensor. (While it is traced, the type of each parameter is Parameter.)"""
    if type(weight) in PLAIN and not torch.compiler.is_compiling():
        return False
    module = getattr(_PACKAGE, "tensor", None)
    return module is not None and isinstance(weight, module.DTensor)


def refuse_parts(op: str, *tensors: torch.Tensor | None) -> None:
    """TypeError where one is a DTensor, from an op that knows of no other ranks."""
    if any(t is not None and is_sharded(t) for t in tensors):
        raise TypeError(
            f"{op}: x and weight must be plain tensors, got a DTensor: of the layers here only "
            "linear ones compute with parts of a weight; leave this one out of the plan"
        )


def over_of_experts(weight: Any, is_transposed: bool) -> Over:
    """Of the parts of weight [E, N, K], or [E, K, N], which is split in one of N and K, or both
    halves of N alike (a gate and what it multiplies), while x is replicated."""
    over = Over([], [], [])
    for dim, place in enumerate(weight.placements):
        at = getattr(place, "dim", None)
        if at is None or (at := at % 3) == 0:
            continue
        over.w.append((weight.device_mesh, dim))
        over[0 if (at == 2) != is_transposed else 2].append((weight.device_mesh, dim))
    return over


def linear(
    x: Any, weight: Any, bias: Any, product: Product, recipe: Recipe, run: Run
) -> torch.Tensor:
    """run(x, weight, bias, product) of the local parts, as a DTensor, y [..., N] of x [..., K] and
    weight [N, K]. TypeError for a plain x, whose place in the whole is not known, ValueError for a
    recipe that is not one of parts."""
    if recipe.has_outliers or recipe.clip_activations:
        raise ValueError(
            "linear: recipe must have neither outliers nor clip_activations, which are those of "
            f"all of K and of whole sums, where weight is a DTensor, got {recipe.name}"
        )
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh, last = weight.device_mesh, x.dim() - 1
    if not isinstance(x, DTensor) or x.device_mesh != mesh:
        got = f"on {x.device_mesh}" if isinstance(x, DTensor) else "a plain tensor"
        raise TypeError(
            f"linear: x must be a DTensor on the mesh of weight, {mesh}, as parallelize_module "
            f"brings it, got {got}"
        )
    places: list[tuple[Any, ...]] = []  # of x, y, and the gradients of x, weight and bias
    over, is_first = Over([], [], []), True
    for dim, (of_w, of_x) in enumerate(zip(weight.placements, x.placements, strict=True)):
        if of_w.is_shard(0):
            places.append((Replicate(), Shard(last), Partial(), of_w, Shard(0)))
            over.w.append((mesh, dim))
            over.g.append((mesh, dim))
        elif of_w.is_shard(1):
            places.append((Shard(last), Partial(), Shard(last), of_w, Replicate()))
            over.x.append((mesh, dim))
            over.w.append((mesh, dim))
            is_first = is_first and mesh.get_local_rank(dim) == 0
        elif of_x.is_shard() and not of_x.is_shard(last):
            places.append((of_x, of_x, of_x, Partial(), Partial()))
            over.x.append((mesh, dim))
            over.g.append((mesh, dim))
        else:
            places.append((Replicate(),) * 5)
    x_at, y_at, grad_x_at, grad_w_at, grad_bias_at = zip(*places, strict=True)
    shape = *x.shape[:-1], weight.shape[0]
    x = x.redistribute(mesh, x_at).to_local(grad_placements=grad_x_at)
    if bias is not None:
        bias_at = [Replicate() if place.is_partial() else place for place in grad_bias_at]
        bias = bias.redistribute(mesh, bias_at).to_local(grad_placements=grad_bias_at)
        if any(place.is_partial() for place in y_at):
            bias = _OnFirst.apply(bias, is_first)
    weight = weight.to_local(grad_placements=grad_w_at)
    delayed = product.delayed  # of buffers that parallelize_module has replicated
    delayed = None if delayed is None else Delayed(*map(local, delayed))
    y = run(x, weight, bias, product._replace(main_grad=None, delayed=delayed, over=over))
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        y, mesh, y_at, run_check=False, shape=torch.Size(shape), stride=strides
    )
