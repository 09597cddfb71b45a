"""The three products of a layer with operands in the format of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ...functional import is_pointwise
from ...nn.conv import Convolution
from ...nn.kinds import layer_for
from ...nn.linear import Conv1D, Linear
from ...recipes import GEMMS, Recipe
from ..audit.noise import cast
from ..stats.layers import as_operand


def why_not(module: nn.Module) -> str | None:
    """Why the products of a layer that `convert` takes are not planned; None: they are."""
    kind = _kind(module)
    if issubclass(kind, (Linear, Conv1D)):
        return None
    if not issubclass(kind, Convolution):
        return "its products are not one of an input and its weight"
    pointwise = is_pointwise(module.kernel_size, module.padding, module.groups)  # type: ignore[arg-type]
    return None if pointwise and not module.transposed else "a convolution that is not 1 x 1"


def _kind(module: nn.Module) -> type[nn.Module]:
    """The layer of mixprec that a module is, or becomes."""
    if isinstance(module, (Linear, Conv1D, Convolution)):
        return type(module)
    return layer_for(module) or type(module)


@dataclass
class Matrices:
    """x [M, K], w [N, K] and g [M, N] of a call of a layer, in FP32."""

    x: torch.Tensor
    w: torch.Tensor
    g: torch.Tensor

    @staticmethod
    def of_layer(layer: nn.Module, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> Matrices:
        if issubclass(_kind(layer), Conv1D) and not isinstance(layer, Conv1D):
            w = w.t()  # of transformers, [K, N]
        parts = zip("xwg", (x, w, g), strict=True)
        found = (as_operand(layer, role, t.detach()).float() for role, t in parts)
        return Matrices(*(t.reshape(-1, t.shape[-1]) for t in found))

    @staticmethod
    def shaped(y: torch.Tensor, like: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        """An output [M, N] in the shape of the layer's."""
        if not isinstance(layer, nn.modules.conv._ConvNd):
            return y.view(like.shape)
        n, *points = like.shape[1 - layer.weight.dim() :]
        return y.view(-1, *points, n).movedim(-1, 1).reshape(like.shape)

    @property
    def flops(self) -> int:
        """Of each of the three products."""
        return 2 * self.x.shape[0] * self.x.shape[1] * self.w.shape[0]

    def product(self, name: str, recipe: Recipe | None) -> torch.Tensor:
        """y [M, N], grad_input [M, K] or grad_weight [N, K]; None: in FP32."""
        roles, (a, b_t) = _ROLES[name], self._operands(name)
        if recipe is None:
            return a @ b_t.t()
        is_rotated = recipe.hadamard and name == "grad_weight"
        a, b_t = (
            cast(recipe, role, rows, is_rotated) for role, rows in zip(roles, (a, b_t), strict=True)
        )
        return a @ b_t.t()

    def _operands(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """As rows along which is summed."""
        if name == "forward":
            return self.x, self.w
        if name == "grad_input":
            return self.g, self.w.t()
        return self.g.t(), self.x.t()


_ROLES = dict(zip(GEMMS, (("x", "w"), ("g", "w"), ("g", "x")), strict=True))
