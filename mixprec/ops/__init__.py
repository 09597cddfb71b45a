"""The ops: each with one definition, one reference, and variants that must agree with it."""

from ._dispatch.backends import use_backend
from ._dispatch.simulation import simulate
from ._reference.rounding import export_master, join_master
from .act_quantize import act_quantize
from .attention import attention, attention_backward, rotary, rotary_
from .cross_entropy import cross_entropy, cross_entropy_backward
from .delayed_scales import update_delayed_scales_
from .dequantize import dequantize
from .gemm import gemm, gemm_accumulate_
from .gemm_grouped import gemm_grouped, gemm_grouped_accumulate_
from .grad_stats import grad_stats_
from .norm_quantize import norm_quantize
from .pack import pack, unpack
from .quantize import quantize
from .scale import amax, clip_coef, inv_scale, scale_from_amax_, underflow_share, update_scale_
from .step import adamw_, lion_, muon_direction_, sgd_
from .unscale import unscale_

__all__ = [
    "act_quantize",
    "adamw_",
    "amax",
    "attention",
    "attention_backward",
    "clip_coef",
    "cross_entropy",
    "cross_entropy_backward",
    "dequantize",
    "export_master",
    "gemm",
    "gemm_accumulate_",
    "gemm_grouped",
    "gemm_grouped_accumulate_",
    "grad_stats_",
    "inv_scale",
    "join_master",
    "lion_",
    "muon_direction_",
    "norm_quantize",
    "pack",
    "quantize",
    "rotary",
    "rotary_",
    "scale_from_amax_",
    "sgd_",
    "simulate",
    "underflow_share",
    "unpack",
    "unscale_",
    "update_delayed_scales_",
    "update_scale_",
    "use_backend",
]
