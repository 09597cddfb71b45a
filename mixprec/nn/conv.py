"""Conv2d: torch.nn.Conv2d with a recipe."""

from __future__ import annotations

import torch

from .. import functional
from ..functional import IntOrPair
from ..functional.operands import Operand
from ..ops._dispatch import checks
from ..recipes import Recipe
from . import _region
from ._layer import Layer


class Conv2d(Layer, torch.nn.Conv2d):
    """y = x * weight + bias, a convolution with operands in the formats of `recipe`.

    Otherwise identical to torch.nn.Conv2d: arguments, parameters, initialisation, state_dict keys,
    padding modes, memory formats. Parameters may be fp32, bf16 or fp16 and are never changed. The
    output has the input's dtype; under torch.autocast, the autocast dtype. With an FP8 recipe a
    1 x 1 kernel without padding and groups runs as an FP8 GEMM; others keep x and the weight in
    FP8 for backward, which saves memory, and compute in bf16. recipe, name and the additional
    buffers are as in `mixprec.nn.Linear`. See `mixprec.functional.conv2d` for the formulas and
    errors.
    """

    __module__ = "mixprec.nn"  # the path that pickle stores

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrPair,
        stride: IntOrPair = 1,
        padding: IntOrPair | str = 0,
        dilation: IntOrPair = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | str = "fp8",
        name: str = "",
    ) -> None:
        super().__init__(
            *(in_channels, out_channels, kernel_size, stride, padding),  # type: ignore[arg-type]
            *(dilation, groups, bias, padding_mode, device, dtype),  # type: ignore[arg-type]
        )
        self.recipe = Recipe.parse(recipe)
        self._path = name

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch's name, for calls by keyword
        x = input
        recipe = _region.recipe_here(self._recipe)
        if recipe is None:
            return super().forward(x)
        checks.is_tensor("conv2d", "x", x)
        state = self._state(x.dtype, x.device, recipe)
        if self.padding_mode != "zeros":
            amounts = self._reversed_padding_repeated_twice
            x = torch.nn.functional.pad(x, amounts, mode=self.padding_mode)
        return functional.conv2d(
            x,
            self.weight,
            self.bias,
            self.stride,
            self._zeros,
            self.dilation,
            self.groups,
            recipe=recipe,
            name=self._path,
            **state._asdict(),
        )

    @property
    def _zeros(self) -> IntOrPair | str:
        """The padding that the convolution itself adds."""
        return self.padding if self.padding_mode == "zeros" else 0

    def _cast_weight(self) -> Operand:
        return functional.cast_conv_weight(
            self.weight, self._zeros, self.groups, self.recipe, self._delayed()
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.recipe}"
