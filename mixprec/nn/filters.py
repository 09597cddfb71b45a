"""Filters for mixprec.convert: which layers are worth converting."""

from __future__ import annotations

import logging

from torch import nn

from ..functional import is_pointwise
from ..recipes import Recipe

logger = logging.getLogger("mixprec")


def _too_small(n: int, k: int, recipe: Recipe) -> str | None:
    """Why casting the operands of y [M, n] = x [M, k] @ w^T costs more than FP8 GEMMs save.

    These are the thresholds of torchao's automatic filter, measured by its authors on an H100 with
    M between 1k and 16k; they have not been measured for the kernels of this library.
    """
    if not recipe.is_scaled:
        return None
    if recipe.is_block:
        return "no product of block formats was measured to be faster: they save memory"
    if recipe.w_granularity == recipe.x_granularity == recipe.g_granularity == "tensor":
        return "in <= 4096 and out <= 1024" if k <= 4096 and n <= 1024 else None
    if n <= 2048:
        return "out <= 2048"
    if k <= 1024:
        return "in <= 1024"
    return "in <= 2048 and out <= 4096" if k <= 2048 and n <= 4096 else None


def worthwhile(module: nn.Module, fqn: str, recipe: Recipe | str = "fp8") -> bool:
    """Whether a layer is expected to run faster in `recipe` than in 16 bits.

        mixprec.convert(model, "fp8-rowwise", module_filter_fn=mixprec.filters.worthwhile)

    convert passes the recipe of the layer. Returns False, and logs the reason at level INFO to the
    logger "mixprec", for N = out_features and K = in_features of

        one scale per tensor         K <= 4096 and N <= 1024
        scales per row or block      N <= 2048, or K <= 1024, or K <= 2048 and N <= 4096

    A convolution with a 1 x 1 kernel, without padding and groups, is a GEMM: the same limits apply
    to its channels. Other convolutions compute in 16 bits and save memory, not time: False for FP8
    recipes. False also for block
    formats ("mxfp8", "mxfp4", "nvfp4-1x16"), of which no product was measured to be faster. True
    for 16-bit recipes, whose casts cost nothing where parameters are 16 bits wide. The filter
    considers neither memory, which FP8 also saves in small layers, nor accuracy: to exclude the
    first and the last layer, combine it with a condition on fqn.
    """
    recipe = Recipe.parse(recipe)
    if isinstance(module, nn.Linear):
        n, k = module.out_features, module.in_features
        reason = _too_small(n, k, recipe)
    elif isinstance(module, nn.modules.conv._ConvNd):
        n, k = module.out_channels, module.in_channels
        reason = _too_small(n, k, recipe)
        pointwise = is_pointwise(module.kernel_size, module.padding, module.groups)
        if recipe.is_scaled and (module.transposed or not pointwise):
            reason = "a convolution that is not 1x1 saves memory, not time"
    else:
        return True
    if reason is None:
        return True
    where = fqn or "the model"
    logger.info("worthwhile: %s (in %d, out %d) stays: %s, %s", where, k, n, recipe.name, reason)
    return False
