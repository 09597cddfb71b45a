"""Layers of a model that transformers has split over ranks (`tp_plan`).

It gives each of them a forward pass that calls the one of its class between collectives. Of what
the class is made later this would know nothing, and without grad mode it passes the parts of a
weight as plain tensors, whose scales would be those of one rank.
"""

from __future__ import annotations

import inspect
import sys
from types import FunctionType
from typing import Any

import torch
from torch import nn

from .._context import replaced
from ..functional._tensor_parallel import is_sharded, over_of_experts
from . import kinds
from ._content import content_of
from ._layer import Layer
from ._replaced import Replaced, replaced_of
from .experts import Experts
from .linear import Linear

_PACKAGE = "transformers.distributed.tensor_parallel"
# The content of the forward pass that TensorParallelLayer.install_forward gives to a module.
_FORWARD = "a03b15d1ed30d9d6"


class Parallel(Replaced):
    """That forward pass, around the one that the module's class has now.

    style: the TensorParallelLayer of transformers; mesh: of the ranks.
    """

    def __init__(self, module: nn.Module, style: Any, mesh: Any) -> None:
        super().__init__(module)
        self.style, self.mesh = style, mesh

    def run(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.style.transform_inputs_pre_forward(self.module, args, kwargs, self.mesh)
        with self.style.context_around_forward(self.module, self.mesh):
            y = self.original(*args, **kwargs)
        return self.style.transform_output_post_forward(self.module, y, self.mesh)


class ParallelLinear(Parallel):
    """Of ColwiseParallel and RowwiseParallel: y of DTensors, with and without grad mode."""

    def run(self, x: Any) -> Any:
        from torch.distributed.tensor import DTensor

        style, mesh, layer = self.style, self.mesh, self.module
        assert isinstance(layer, nn.Linear), "take_parallel"
        if not isinstance(x, DTensor):
            # Of a part of x, all of it may not divide by the ranks.
            shape = x.shape
            if style.input_layouts.is_shard():
                shape = torch.Size((*shape[:-1], layer.in_features))
            stride = torch.empty(shape, device="meta").stride()
            x = DTensor.from_local(
                x, mesh, [style.input_layouts], run_check=False, shape=shape, stride=stride
            )
        y = self.original(x).redistribute(placements=[style.output_layouts])
        return y.to_local() if style.use_local_output else y


class ParallelExperts(Parallel):
    """Of MoeExpertsParallel: the products are of plain tensors, the parts of the experts."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        named = self.module.named_parameters(recurse=False)
        weights = {name: p for name, p in named if p.dim() == 3 and is_sharded(p)}
        is_transposed = getattr(self.module, "is_transposed", False)
        over = {name: over_of_experts(p, is_transposed) for name, p in weights.items()}
        with replaced("over", over):
            return super().run(*args, **kwargs)


def parallel_of(module: nn.Module) -> Parallel | None:
    """The forward pass that `take_parallel` has made."""
    replaced = replaced_of(module)
    return replaced if isinstance(replaced, Parallel) else None


def take_parallel(module: nn.Module, name: str) -> Parallel | None:
    """Remove the forward pass that transformers has given to `module`, and return what is to
    `replace` it when the module is a layer; None for any other module. ValueError for a style that
    leaves a layer parts of which it does not know the place."""
    forward = vars(module).get("forward")
    if not isinstance(forward, FunctionType) or content_of(forward).digest != _FORWARD:
        return None
    variables = inspect.getclosurevars(forward).nonlocals
    style, mesh = variables["self"], variables["mesh"]
    if variables["module"] is not module:
        return None
    package: Any = sys.modules[_PACKAGE]
    kind: Any = type(module) if isinstance(module, Layer) else kinds.layer_for(module)
    known: dict[Any, type[Parallel]] = {}
    if issubclass(kind, Linear):
        known = dict.fromkeys((package.ColwiseParallel, package.RowwiseParallel), ParallelLinear)
        known[package.MlaKvAProjParallel] = Parallel
    elif issubclass(kind, Experts):
        known[package.MoeExpertsParallel] = ParallelExperts
    if type(style) not in known:
        raise ValueError(
            f"convert: {name or 'the model'} must be split over ranks by a style of transformers "
            f"that {kind.__name__} knows ({', '.join(k.__name__ for k in known) or 'none'}), got "
            f"{type(style).__name__}: leave it out by overrides"
        )
    del vars(module)["forward"]
    return known[type(style)](module, style, mesh)


def give_back(module: nn.Module) -> None:
    """Undo `take_parallel`, when the module has its own class again."""
    if (parallel := parallel_of(module)) is not None:
        del vars(module)["forward"]
        parallel.style.install_forward(module, parallel.mesh)
