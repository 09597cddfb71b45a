"""norm_quantize, act_quantize and their backward ops on the GPU, each alone, against the same
formula in torch, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from mixprec.ops._dispatch.casts import Cast
from mixprec.ops.act_quantize import act_backward_op, act_quantize_op
from mixprec.ops.norm_quantize import norm_backward_op, norm_quantize_op

from .. import device, verify
from .fused import ACTIVATIONS, EPS, OUT
from .quantize import _cast
from .registry import Workload, case, times_faster

SHAPE = (16384, 4096)
BF16 = torch.bfloat16
Tensors = tuple[torch.Tensor, ...]
Formula = Callable[[Tensors], Any]


def _rounded(y: torch.Tensor, out: torch.dtype) -> Any:
    """bf16, or E4M3 with the scale of this y, and the transpose."""
    if out == BF16:
        return y.to(out)
    q = _cast(y, 0, 0, None)
    return *q, q[0].t().contiguous()


def _norm(x: torch.Tensor, layer: bool) -> Tensors:
    """Normalized rows, their mean (of zeros in RMSNorm) and 1 / std, in FP32."""
    wide = x.float()
    mean = wide.mean(-1, keepdim=True) if layer else torch.zeros_like(wide[:, :1])
    rstd = ((wide - mean).square().mean(-1, keepdim=True) + EPS).rsqrt()
    return (wide - mean) * rstd, mean, rstd


def _norm_forward(layer: bool, out: torch.dtype) -> tuple[Formula, Formula]:
    def ours(given: Tensors) -> Any:
        x, weight = given
        to = Cast(out, transpose=out != BF16)
        return norm_quantize_op(x, None, weight, weight if layer else None, EPS, layer, *to)

    def plain(given: Tensors) -> Any:
        x, weight = given
        y = _norm(x, layer)[0] * weight
        return _rounded(y + weight if layer else y, out)

    return ours, plain


def _norm_backward(layer: bool, _: torch.dtype) -> tuple[Formula, Formula]:
    def ours(given: Tensors) -> Any:
        g, x, weight, mean, rstd = given
        return norm_backward_op(g, x, weight, mean, rstd, None, layer)

    def plain(given: Tensors) -> Any:
        g, x, weight, mean, rstd = given
        normal = (x.float() - mean[:, None] if layer else x.float()) * rstd[:, None]
        gw = g.float() * weight
        dx = gw - normal * (gw * normal).mean(-1, keepdim=True)
        dx = dx - gw.mean(-1, keepdim=True) if layer else dx
        return (dx * rstd[:, None]).to(x.dtype), (g * normal).sum(0), g.float().sum(0)

    return ours, plain


def _act_forward(kind: str, gate: bool, out: torch.dtype) -> tuple[Formula, Formula]:
    def ours(given: Tensors) -> Any:
        return act_quantize_op(
            given[0], given[1] if gate else None, kind, *Cast(out, transpose=out != BF16)
        )

    def plain(given: Tensors) -> Any:
        y = ACTIVATIONS[kind](given[0].float())
        return _rounded(y * given[1] if gate else y, out)

    return ours, plain


def _act_backward(kind: str, gate: bool, out: torch.dtype) -> tuple[Formula, Formula]:
    slopes = {
        "silu": lambda x, s: s * (1.0 + x * (1.0 - s)),
        "relu2": lambda x, s: 2.0 * x.relu(),
    }

    def ours(given: Tensors) -> Any:
        g, x, *up = given
        to = Cast(out, transpose=out != BF16)
        return act_backward_op(g, x, up[0] if gate else None, kind, *to)[: 10 if gate else 5]

    def plain(given: Tensors) -> Any:
        g, x, *up = (t.float() for t in given)
        slope = slopes[kind](x, x.sigmoid())
        if not gate:
            return _rounded(g * slope, out)
        return _rounded(g * up[0] * slope, out), _rounded(g * ACTIVATIONS[kind](x), out)

    return ours, plain


def _workload(
    op: str, make: Callable[[torch.dtype], tuple[Formula, Formula]], counts: tuple[int, int],
    out: torch.dtype,
) -> Workload:  # fmt: skip
    """counts: of the matrices that are read, and of those that are written, twice if transposed."""
    m, k = device.sized(*SHAPE, tiny=256)
    ours, plain = make(out)

    def inputs(i: int) -> Tensors:
        read = [device.randn(m, k, dtype=BF16, seed=4 * i + j) for j in range(counts[0])]
        if not op.startswith("norm"):
            return tuple(read)
        weight = device.randn(k, seed=9) + 1.0
        if op == "norm_quantize":
            return *read, weight
        with torch.no_grad():
            _, mean, rstd = _norm(read[1], layer=True)
        return *read, weight, mean.flatten(), rstd.flatten()

    written = counts[1] * (2 if out == BF16 else 2 * out.itemsize)
    return Workload(
        ours,
        device.eager_and_compiled(plain),
        partial(verify.same_as_reference, lambda: ours(inputs(0))),
        inputs,
        ops=(op,),
        bytes=float((2 * counts[0] + written) * m * k),
    )


def _register(op: str, name: str, what: str, make: Any, counts: tuple[int, int]) -> None:
    for to in ("bf16",) if op == "norm_backward" else OUT:
        case(
            f"cuda/{op}/{name}/bf16-{to}/{SHAPE[0]}x{SHAPE[1]}",
            f"{what}, bf16 -> {to}{', with the transpose' * (to != 'bf16')}",
            times_faster(1.0),
            partial(_workload, op, make, counts, OUT[to]),
            quick=True,
        )


for _layer, _name, _what in ((False, "rms", "RMSNorm"), (True, "layer", "LayerNorm")):
    _register("norm_quantize", _name, _what, partial(_norm_forward, _layer), (1, 1))
    _of = f"the gradients of {_what}'s input and parameters"
    _register("norm_backward", _name, _of, partial(_norm_backward, _layer), (2, 1))
for _kind, _name, _gate in (("silu", "swiglu", True), ("relu2", "relu2", False)):
    _what = "silu(x) * up" if _gate else "relu(x)^2"
    _register("act_quantize", _name, _what, partial(_act_forward, _kind, _gate), (1 + _gate, 1))
    _of = f"the gradients of {_what}"
    _counts = (3, 2) if _gate else (2, 1)
    _register("act_backward", _name, _of, partial(_act_backward, _kind, _gate), _counts)
