"""Linear: torch.nn.Linear with a recipe."""

from __future__ import annotations

import torch

from .._local_gradients import local
from ..functional import operands
from ..functional._arguments import main_grad_of
from ..functional._gathered import Gathered
from ..functional._linear import check_input, run_linear
from ..functional._products import Product, listeners, split
from ..functional.operands import Operand
from ..recipes import Recipe
from ._layer import Layer
from .autocast import recipe_here, without_modes


def product_of(
    layer: Layer, weight: torch.Tensor, dtype: torch.dtype, recipe: Recipe
) -> tuple[Product, torch.Tensor, torch.dtype, torch.Tensor | None]:
    """What a linear layer brings for an input of `dtype`: its weight, which may be computed anew
    where it is read, as [N, K], the dtype of its output, and its count of clipped values."""
    out_dtype, delayed, quantized_weight, clipped = layer._state(dtype, weight.device, recipe)
    if type(weight) is Gathered:
        quantized_weight = weight.operand(recipe, layer._path, torch.is_grad_enabled())
    outliers = layer._outliers() if recipe.has_outliers else None
    main_grad = getattr(weight, "main_grad", None)
    main_grad = None if main_grad is None else main_grad_of("linear", weight)
    if layer._is_transposed:
        weight, main_grad = weight.t(), None if main_grad is None else main_grad.t()
    # Only for those who listen: of one name, torch.compile would not use code of another.
    name = layer._path if listeners else ""
    product = Product(main_grad, delayed, quantized_weight, name, outliers)
    return product, weight, out_dtype, clipped


def _run(layer: Layer, x: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    check_input(x, weight.t() if layer._is_transposed else weight, name=layer._path)
    product, weight, out_dtype, clipped = product_of(layer, weight, x.dtype, recipe)
    bias: torch.Tensor | None = layer.bias  # type: ignore[assignment]
    return run_linear(x, weight, bias, product, recipe, out_dtype, clipped)


def cast_weight(layer: Layer, weight: torch.Tensor, amax: torch.Tensor | None = None) -> Operand:
    """The operand of weight [N, K], for all three products. amax: as in `operands.cast`."""
    indices = layer._outliers()
    rest = weight if indices is None else split(weight, indices)[0]
    return operands.cast(rest, "w", layer.recipe, layer._delayed(), use_t=True, amax=amax)


class Linear(Layer, torch.nn.Linear):
    """y = x @ weight^T + bias with the operands of all three GEMMs in the formats of `recipe`.

    Otherwise identical to torch.nn.Linear: parameters, initialisation, state_dict keys. Parameters
    may be fp32, bf16 or fp16 and are never changed. The output has the input's dtype; under
    torch.autocast, the autocast dtype. recipe: a name, such as "bf16", "fp8" or "fp8-delayed", or
    a Recipe; inside `mixprec.autocast`, that region's. name: what audit
    calls it; `mixprec.convert` sets it to the module's path. See `mixprec.functional.linear` for
    the formulas and errors.

    A delayed recipe and one with clip_activations or outliers add buffers: see `mixprec.nn.Layer`.
    `mixprec.update_scales` says when delayed scales change. State dicts of nn.Linear can be loaded,
    which resets the scales; `mixprec.scaling.plain_state_dict` returns one for nn.Linear.
    """

    __module__ = "mixprec.nn"  # the path that pickle stores
    _takes_outliers = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | str = "fp8",
        name: str = "",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = Recipe.parse(recipe)
        self._path = name

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch's name, for calls by keyword
        recipe = recipe_here(self._recipe)
        if recipe is None:
            self._watch_main_grads()
            return super().forward(input)
        weight = self.weight
        if type(input) is torch.Tensor and not torch._C._len_torch_function_stack():
            return _run(self, input, weight, recipe)
        with without_modes():
            return _run(self, input, weight, recipe)

    def _cast_weight(self, amax: torch.Tensor | None = None) -> Operand:
        return cast_weight(self, local(self.weight), amax)

    def extra_repr(self) -> str:
        bias = "" if self.bias is not None else ", bias=False"
        return f"in={self.in_features}, out={self.out_features}{bias}, {self.recipe}"


class Conv1D(Layer):
    """y = x @ weight + bias with weight [K, N], cast as that of `Linear` is.

    Only `mixprec.convert` makes it, from a transformers.pytorch_utils.Conv1D, of which it stays an
    instance: parameters and state_dict keys are the same.
    """

    __module__ = "mixprec.nn"
    _is_transposed = _takes_outliers = True
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        recipe = recipe_here(self._recipe)
        if recipe is None:
            self._watch_main_grads()
            y: torch.Tensor = super().forward(x)
            return y
        return _run(self, x, self.weight, recipe)

    def _cast_weight(self, amax: torch.Tensor | None = None) -> Operand:
        return cast_weight(self, self.weight.t(), amax)

    __repr__ = torch.nn.Module.__repr__

    def extra_repr(self) -> str:
        k, n = self.weight.shape
        return f"in={k}, out={n}, {self.recipe}"
