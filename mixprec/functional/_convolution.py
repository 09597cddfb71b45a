"""convolution, conv2d: a convolution in the formats of a recipe; a GEMM if its kernel is 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..ops._dispatch import autocast, checks
from ..recipes import Recipe
from . import operands
from ._arguments import check_output, check_state, main_grad_of, no_outliers
from ._aten_convolution import Convolution, Geometry, encode, is_channels_last
from ._derivatives import apply
from ._linear import run_linear
from ._products import Product, clips, saturate
from ._tensor_parallel import refuse_parts
from .operands import Delayed, Operand

IntOrPair = int | Sequence[int]
SIZES = {1: ("L", "k"), 2: ("H, W", "kh, kw"), 3: ("D, H, W", "kd, kh, kw")}


class Kind(NamedTuple):
    """A convolution over 1, 2 or 3 dimensions, which may be a transposed one."""

    dims: int
    transposed: bool
    layer: str = ""

    @property
    def op(self) -> str:
        """torch's name, and that of the layer."""
        return checks.of_layer(f"conv{'_transpose' * self.transposed}{self.dims}d", self.layer)

    @property
    def module(self) -> str:
        return f"mixprec.nn.Conv{'Transpose' * self.transposed}{self.dims}d"

    @property
    def weight_shape(self) -> str:
        sizes = SIZES[self.dims][1]
        return f"[C, O / groups, {sizes}]" if self.transposed else f"[O, C / groups, {sizes}]"

    def integers(self, name: str, value: object, least: int) -> tuple[int, ...]:
        """One for each dimension."""
        numbers = (value,) * self.dims if isinstance(value, int) else value
        if (
            not isinstance(numbers, Sequence)
            or len(numbers) != self.dims
            or not all(isinstance(n, int) and n >= least for n in numbers)
        ):
            several = {1: "a sequence of one", 2: "a pair of them", 3: "three of them"}[self.dims]
            raise ValueError(
                f"{self.op}: {name} must be an int of {least} or more, or {several}, got {value!r}"
            )
        return tuple(numbers)

    def padding(
        self, padding: object, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Zeros on both sides of each dimension, and how many more at its end."""
        none = (0,) * self.dims
        if not isinstance(padding, str):
            return self.integers("padding", padding, 0), none
        if self.transposed or padding not in ("same", "valid"):
            words = "" if self.transposed else '"same", "valid" or '
            raise ValueError(f"{self.op}: padding must be {words}a number, got {padding!r}")
        if padding == "valid":
            return none, none
        if any(s != 1 for s in stride):
            raise ValueError(f'{self.op}: padding "same" needs a stride of 1, got {stride}')
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple(n // 2 for n in total), tuple(n % 2 for n in total)


def every(x: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The points of x [B, C, ...] at which a kernel of size 1 is applied."""
    return x[tuple(slice(None, None, step) for step in (1, 1, *stride))]


def is_pointwise(kernel: Sequence[int], padding: IntOrPair | str, groups: int) -> bool:
    """Whether a convolution is a GEMM over points: it combines only the channels of each one."""
    if isinstance(padding, int):
        padding = (padding,)
    none = isinstance(padding, str) or not any(padding)  # "same" adds nothing to a kernel of 1
    return set(kernel) == {1} and groups == 1 and none


def _check(
    kind: Kind,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    groups: object,
    out_dtype: object,
) -> None:
    op, first = kind.op, "C" if kind.transposed else "O"
    checks.is_tensor(op, "x", x)
    if not isinstance(groups, int) or groups < 1 or weight.shape[0] % groups:
        raise ValueError(
            f"{op}: groups must be an int of 1 or more that divides {first} = {weight.shape[0]}, "
            f"got {groups!r}"
        )
    channels, outputs = weight.shape[1] * groups, weight.shape[0]
    if kind.transposed:
        channels, outputs = outputs, channels
    dims = kind.dims
    if x.dim() not in (dims + 1, dims + 2) or x.shape[-dims - 1] != channels:
        sizes = SIZES[dims][0]
        raise ValueError(
            f"{op}: x must be [B, C, {sizes}] or [C, {sizes}] with C = {channels} as in weight "
            f"{kind.weight_shape}, got shape {tuple(x.shape)}"
        )
    checks.has_dtype(op, "x", x, checks.FLOATS, checks.CAST_X)
    checks.has_dtype(op, "weight", weight, checks.FLOATS, checks.CAST_WEIGHT)
    checks.on_device(op, "weight", weight, x.device, "x")
    check_output(op, weight, bias, out_dtype, "[O]", outputs)


def cast_conv_weight(
    weight: torch.Tensor,
    padding: IntOrPair | str,
    groups: int,
    recipe: Recipe,
    delayed: Delayed | None,
    transposed: bool = False,
) -> Operand:
    """The argument quantized_weight of `convolution` for this weight, padding and groups."""
    if recipe.is_scaled and not transposed and is_pointwise(weight.shape[2:], padding, groups):
        return operands.cast(weight.flatten(1), "w", recipe, delayed, use_t=True)
    return encode(weight, "w", recipe, delayed)


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: IntOrPair = 1,
    padding: IntOrPair | str = 0,
    dilation: IntOrPair = 1,
    transposed: bool = False,
    output_padding: IntOrPair = 0,
    groups: int = 1,
    *,
    recipe: Recipe | str = "fp8",
    out_dtype: torch.dtype | None = None,
    name: str = "",
    delayed: Delayed | None = None,
    quantized_weight: Operand | None = None,
    clipped: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return y = q(x) * q(weight) + bias, a convolution over one, two or three dimensions, with
    gradients computed the same way.

    x: [B, C, ...] or [C, ...], where ... is [L], [H, W] or [D, H, W], any strides; weight:
    [O, C / groups, ...], or of a transposed convolution [C, O / groups, ...], as many dimensions as
    a batched x; both fp32, bf16 or fp16. bias: [O], fp32, bf16, fp16 or fp64. Arguments up to
    groups are those of torch.convolution; padding may be "same" or "valid" unless transposed, and
    output_padding needs transposed. recipe, out_dtype, name, delayed, clipped: as in `linear`.
    quantized_weight: the result of `cast_conv_weight` for this weight. y [B, O, ...] has the memory
    format of torch's convolution: channels_last if x is.

    A 16-bit recipe casts x, weight, bias and the incoming gradient g to its dtype and calls the
    vendor's convolution. In FP8, a kernel of size 1 without padding and groups, not transposed, is
    `linear` over the points, [B H' W', C]. Other convolutions save memory, not time: x, weight and
    g are quantized as matrices [first dimension, all the rest], so that "row" means a scale for
    each sample of x and g and for each entry of the weight's first dimension, and blocks run along
    the flattened rest; q(x) and q(weight) are saved for backward, one byte per element; and the
    vendor's convolution multiplies them, decoded to bf16, which is exact for scales that are powers
    of two. Sums are the vendor's FP32. Results are rounded to the 16-bit dtype, bf16 for FP8, on
    their way to

        grad of x, grad of weight   in the dtypes of x and weight; or added to weight.main_grad
        grad of bias                sum of the unquantized g in FP32, in bias's dtype

    On a CPU, where torch's fp16 convolution is slow, fp16 operands are multiplied as FP32 copies
    and results rounded once.

    Gradients that are not required are not computed, and nothing is saved for them. Inf and NaN in
    x, weight or g propagate to the results as Inf or NaN. Second derivatives need
    `twice_differentiable`. TypeError or ValueError names an invalid argument.
    """
    recipe = Recipe.parse(recipe)
    if out_dtype is None and isinstance(x, torch.Tensor):
        out_dtype = x.dtype
    checks.is_tensor("convolution", "weight", weight)
    kind = Kind(weight.dim() - 2, bool(transposed), name)
    if kind.dims not in SIZES:
        raise ValueError(
            "convolution: weight must have 3, 4 or 5 dimensions, two of them for channels, got "
            f"shape {tuple(weight.shape)}"
        )
    refuse_parts(kind.op, x, weight)
    _check(kind, x, weight, bias, groups, out_dtype)
    assert out_dtype is not None, "checked"
    strides, dilations = kind.integers("stride", stride, 1), kind.integers("dilation", dilation, 1)
    pad, end = kind.padding(padding, weight.shape[2:], strides, dilations)
    output_pad = kind.integers("output_padding", output_padding, 0)
    if any(output_pad) and not kind.transposed:
        raise ValueError(f"{kind.op}: output_padding needs transposed, got {output_padding!r}")
    no_outliers(kind.op, recipe)
    check_state(kind.op, recipe, delayed, clipped, x.device, kind.module)
    main_grad, kept = main_grad_of(kind.op, weight), delayed if recipe.is_delayed else None
    product = Product(main_grad, kept, quantized_weight, name)
    single = x.dim() == kind.dims + 1
    if single:
        x = x.unsqueeze(0)
    if recipe.is_scaled and not kind.transposed and is_pointwise(weight.shape[2:], pad, groups):
        y = _pointwise(x, weight, bias, product, strides, recipe, out_dtype)
    else:
        if any(end):
            x = torch.nn.functional.pad(x, [n for last in reversed(end) for n in (0, last)])
        clip = clips(recipe, out_dtype)
        # torch.autocast would cast the operands again, possibly bf16 to fp16.
        with autocast.disabled(x.device.type):
            y = apply(
                kind.op,
                Convolution,
                x,
                weight,
                bias,
                product,
                Geometry(strides, pad, dilations, kind.transposed, output_pad, groups),
                recipe,
                torch.float32 if clip else out_dtype,
                torch.is_grad_enabled(),
            )
        y = saturate(y, clipped) if clip else y
    return y.squeeze(0) if single else y


def conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: IntOrPair = 1,
    padding: IntOrPair | str = 0,
    dilation: IntOrPair = 1,
    groups: int = 1,
    **options: object,
) -> torch.Tensor:
    """`convolution` of images, with the order of arguments of torch.nn.functional.conv2d."""
    checks.is_tensor("conv2d", "weight", weight)
    if weight.dim() != 4:
        raise ValueError(
            f"conv2d: weight must be [O, C / groups, kh, kw], got shape {tuple(weight.shape)}"
        )
    return convolution(
        x, weight, bias, stride, padding, dilation, False, 0, groups, **options  # type: ignore[arg-type]
    )  # fmt: skip


def _pointwise(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    product: Product,
    stride: Sequence[int],
    recipe: Recipe,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """y [B, H', W', O] = x [B, H', W', C] @ weight [O, C]^T, seen as [B, O, H', W']."""
    channels_last = is_channels_last(x)
    x = every(x, stride).movedim(1, -1)
    if product.main_grad is not None:
        product = product._replace(main_grad=product.main_grad.flatten(1))
    y = run_linear(x, weight.flatten(1), bias, product, recipe, out_dtype, None)
    y = y.movedim(-1, 1)
    return y if channels_last else y.contiguous()
