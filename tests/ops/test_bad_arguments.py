"""What every op says of arguments that it does not take. Nothing is written before an error."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import for_each
from emulated.agreement import tensors
from emulated.values.test_updates import RULES
from op_arguments import UPDATES, arguments

import mixprec
from mixprec import ops
from mixprec.ops._dispatch.op import OPS

WRONG: dict[str, Callable[[torch.Tensor], object]] = {
    "must be a torch.Tensor, got NoneType": lambda x: None,
    "must be a torch.Tensor, got float": lambda x: 1.0,
    "must be a dense tensor": torch.Tensor.to_sparse,
    "must be on": lambda x: x.to("meta"),
    "must": torch.Tensor.int,
    "must ": torch.Tensor.double,
}


def dtype_of(op: str) -> torch.dtype:
    return torch.bfloat16 if "gemm" in op or op == "dequantize" else torch.float32


def is_accepted(x: object, argument: str, before: torch.Tensor, owner: str) -> bool:
    """Whether the op takes x where it takes `before`, too."""
    if not isinstance(x, torch.Tensor) or x.is_sparse:
        return False
    of_any_real = argument in ("grads", "params") and x.dtype == torch.float64
    same = argument == owner if x.is_meta else x.dtype == before.dtype or of_any_real
    return same or x.numel() == 0  # an empty tensor of a list stands for none


@pytest.mark.parametrize("name", OPS)
def test_a_tensor_that_is_none_or_of_another_kind_is_named(backend: str, name: str) -> None:
    """Each in turn, in a list the last: None, unless the schema says that it may be missing; no
    tensor, sparse, on another device, of another dtype."""
    op = OPS[name]
    kinds = [str(argument.type) for argument in op.handle()._schema.arguments]
    owner = op.arguments[op._owner]
    for i, argument in enumerate(op.arguments):
        for message, change in WRONG.items():
            args = list(arguments(name, dtype_of(name), "contiguous"))
            found = tensors(args[i])
            if message.endswith("NoneType") and kinds[i] != "Tensor":
                continue
            if not found or is_accepted(wrong := change(found[-1]), argument, found[-1], owner):
                continue
            args[i] = [*found[:-1], wrong] if isinstance(args[i], list) else wrong
            kept = [(t, t.clone()) for a in args for t in tensors(a) if not t.is_meta]
            label = rf"(states|{op.states[-1]})" if argument == "states" else argument
            if message == "must be on":  # two that disagree: either is named
                label, message = r"\w+", "must (be on|hold one)"
            error = ValueError if isinstance(wrong, torch.Tensor) else TypeError
            said = (
                rf"^{name.removesuffix('_simulated')}\w*: (.* )?{label}(\[\d\])?( and b)? {message}"
            )
            with pytest.raises(error, match=said):
                op(*args)
            with pytest.raises(Exception, match=r"\w"):  # of torch or ours, and no crash
                op.handle()(*args)
            for t, before in kept:
                same = t.is_sparse or torch.equal(*(x.double().nan_to_num() for x in (t, before)))
                assert same, argument


X, HALF, K = torch.ones(3, 4), torch.ones(3, 4).half(), torch.ones(4)
A, B, WIDE = HALF, torch.ones(4, 5).half(), torch.ones(200, 300).half()
QUANTIZED = mixprec.quantize(HALF, "e4m3")
MX = mixprec.quantize(HALF, "e2m1", granularity="mx")
CODES, RANGES = torch.zeros(2, dtype=torch.uint8), torch.zeros(1, 2, dtype=torch.bfloat16)
ACC, SHARED = torch.zeros(3, 5), torch.zeros(64)
HALVES = SHARED.view(torch.float16)  # 128 of them in the same memory
SEED, COUNTERS = torch.ones(1, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
ONE, FLAG, SUM = torch.ones(()), torch.zeros(1), torch.zeros(1, dtype=torch.float64)
TRACKER, NAN = torch.zeros(1, dtype=torch.int32), torch.tensor([math.nan])
TALL = torch.ones(130, 3).half()
# Arguments of the public functions; of the other ops, what op_arguments has.
GOOD: dict[str, dict[str, Any]] = {
    "quantize": {"x": X, "fmt": "e4m3"},
    "gemm": {"a": A, "b": B},
    "gemm_accumulate_": {"acc": ACC, "a": A, "b": B},
    "act_quantize": {"x": X, "fmt": "e4m3"},
    "norm_quantize": {"x": X, "fmt": "e4m3"},
    "pack": {"x": X, "bits": 8},
    "unpack": {"codes": CODES, "ranges": RANGES, "bits": 4, "shape": (3,)},
    "scale_from_amax_": {"scale": K, "scale_inv": K.clone(), "amax": K, "fmt": "e4m3"},
    "clip_coef": {"sum_sq": SUM, "max_norm": 1.0},
    "update_scale_": {
        "scale": FLAG + 1, "growth_tracker": TRACKER, "hysteresis_tracker": TRACKER + 1,
        "counters": COUNTERS, "found_inf": FLAG,
    },
    "update_delayed_scales_": {
        "amax_histories": [K], "scales": [ONE], "amaxes": [ONE.clone()], "fmt_max": [448.0],
    },
    "unscale_": {"grads": [K], "inv_scale": ONE, "found_inf": FLAG},
    "grad_stats_": {"grads": [K], "inv_scale": None, "found_inf": FLAG, "sum_sq": SUM},
}  # fmt: skip
T = torch.ones(3)
GOOD |= {  # of one FP32 param
    op: {name: [T.clone()] for name in ("params", "grads", *OPS[op].states)}
    | {"masters": [], "steps": torch.zeros(1), **RULES[rule][2]}
    for op, rule in zip(UPDATES, ("decoupled", "momentum", "lion", "muon"), strict=True)
}
EIGHT_BITS = {
    "params": [torch.zeros(300)], "grads": [torch.zeros(300)], "indices": (0,),
    "momentum_buffers": [torch.zeros(300).byte()], "state_scales": [torch.zeros(2)],
}  # fmt: skip
OF_B = (
    r"b_scale_inv must hold one element or have shape \[1, N\] = \(1, 5\), "
    r"\[ceil\(K/128\), N\] = \(1, 5\) or \[ceil\(K/128\), ceil\(N/128\)\] = \(1, 1\), "
    r"got shape \(5,\)"
)
OUT_OF_RANGE = (-1.0, math.nan, math.inf, 2.0**127, 2.0**-127)
NOT_POSITIVE = "scale must be positive and finite, got"


@for_each(
    "op, changes, message",
    [
        ("amax", {"x": X.to(torch.float8_e5m2)}, "x must have dtype .*float8_e5m2"),
        ("quantize", {"x": X.to(torch.float8_e5m2)}, "x must have dtype .*e5m2"),
        ("quantize", {"fmt": "fp6"}, "fmt must be one of .*fp6"),
        *(
            ("quantize", {"scale": scale}, NOT_POSITIVE)
            for scale in (0.0, *OUT_OF_RANGE, *map(torch.tensor, OUT_OF_RANGE))
        ),
        *(
            ("quantize", {"scale": scale}, NOT_POSITIVE) for scale in (1e-60, 1e60)
        ),  # 0, Inf in FP32
        ("quantize", {"scale": "big"}, "scale must be"),
        ("quantize", {"scale": True}, "scale must be a number or a tensor, got bool"),
        ("quantize", {"scale": K}, "scale must hold one float32"),
        ("quantize", {"x": K, "transpose": True}, "transpose needs x of 2 or more"),
        ("quantize", {"x": K, "transpose": True, "granularity": "row"}, "transpose needs x of 2"),
        ("quantize", {"fmt": "fp16", "granularity": "row"}, 'be "tensor" for .*float16'),
        ("quantize", {"fmt": "bf16", "granularity": "block1x128"}, '"tensor" for .*bfloat16'),
        ("quantize", {"scale": 2.0, "granularity": "row"}, "scale must be None with .* 'row'"),
        ("quantize", {"scale": ONE, "granularity": "block128x128"}, "scale must be None with .*x1"),
        ("quantize", {"granularity": "column"}, 'granularity must be one of "tensor", "row"'),
        ("quantize", {"granularity": "Row"}, "granularity must be one of .*got 'Row'"),
        ("quantize", {"fmt": "e2m1"}, "granularity must be \"mx\" for e2m1, got 'tensor'"),
        ("quantize", {"fmt": "e3m2", "granularity": "nvfp4"}, 'e2m1 with "nvfp4", got e3m2 with'),
        ("quantize", {"fmt": "bf16", "granularity": "mx"}, "fmt must be one of e4m3, e5m2, .* bf"),
        ("quantize", {"scale": 2.0, "granularity": "mx"}, "scale must be left out with granul"),
        ("quantize", {"power_of_two_scale": False, "granularity": "mx"}, "power_.* left out"),
        ("quantize", {"scale_mode": "up", "granularity": "mx"}, "scale_mode must be one of"),
        ("quantize", {"fmt": "e2m1", "scale_mode": "ceil", "granularity": "nvfp4"}, '"rceil"'),
        ("quantize", {"seed": 1.5, "granularity": "mx"}, "seed, if no tensor, must be an int"),
        ("quantize", {"seed": -(2**64), "granularity": "mx"}, r"must be in \[-2\^63"),
        ("quantize", {"scale_mode": "ceil"}, "scale_mode is for the gran"),
        ("quantize", {"seed": 3, "granularity": "row"}, "seed is for the granulari"),
        ("quantize_mx", {"fmt": "mxfp5"}, "fmt must be one of mxfp8_e4m3, .*mxfp5"),
        ("quantize_mx", {"fmt": "mxfp4", "scale_mode": "up"}, 'must be one of "floor", .*up'),
        ("quantize_mx", {"scale_mode": "even"}, 'scale_mode must be "rceil".*even'),
        ("quantize_mx", {"x": K}, "transpose needs x of 2 or more"),
        ("quantize_mx", {"seed": SEED[0]}, r"seed .* \(1,\), got \(\)"),
        ("dequantize", {"dtype": torch.int8}, "dtype must be float32.*int8"),
        ("dequantize", {"dtype": torch.float64}, "dtype must be.*float64"),
        ("dequantize", {"data": X}, "data must have dtype .*float32"),
        (
            "dequantize",
            {"data": TALL, "scale_inv": K[:3, None]},
            r"one of .*\(130, 1\).*\(2, 1\).* got \(3, 1\)",
        ),
        ("dequantize", {"data": HALF[0], "scale_inv": K[:2]}, r"one of .*\(1, 1\).* got \(2,\)"),
        ("dequantize_mx", {"data": CODES.view(torch.int8)}, "data must have dtype uint8, .*int8"),
        ("dequantize_mx", {"fmt": "mxfp8_e4m3"}, "data must have dtype float8_e4m3fn, .*uint8"),
        ("dequantize_mx", {"fmt": "nvfp4"}, "scale_inv must have dtype float8_e4m3fn"),
        ("dequantize_mx", {"fmt": "fp4"}, "fmt must be one of mxfp8_e4m3, .*got 'fp4'"),
        ("dequantize_mx", {"columns": 4}, r"columns must fit data \(4, 3\) in mxfp4.*/ 2.*got 4"),
        ("dequantize_mx", {"columns": -6}, "columns must fit"),
        ("dequantize_mx", {"scale_inv": torch.zeros(4, 2).byte()}, r"scale_inv .*\(4, 1\), got"),
        ("dequantize_mx", {"tensor_scale_inv": ONE}, "tensor_scale_inv must be None for mxfp4"),
        *(
            (
                "dequantize_mx",
                {
                    "fmt": "nvfp4",
                    "scale_inv": torch.zeros(4, 1).to(mixprec.E4M3.dtype),
                    "tensor_scale_inv": scale,
                },
                f"tensor_scale_inv must {message}",
            )
            for scale, message in ((K, "hold one float32"), (SUM, ".*float64"))
        ),
        ("dequantize_mx", {"dtype": torch.float64}, "dtype must be float32, .*float64"),
        ("gemm", {"a": A[0]}, r"a must be \[M, K\], got shape \(4,\)"),
        ("gemm", {"b": B.t()}, r"agree in K, got a \(3, 4\) and b \(5, 4\)"),
        ("gemm", {"a": A.double(), "b": B.double()}, "got a torch.float64 and b torch.float64"),
        ("gemm", {"b": B.bfloat16()}, "a and b must both be .*bfloat16"),
        ("gemm", {"a": A.int(), "b": B.int()}, "a and b must both be .*int32"),
        ("gemm", {"out_dtype": torch.float64}, "out_dtype must be .*float64"),
        ("gemm", {"bias": K}, r"bias must have shape \[N\] = \(5,\), got \(4,\)"),
        ("gemm", {"a_scale_inv": 0.0}, "a_scale_inv must be positive and finite"),
        ("gemm", {"a_scale_inv": -ONE}, "a_scale_inv must be positive"),
        ("gemm", {"b_scale_inv": NAN}, "b_scale_inv must be pos"),
        ("gemm", {"b_scale_inv": torch.ones(5)}, OF_B),
        ("gemm", {"a_scale_inv": K[:, None]}, r"\[M, 1\] = \(3, 1\).*\(4, 1\)"),
        ("gemm", {"b_scale_inv": torch.ones(5, 1)}, r"\[1, N\] = .*got shape \(5, 1\)"),
        ("gemm", {"a_scale_inv": torch.ones(3, 2)}, r"a_scale_inv must .*\(3, 2\)"),
        ("gemm", {"a": WIDE, "b": WIDE.t(), "a_scale_inv": X[:1, :3]}, r"ceil\(M/128\).*\(2, 3\)"),
        ("gemm", {"a": WIDE, "b": WIDE.t(), "b_scale_inv": X[:2, :3]}, r"= \(3, 2\), .*\(2, 3"),
        ("gemm", {"b_scale_inv": NAN.expand(1, 5)}, "b_scale_inv must be positive and finite"),
        ("gemm", {"b_scale_inv": torch.tensor([[1.0, 2.0, 3.0, math.nan, 1.0]])}, "positive and f"),
        ("gemm", {"a": QUANTIZED, "b": QUANTIZED.t(), "a_scale_inv": 1.0}, "Quantized and brings"),
        ("gemm", {"a": MX, "b": MX.t(), "a_scale_inv": 1.0}, "Quantized and brings"),
        ("gemm", {"a": MX, "b": MX}, "a .* and b .* must agree in K"),
        ("gemm", {"a": MX, "b": QUANTIZED.t()}, "b must be bfloat16 or in a block format, as the"),
        ("gemm_accumulate_", {"acc": ACC.t()}, r"acc .*shape \[M, N\] = \(3, 5\), got \(5, 3\)"),
        ("gemm_accumulate_", {"acc": ACC[:, :1].expand(3, 5)}, "acc is written in place"),
        ("gemm_accumulate_", {"acc": ACC.as_strided((3, 5), (1, 1))}, "acc is written in place"),
        ("gemm_accumulate_", {"b": B[:3]}, "agree in K"),
        (
            "gemm_accumulate_",
            {"acc": SHARED[:15].view(3, 5), "a": HALVES[28:40].view(3, 4)},
            "a is read.*overlap",
        ),
        (
            "gemm_accumulate_",
            {"acc": SHARED[9:24].view(3, 5), "b": HALVES[:20].view(4, 5)},
            "b is read.*overlap",
        ),
        *(
            ("gemm_grouped", {"offs": torch.tensor(ends).int()}, f"offs must be {said}")
            for ends, said in (
                ([1, 0, 4], r"the ends .* S = 4, got \[1, 0, 4\]"),
                ([1, 1, 5], "the ends"),
                ([-1, 1, 4], "the ends"),
                ([1, 4], r"\[E\], E = 3"),
                ([[1, 1, 4]], r"\[E\]"),
            )
        ),
        ("gemm_grouped", {"a": B.bfloat16()[0]}, r"a must be \[S, K\]"),
        ("gemm_grouped", {"b": B.bfloat16()[0]}, r"b must be \[E, K, N\]"),
        ("gemm_grouped", {"b": torch.ones(3, 5, 5).bfloat16()}, "a and b must agree in K"),
        ("gemm_grouped", {"a_scale_inv": X[:1, :2]}, r"a_scale_inv must .* \[S, 1\] = \(4, 1\)"),
        ("gemm_grouped", {"b_scale_inv": X[:1]}, r"b_scale_inv .* \[E, 1, N\] = \(3, 1, 5\)"),
        ("gemm_grouped", {"out_dtype": torch.float64}, "out_dtype must be"),
        ("gemm_simulated", {"arch": "p100"}, "arch must be one of .*'v100'.*got 'p100'"),
        ("gemm_simulated", {"a_exponents": X.int()}, "a_exponents and b_exponents must be None or"),
        *(
            (op, changes, message)
            for op in ("act_quantize", "norm_quantize")
            for changes, message in (
                ({"fmt": "int8"}, "fmt must be .*int8"),
                ({"fmt": "e2m1", "granularity": "mx"}, "e4m3, e5m2.*got e2m1"),
                ({"granularity": "nvfp4"}, '"mx", got \'nvfp4'),
                ({"fmt": "bf16", "granularity": "mx"}, 'be "tensor" for'),
                (
                    {"granularity": "mx", "power_of_two_scale": False},
                    "power_of_two_scale must be le",
                ),
                ({"scale": -1.0}, NOT_POSITIVE),
            )
        ),
        ("act_quantize", {"kind": "tanh"}, 'one of "silu", .*tanh'),
        ("act_quantize", {"up": K}, r"up must have shape.*\(3, 4\)"),
        ("act_backward", {"g": K}, "g must have shape"),
        ("act_backward", {"dtype": torch.float32, "granularity": "tensor"}, "float32"),
        ("act_backward", {"dtype": torch.float32, "transpose": False}, "granularity"),
        ("norm_quantize", {"x": ONE}, "x must .*1 or more dimensions"),
        ("norm_quantize", {"weight": K[:3]}, r"weight .*= \(4,\), got \(3,\)"),
        ("norm_quantize", {"bias": X}, "bias must have shape"),
        ("norm_quantize", {"residual": K}, "residual must have shape"),
        *(
            ("norm_backward", {name: K[:3]}, f"{name} must have shape")
            for name in ("g", "weight", "mean", "rstd", "g_total")
        ),
        ("pack", {"bits": 3}, "bits must be 8, 4 or 2, got 3"),
        ("pack", {"seed": 2**63}, r"seed must be in \[-2\^63, 2\^63\), got 9223372036854775808"),
        ("pack", {"counter": 1.0}, "counter must be an int, got 1.0"),
        ("pack", {"offset": COUNTERS}, r"offset must have shape one number = \(1,\), got \(3,\)"),
        ("unpack", {"bits": 5}, "bits must be 8, 4 or 2, got 5"),
        ("unpack", {"shape": (-3,)}, "shape must have no negative size"),
        ("unpack", {"shape": (5,)}, r"codes .*\(5,\) in 4 bits = \(3,\)"),
        ("unpack", {"bits": 8}, r"codes .*in 8 bits = \(3,\), got \(2"),
        ("unpack", {"ranges": RANGES[:0]}, r"ranges .*\(1, 2\), got \(0, 2"),
        ("unpack", {"dtype": torch.float64}, "dtype must be float32, .*float64"),
        ("attention", {"q": X}, "q must be"),
        ("attention", {"k": torch.ones(2, 3, 7, 8)}, "heads of q must be a multiple"),
        ("attention", {"k": torch.ones(2, 2, 7, 4)}, "k must have shape"),
        ("attention", {"v": torch.ones(2, 2, 6, 8)}, "v must have shape"),
        ("attention_backward", {"g": torch.ones(1, 4, 5, 8)}, "g must have shape"),
        ("attention_backward", {"logsumexp": torch.ones(1, 4, 5)}, "logsumexp must have shape"),
        ("rotary", {"x": X}, "x must be"),
        ("rotary", {"x": torch.ones(2, 3, 5, 7)}, "x must be"),
        ("rotary", {"cos": X}, "cos must have shape"),
        ("rotary", {"sin": torch.ones(5, 3)}, "sin must have shape"),
        ("rotary", {"sin": torch.ones(5, 8)}, "sin must have shape"),
        ("rotary", {"cos": torch.ones(3, 5, 4)}, "cos must have shape"),
        ("rotary", {"k": torch.ones(2, 3, 4, 8)}, "k must have shape"),
        ("rotary", {"v": torch.ones(2, 3, 5, 6)}, "v must have shape"),
        ("rotary", {"v": torch.ones(2, 3, 5, 8).half()}, "v must have dtype"),
        ("scale_from_amax_", {"scale_inv": K[:2]}, "scale_inv must have shape"),
        ("scale_from_amax_", {"amax": X[:1]}, "amax must have shape"),
        ("scale_from_amax_", {"scale": ONE.expand(4)}, "scale is written in place"),
        ("scale_from_amax_", {"scale_inv": ONE.expand(4)}, "scale_inv is written in place"),
        ("scale_from_amax_", {"fmt": "int8"}, "fmt must be one of"),
        *(
            ("scale_from_amax_", {"margin": margin}, "margin must be an int")
            for margin in (65, -65, 0.5)
        ),
        ("inv_scale", {"scale": K}, "scale must hold one float32"),
        ("clip_coef", {"sum_sq": X.double().t()}, "sum_sq must be contiguous"),
        ("clip_coef", {"max_norm": 0.0}, "max_norm must"),
        ("clip_coef", {"max_norm": math.nan}, "max_norm must"),
        ("update_scale_", {"scale": K}, "scale must hold one float32"),
        ("update_scale_", {"found_inf": FLAG[:0]}, "found_inf must hold one float32"),
        ("update_scale_", {"counters": COUNTERS[:2]}, r"counters must have shape .* = \(3,\)"),
        *(
            ("sgd_", EIGHT_BITS | changes, message)
            for changes, message in (
                ({"state_scales": []}, r"momentum_buffers\[0\] is uint8, .*state_scales, got none"),
                ({"state_scales": [K] * 2}, r"state_scales .*one tensor per state and .*got 2"),
                ({"state_scales": [K[:3]]}, r"state_scales\[0\] must .*\(2,\).*\(3,\)"),
                ({"indices": ()}, r"bfloat16 or uint8 with indices .*, got uint8 without"),
            )
        ),
        *(
            (
                op,
                {OPS[op].states[-1] if key == "state" else key: value},
                message.replace("STATE", OPS[op].states[-1]),
            )
            for op in UPDATES
            for key, value, message in (
                ("params", T, "params must be a list of tensors, got Tensor"),
                ("params", [torch.ones(9).as_strided((2, 3), (1, 1))], r"params\[0\] is wr"),
                ("grads", [T, T], r"grads must have one tensor per param \(1\), got 2"),
                ("grads", [T[:2]], r"grads\[0\] must have shape"),
                ("state", [T, T], r"STATE must have one tensor per param \(1\), got 2"),
                ("state", T, "STATE must be a list of tensors, got Tensor"),
                ("state", [T[:2]], r"STATE\[0\] must have shape"),
                ("state", [T.bfloat16()], r"STATE\[0\] must have .*with indices"),
                ("steps", [T[:1]], "steps must be a torch.Tensor, got list"),
                ("steps", torch.zeros(2), r"steps must have shape .* = \(1,\)"),
                ("max_value", 0.0, "max_value must be positive"),
                ("stochastic_rounding", True, r"indices must have one number per param \(1"),
                ("indices", [-1], r"indices must be in \[0, 2\^30\)"),
                ("lr", T[:1].half(), "lr_tensor must hold one float32"),
            )
        ),
        ("update_delayed_scales_", {"amaxes": K}, "amaxes must be a list of tensors, got Tensor"),
        ("update_delayed_scales_", {"amaxes": []}, "amaxes must be as many as scales, 1, got 0"),
        ("update_delayed_scales_", {"fmt_max": [1.0] * 3}, "fmt_max must be as many as .*, got 3"),
        ("update_delayed_scales_", {"amax_histories": [X]}, r"must be \[L\] with L of 1 or more"),
        ("update_delayed_scales_", {"amax_histories": [K[:0]]}, r"\[L\] with L of 1 or more"),
        ("update_delayed_scales_", {"scales": [FLAG]}, r"scales\[0\] must have shape \[\] = \(\)"),
        ("update_delayed_scales_", {"amax_histories": [ONE.expand(4)]}, "must not share memory"),
        ("update_delayed_scales_", {"fmt_max": [0.0]}, "fmt_max must be positive and finite"),
        ("update_delayed_scales_", {"margin": 65}, "margin must be an int between -64 and 64"),
        *(
            (op, changes, message)
            for op in ("unscale_", "grad_stats_")
            for changes, message in (
                ({"grads": K}, "grads must be a list of tensors, got Tensor"),
                ({"grads": [K, 1.0]}, r"grads\[1\] must be a torch.Tensor, got float"),
                ({"found_inf": K}, "found_inf must hold one float32"),
            )
        ),
        *(
            ("unscale_", {"grads": [K, last]}, r"grads\[1\] is written in place")
            for last in (ONE.expand(4), torch.ones(6).as_strided((3, 3), (1, 1)))
        ),
        ("grad_stats_", {"grads": [K] * 2}, r"sum_sq must have shape .* = \(2,\)"),
        ("grad_stats_", {"grads": [K] * 2, "sum_sq": SUM.expand(2)}, "sum_sq must be contiguous"),
        ("grad_stats_", {"counts": torch.zeros(4).long()}, r"counts .*shape .* = \(1, 4\)"),
        ("grad_stats_", {"counts": torch.zeros(1, 8).long()[:, ::2]}, "counts must be contiguous"),
    ],
)
def test_values_shapes_and_formats(
    backend: str, op: str, changes: dict[str, Any], message: str
) -> None:
    if op in GOOD:
        args, call = GOOD[op] | changes, getattr(ops, op)
    else:
        args = dict(zip(OPS[op].arguments, arguments(op, dtype_of(op), "contiguous"), strict=True))
        args, call = args | changes, lambda **args: OPS[op](*args.values())
    kept = [(t, t.clone()) for a in args.values() for t in tensors(a) if not t.is_meta]
    with pytest.raises((ValueError, TypeError), match=f"^{op}(_mx)?: .*{message}"):
        call(**args)
    assert all(
        torch.equal(t.double(), before.double()) for t, before in kept if not t.isnan().any()
    )


def test_dequantize_names_the_field() -> None:
    with pytest.raises(TypeError, match=r"^dequantize: q must be a Quantized"):
        mixprec.dequantize(X)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^dequantize: q.data must be a torch.Tensor"):
        mixprec.dequantize(QUANTIZED._replace(data=None))
