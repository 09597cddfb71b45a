"""The ops by the rules of tests/independent*.py, in NumPy, with the arguments of their schemas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from definitions_casts import amax, dequantize, dequantize_mx, quantize, quantize_mx
from definitions_fused import act_backward, act_quantize, norm_backward, norm_quantize
from definitions_pack import pack, unpack
from definitions_scalars import (
    clip_coef,
    grad_stats_,
    inv_scale,
    scale_from_amax_,
    unscale_,
    update_scale_,
)
from definitions_updates import UPDATES, update_

DEFINITIONS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (amax, quantize, dequantize, quantize_mx, dequantize_mx, unscale_, grad_stats_,
              scale_from_amax_, inv_scale, clip_coef, update_scale_, norm_quantize, norm_backward,
              act_quantize, act_backward, pack, unpack)
} | {op: partial(update_, op) for op in UPDATES}  # fmt: skip
