"""Conv1d, Conv2d, Conv3d and the transposed ones: torch.nn's with a recipe."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .. import functional
from ..functional import IntOrPair
from ..functional._convolution import Kind
from ..functional.operands import Operand
from ..ops._dispatch import checks
from ..recipes import Recipe
from ._layer import Layer
from .autocast import recipe_here


class Convolution(Layer):
    """What the six have in common."""

    bias: torch.Tensor | None
    _output_padding: Any
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    transposed: bool
    groups: int
    padding_mode: Any

    def _convolve(
        self, x: torch.Tensor, recipe: Recipe, output_size: list[int] | None = None
    ) -> torch.Tensor:
        dims, added = len(self.kernel_size), 0
        checks.is_tensor(Kind(dims, self.transposed, self._path).op, "x", x)
        if self.transposed:
            sizes = (self.stride, self.padding, self.kernel_size, dims, self.dilation)
            added = self._output_padding(x, output_size, *sizes)
        state = self._state(x.dtype, x.device, recipe)
        if self.padding_mode != "zeros":
            amounts: Any = self._reversed_padding_repeated_twice
            x = nn.functional.pad(x, amounts, mode=self.padding_mode)
        return functional.convolution(
            x,
            self.weight,
            self.bias,
            self.stride,
            self._zeros,
            self.dilation,
            self.transposed,
            added,
            self.groups,
            recipe=recipe,
            name=self._label,
            **state._asdict(),
        )

    @property
    def _zeros(self) -> IntOrPair | str:
        """The padding that the convolution itself adds."""
        return self.padding if self.padding_mode == "zeros" else 0

    def _cast_weight(self, amax: torch.Tensor | None = None) -> Operand:
        return functional.cast_conv_weight(
            self.weight, self._zeros, self.groups, self.recipe, self._delayed(), self.transposed
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.recipe}"


class _Forward(Convolution):
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
            *(in_channels, out_channels, kernel_size, stride, padding),
            *(dilation, groups, bias, padding_mode, device, dtype),
        )
        self.recipe = Recipe.parse(recipe)
        self._path = name

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch's name, for calls by keyword
        recipe = recipe_here(self._recipe)
        if recipe is None:
            self._watch_main_grads()
            y: torch.Tensor = super().forward(input)
            return y
        return self._convolve(input, recipe)


class _Transposed(Convolution):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrPair,
        stride: IntOrPair = 1,
        padding: IntOrPair = 0,
        output_padding: IntOrPair = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: IntOrPair = 1,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | str = "fp8",
        name: str = "",
    ) -> None:
        super().__init__(
            *(in_channels, out_channels, kernel_size, stride, padding, output_padding),
            *(groups, bias, dilation, padding_mode, device, dtype),
        )
        self.recipe = Recipe.parse(recipe)
        self._path = name

    def forward(self, input: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
        recipe = recipe_here(self._recipe)
        if recipe is None:
            self._watch_main_grads()
            y: torch.Tensor = super().forward(input, output_size)
            return y
        return self._convolve(input, recipe, output_size)


class Conv1d(_Forward, nn.Conv1d):
    """torch.nn.Conv1d with a recipe, as `Conv2d`."""

    __module__ = "mixprec.nn"  # the path that pickle stores


class Conv2d(_Forward, nn.Conv2d):
    """y = x * weight + bias, a convolution with operands in the formats of `recipe`.

    Otherwise identical to torch.nn.Conv2d: arguments, parameters, initialisation, state_dict keys,
    padding modes, memory formats. Parameters may be fp32, bf16 or fp16 and are never changed. The
    output has the input's dtype; under torch.autocast, the autocast dtype. With an FP8 recipe a
    1 x 1 kernel without padding and groups runs as an FP8 GEMM; others keep x and the weight in
    FP8 for backward, which saves memory, and compute in bf16. recipe, name and the additional
    buffers are as in `mixprec.nn.Linear`. See `mixprec.functional.convolution` for the formulas and
    errors.
    """

    __module__ = "mixprec.nn"


class Conv3d(_Forward, nn.Conv3d):
    """torch.nn.Conv3d with a recipe, as `Conv2d`."""

    __module__ = "mixprec.nn"


class ConvTranspose1d(_Transposed, nn.ConvTranspose1d):
    """torch.nn.ConvTranspose1d with a recipe, as `Conv2d`; none of its kernels is a GEMM."""

    __module__ = "mixprec.nn"


class ConvTranspose2d(_Transposed, nn.ConvTranspose2d):
    """torch.nn.ConvTranspose2d with a recipe, as `Conv2d`; none of its kernels is a GEMM."""

    __module__ = "mixprec.nn"


class ConvTranspose3d(_Transposed, nn.ConvTranspose3d):
    """torch.nn.ConvTranspose3d with a recipe, as `Conv2d`; none of its kernels is a GEMM."""

    __module__ = "mixprec.nn"


# The layer of each class of torch.
CONVOLUTIONS: dict[type[nn.Module], type[Convolution]] = {
    kind.__bases__[1]: kind
    for kind in (Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d)
}
