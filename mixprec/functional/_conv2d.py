"""conv2d: a convolution in the formats of a recipe; a GEMM if its kernel is 1 x 1."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..ops._dispatch import autocast, checks
from ..recipes import Recipe
from . import operands
from ._arguments import check_output, check_state, main_grad_of
from ._aten_convolution import Convolution, Geometry, encode, is_channels_last
from ._derivatives import apply
from ._linear import run_linear
from ._products import Product
from ._saturate import clips, saturate
from .operands import Delayed, Operand

IntOrPair = int | Sequence[int]


def _pair(name: str, value: object, least: int) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else value
    if (
        not isinstance(pair, Sequence)
        or len(pair) != 2
        or not all(isinstance(n, int) and n >= least for n in pair)
    ):
        raise ValueError(
            f"conv2d: {name} must be an int of {least} or more, or a pair of them, got {value!r}"
        )
    return pair[0], pair[1]


def _padding(
    padding: object, kernel: Sequence[int], stride: tuple[int, int], dilation: tuple[int, int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Zeros on each side of (height, width), and how many more at the bottom and on the right."""
    if padding == "valid":
        return (0, 0), (0, 0)
    if padding != "same":
        if isinstance(padding, str):
            raise ValueError(
                f'conv2d: padding must be "same", "valid" or a number, got {padding!r}'
            )
        return _pair("padding", padding, 0), (0, 0)
    if stride != (1, 1):
        raise ValueError(f'conv2d: padding "same" needs a stride of 1, got {stride}')
    total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    return (total[0] // 2, total[1] // 2), (total[0] % 2, total[1] % 2)


def is_pointwise(kernel: Sequence[int], padding: object, groups: int) -> bool:
    """Whether a convolution is a GEMM over pixels: it combines only the channels of each one."""
    none = padding in (0, (0, 0), [0, 0], "same", "valid")
    return tuple(kernel) == (1, 1) and groups == 1 and none


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    groups: object,
    out_dtype: object,
) -> None:
    op = "conv2d"
    checks.is_tensor(op, "x", x)
    checks.is_tensor(op, "weight", weight)
    if weight.dim() != 4:
        raise ValueError(
            f"{op}: weight must be [O, C / groups, kh, kw], got shape {tuple(weight.shape)}"
        )
    outputs, inputs = weight.shape[:2]
    if not isinstance(groups, int) or groups < 1 or outputs % groups:
        raise ValueError(
            f"{op}: groups must be an int of 1 or more that divides O = {outputs}, got {groups!r}"
        )
    channels = inputs * groups
    if x.dim() not in (3, 4) or x.shape[-3] != channels:
        raise ValueError(
            f"{op}: x must be [B, C, H, W] or [C, H, W] with C = {channels} as in weight "
            f"[O, C / groups, kh, kw], got shape {tuple(x.shape)}"
        )
    checks.has_dtype(op, "x", x, checks.FLOATS)
    checks.has_dtype(op, "weight", weight, checks.FLOATS)
    checks.on_device(op, "weight", weight, x.device, "x")
    check_output(op, weight, bias, out_dtype, "[O]")


def cast_conv_weight(
    weight: torch.Tensor, padding: object, groups: int, recipe: Recipe, delayed: Delayed | None
) -> Operand:
    """The argument quantized_weight of `conv2d` for this weight, padding and groups."""
    if recipe.is_scaled and is_pointwise(weight.shape[2:], padding, groups):
        return operands.cast(weight.flatten(1), "w", recipe, delayed, use_t=True)
    return encode(weight, "w", recipe, delayed)


def conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: IntOrPair = 1,
    padding: IntOrPair | str = 0,
    dilation: IntOrPair = 1,
    groups: int = 1,
    *,
    recipe: Recipe | str = "fp8",
    out_dtype: torch.dtype | None = None,
    name: str = "",
    delayed: Delayed | None = None,
    quantized_weight: Operand | None = None,
    clipped: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return y = q(x) * q(weight) + bias, [B, O, H', W'], with gradients computed the same way.

    x: [B, C, H, W] or [C, H, W], any strides; weight: [O, C / groups, kh, kw]; both fp32, bf16 or
    fp16. bias: [O], fp32, bf16, fp16 or fp64. stride, padding (zeros, or "same", "valid"),
    dilation, groups: as in torch.nn.functional.conv2d. recipe, out_dtype, name, delayed, clipped:
    as in `linear`. quantized_weight: the result of `cast_conv_weight` for this weight. y has the
    memory format of torch's convolution: channels_last if x is.

    A 16-bit recipe casts x, weight, bias and the incoming gradient g to its dtype and calls the
    vendor's convolution. In FP8, a 1 x 1 kernel without padding and groups is `linear` over the
    pixels, [B H' W', C]. Other convolutions save memory, not time: x, weight and g are quantized as
    matrices [first dimension, all the rest], so that "row" means a scale for each sample of x and
    g and for each output channel of the weight, and blocks run along the flattened rest; q(x) and
    q(weight) are saved for backward, one byte per element; and the vendor's convolution multiplies
    them, decoded to bf16, which is exact for scales that are powers of two. Sums are the vendor's
    FP32. Results are rounded to the 16-bit dtype, bf16 for FP8, on their way to

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
    _check(x, weight, bias, groups, out_dtype)
    assert out_dtype is not None, "checked"
    strides, dilations = _pair("stride", stride, 1), _pair("dilation", dilation, 1)
    pad, more = _padding(padding, weight.shape[2:], strides, dilations)
    check_state("conv2d", recipe, delayed, clipped, x.device, "mixprec.nn.Conv2d")
    main_grad, kept = main_grad_of("conv2d", weight), delayed if recipe.is_delayed else None
    product = Product(main_grad, kept, quantized_weight, name)
    single = x.dim() == 3
    if single:
        x = x.unsqueeze(0)
    if recipe.is_scaled and is_pointwise(weight.shape[2:], pad, groups):
        y = _pointwise(x, weight, bias, product, strides, recipe, out_dtype)
    else:
        if more != (0, 0):
            x = torch.nn.functional.pad(x, (0, more[1], 0, more[0]))
        clip = clips(recipe, out_dtype)
        # torch.autocast would cast the operands again, possibly bf16 to fp16.
        with autocast.disabled(x.device.type):
            y = apply(
                "conv2d",
                Convolution,
                x,
                weight,
                bias,
                product,
                Geometry(strides, pad, dilations, groups),
                recipe,
                torch.float32 if clip else out_dtype,
                torch.is_grad_enabled(),
            )
        y = saturate(y, clipped) if clip else y
    return y.squeeze(0) if single else y


def _pointwise(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    product: Product,
    stride: tuple[int, int],
    recipe: Recipe,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """y [B, H', W', O] = x [B, H', W', C] @ weight [O, C]^T, seen as [B, O, H', W']."""
    channels_last = is_channels_last(x)
    x = x[:, :, :: stride[0], :: stride[1]].permute(0, 2, 3, 1)
    if product.main_grad is not None:
        product = product._replace(main_grad=product.main_grad.flatten(1))
    y = run_linear(x, weight.flatten(1), bias, product, recipe, out_dtype, None)
    y = y.permute(0, 3, 1, 2)
    return y if channels_last else y.contiguous()
