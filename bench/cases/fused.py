"""norm_quantize and act_quantize with their backward ops, on the CPU, against the same in torch:
the norm or the activation, the cast, and autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

import mixprec
from mixprec.ops._dispatch.casts import Cast
from mixprec.ops.act_quantize import act_backward_op, act_quantize_op
from mixprec.ops.norm_quantize import norm_backward_op, norm_quantize_op

from .. import device, verify
from .registry import DTYPES, Workload, case, times_faster

SHAPE = (1024, 2048)
CASTS = ("fp32", "bf16"), ("bf16", "e4m3")
OUT = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
EPS = 1e-5
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu2": lambda x: functional.relu(x).square(),
}
Tensors = tuple[torch.Tensor, ...]


def _cast(out: torch.dtype) -> Cast:
    """To FP8 with the transpose, which the backward pass needs."""
    return Cast(out, transpose=out.itemsize == 1)


def _in_torch(y: torch.Tensor, out: torch.dtype) -> Any:
    if out == torch.bfloat16:
        return y.to(out)
    return mixprec.quantize(y.detach(), out, transpose=True)


def _norm(layer_norm: bool, dtype: torch.dtype, out: torch.dtype) -> Workload:
    weight, bias = (device.randn(SHAPE[1], seed=seed, on="cpu") for seed in (2, 3))
    low = [t.to(dtype).requires_grad_() for t in ((weight, bias) if layer_norm else (weight,))]

    def ours(given: Tensors) -> Tensors:
        x, g = given
        add = bias if layer_norm else None
        forward = norm_quantize_op(x, None, weight, add, EPS, layer_norm, *_cast(out))
        return *forward, *norm_backward_op(g, x, weight, *forward[6:], None, layer_norm)

    def plain(given: Tensors) -> Any:
        x, g = given
        leaves = [x.detach().requires_grad_(), *low]
        norm = functional.layer_norm if layer_norm else functional.rms_norm
        y = norm(leaves[0], SHAPE[1:], *leaves[1:], eps=EPS)
        return _in_torch(y, out), torch.autograd.grad(y, leaves, g)

    return _workload(ours, plain, dtype, 2)


def _act(kind: str, gate: bool, dtype: torch.dtype, out: torch.dtype) -> Workload:
    def ours(given: Tensors) -> Tensors:
        g, x, *others = given
        up = others[0] if gate else None
        forward = act_quantize_op(x, up, kind, *_cast(out))
        return *forward, *act_backward_op(g, x, up, kind, *_cast(out))[: 10 if gate else 5]

    def plain(given: Tensors) -> Any:
        g, *rest = given
        leaves = [t.detach().requires_grad_() for t in rest]
        y = ACTIVATIONS[kind](leaves[0])
        y = y * leaves[1] if gate else y
        grads = torch.autograd.grad(y, leaves, g)
        return _in_torch(y, out), [_in_torch(t, out) for t in grads]

    return _workload(ours, plain, dtype, 3 if gate else 2)


def _workload(
    ours: Callable[[Tensors], Tensors],
    plain: Callable[[Tensors], Any],
    dtype: torch.dtype,
    count: int,
) -> Workload:
    given = tuple(device.randn(*SHAPE, dtype=dtype, seed=i, on="cpu") for i in range(count))
    check = partial(verify.same_as_reference, lambda: ours(given))
    return Workload(partial(ours, given), {"torch and quantize": partial(plain, given)}, check)


def _cases(name: str, what: str, make: Callable[[torch.dtype, torch.dtype], Workload]) -> None:
    for of_x, of_y in CASTS:
        case(
            f"{name}/{of_x}-{of_y}",
            f"{what}, {of_x} -> {of_y}, forward and backward, {SHAPE[0]} x {SHAPE[1]}",
            times_faster(1.5),
            partial(make, DTYPES[of_x], OUT[of_y]),
            quick=of_x == "bf16",
        )


_cases("norm_quantize/rms", "RMSNorm and cast", partial(_norm, False))
_cases("norm_quantize/layer", "LayerNorm and cast", partial(_norm, True))
_cases("act_quantize/swiglu", "silu(x) * up and cast", partial(_act, "silu", True))
for _kind in ("gelu", "gelu_tanh", "relu2"):
    _cases(f"act_quantize/{_kind}", f"{_kind} and cast", partial(_act, _kind, False))
