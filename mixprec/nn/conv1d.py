"""Conv1D: the linear layer of GPT-2 in transformers, whose weight is stored as [K, N]."""

from __future__ import annotations

import torch

from ..functional._linear import check_input, run_linear
from ..functional.operands import Operand
from . import _region
from ._layer import Layer
from .linear import cast_weight, product_of


class Conv1D(Layer):
    """y = x @ weight + bias with weight [K, N], cast as that of `Linear` is.

    Only `mixprec.convert` makes it, from a transformers.pytorch_utils.Conv1D, of which it stays an
    instance: parameters and state_dict keys are the same.
    """

    __module__ = "mixprec.nn"
    _is_transposed = _takes_outliers = True
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        recipe = _region.recipe_here(self._recipe)
        if recipe is None:
            self._watch_main_grads()
            y: torch.Tensor = super().forward(x)
            return y
        check_input(x, self.weight.t(), name=self._path)
        product, weight, out_dtype, clipped = product_of(self, self.weight, x.dtype, recipe)
        return run_linear(x, weight, self.bias, product, recipe, out_dtype, clipped)

    def _cast_weight(self) -> Operand:
        return cast_weight(self, self.weight.t())

    __repr__ = torch.nn.Module.__repr__

    def extra_repr(self) -> str:
        k, n = self.weight.shape
        return f"in={k}, out={n}, {self.recipe}"
