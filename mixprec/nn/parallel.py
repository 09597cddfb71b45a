"""PrepareFP8Input: sequence parallelism that gathers the input of FP8 layers as codes of 8 bits."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from ..functional._gathered import Gathered
from ..functional.operands import Matrix, largest_of_all
from ..ops._dispatch.casts import Cast
from ..ops.quantize import quantize_op
from ..ops.scale import amax_op, new_scales
from ..recipes import Recipe
from ._layer import Layer

__all__ = ["PrepareFP8Input"]


class _Gather(torch.autograd.Function):
    """x, sharded on a mesh of one dimension, replicated: codes of 8 bits. Its gradient is reduced
    to the shards in its own dtype."""

    @staticmethod
    def forward(ctx: Any, x: Any, recipe: Recipe) -> Any:
        mesh, shape = x.device_mesh, x.shape
        ctx.placements, part = x.placements, x.to_local()
        amax = largest_of_all(amax_op(part), [(mesh, 0)])
        scale, scale_inv = new_scales(amax, recipe.x.dtype, recipe.power_of_two_scale)[:2]
        cast = Cast(recipe.x.dtype, scale, False, "tensor", recipe.power_of_two_scale)
        codes = quantize_op(part, *cast)[0]
        parts = DTensor.from_local(
            codes.view(torch.uint8), mesh, x.placements, run_check=False, shape=shape,
            stride=x.stride(),
        )  # fmt: skip
        codes = parts.redistribute(placements=[Replicate()]).to_local()
        matrix = Matrix(codes.reshape(-1, shape[-1]).view(recipe.x.dtype), scale_inv)
        whole = Gathered.make(matrix, recipe, "x", shape, x.dtype)
        return DTensor.from_local(
            whole, mesh, [Replicate()], run_check=False, shape=shape, stride=whole.stride()
        )

    @staticmethod
    def backward(ctx: Any, g: Any) -> tuple[Any, None]:
        return g.redistribute(placements=ctx.placements), None


class PrepareFP8Input(ParallelStyle):
    """Of `parallelize_module`: the input of a module is gathered over the ranks as FP8 codes.

        from mixprec.nn.parallel import PrepareFP8Input

        plan = {"norm": SequenceParallel(), "mlp": PrepareFP8Input(), "mlp.up": ColwiseParallel(),
                "mlp.down": RowwiseParallel(output_layouts=Shard(1))}

    In place of PrepareModuleInput(input_layouts=layout, desired_input_layouts=Replicate()), to the
    last bit: each rank casts its part of x with the scale of all of x (one all-reduce of a number),
    and half as many bytes are gathered as of 16 bits. The layers of the module that are split by
    columns multiply the codes; gradients are reduced in their own dtype, as without.

    layout: how x is split, Shard(1) for x [B, T, K]. argument: the name of the argument that x is,
    None for the first.

    x is gathered as it is where these layers do not all cast it once with one and the same scale:
    in recipes other than "fp8", with delayed scales (whose states may differ), and inside
    torch.compile. Code of the module that reads x other than by these layers gets a RuntimeError.
    """

    def __init__(self, layout: Placement | None = None, argument: str | None = None) -> None:
        self.layout, self.argument = layout or Shard(1), argument
        if not self.layout.is_shard():
            raise ValueError(f"PrepareFP8Input: layout must be a Shard, got {self.layout}")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        its = weakref.ref(module)

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self.argument not in kwargs if self.argument else not args:
                raise TypeError(
                    f"PrepareFP8Input: argument must name what x is passed as, got "
                    f"{self.argument!r} and a call with {len(args)} arguments and {[*kwargs]}"
                )
            if self.argument is None:
                return (self._gathered(args[0], its(), device_mesh), *args[1:]), kwargs
            x = self._gathered(kwargs[self.argument], its(), device_mesh)
            return args, {**kwargs, self.argument: x}

        module.register_forward_pre_hook(hook, with_kwargs=True)
        return module

    def _gathered(self, x: torch.Tensor, module: Any, mesh: DeviceMesh) -> Any:
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [self.layout], run_check=False)
        recipe = None if torch.compiler.is_compiling() else _recipe_of(module)
        if recipe is None or x.placements != (self.layout,) or x.dim() < 2:
            return x.redistribute(placements=[Replicate()])
        return _Gather.apply(x, recipe)


def _recipe_of(module: nn.Module) -> Recipe | None:
    """Of the layers split by columns, if all cast x once, to FP8 with one scale of its own."""
    layers = [m for m in module.modules() if isinstance(m, Layer)]
    recipes = [
        m.recipe
        for m in layers
        if isinstance(m.weight, DTensor) and m.weight.placements[-1].is_shard(0)
    ]
    for recipe in recipes:
        first, second = recipe.casts("x")
        once = first == second and first.x.bits == 8 and first.x_granularity == "tensor"
        if not once or first.is_delayed or recipe.has_outliers or first.is_block:
            return None
        if first.casts("x") != recipes[0].casts("x"):
            return None
    return recipes[0] if recipes else None
