"""norm_quantize and act_quantize with their backward ops, on the CPU and on the GPU, against the
same in torch: the norm or the activation, the cast, and autograd."""

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
from .quantize import in_torch
from .registry import DTYPES, Workload, case, times_faster

CPU_SHAPE, GPU_SHAPE = (1024, 2048), (16384, 4096)
CPU_CASTS, GPU_CASTS = (("fp32", "bf16"), ("bf16", "e4m3")), (("bf16", "bf16"), ("bf16", "e4m3"))
OUT = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
EPS = 1e-5
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu2": lambda x: functional.relu(x).square(),
}
Tensors = tuple[torch.Tensor, ...]
# What both passes of ours give for g and the matrices that y is made of; y in torch; torch's leaves
# for these matrices; and whether the gradients of the matrices are cast as well.
Layer = tuple[
    Callable[[Tensors], Tensors], Callable[..., torch.Tensor], Callable[[Tensors], Tensors], bool
]


def _cast(out: torch.dtype) -> Cast:
    """To FP8 with the transpose, which the backward pass needs."""
    return Cast(out, transpose=out.itemsize == 1)


def _in_torch(on_gpu: bool, out: torch.dtype, y: torch.Tensor) -> Any:
    if out == torch.bfloat16:
        return y.to(out)
    if on_gpu:
        return in_torch("tensor", None, True, y)
    return mixprec.quantize(y, out, transpose=True)


def _norm(layer: bool, width: int, dtype: torch.dtype, out: torch.dtype, where: str) -> Layer:
    weight, bias = (device.randn(width, seed=seed, on=where) for seed in (2, 3))
    low = [t.to(dtype).requires_grad_() for t in ((weight, bias) if layer else (weight,))]

    def ours(given: Tensors) -> Tensors:
        g, x = given
        add = bias if layer else None
        forward = norm_quantize_op(x, None, weight, add, EPS, layer, *_cast(out))
        return *forward, *norm_backward_op(g, x, weight, *forward[6:], None, layer)

    norm = functional.layer_norm if layer else functional.rms_norm
    return (
        ours,
        lambda x, *params: norm(x, (width,), *params, eps=EPS),
        lambda matrices: (*matrices, *low),
        False,
    )


def _act(
    kind: str, gate: bool, width: int, dtype: torch.dtype, out: torch.dtype, where: str
) -> Layer:
    def ours(given: Tensors) -> Tensors:
        g, x, *others = given
        up = others[0] if gate else None
        forward = act_quantize_op(x, up, kind, *_cast(out))
        return *forward, *act_backward_op(g, x, up, kind, *_cast(out))[: 10 if gate else 5]

    def plain(x: torch.Tensor, *up: torch.Tensor) -> torch.Tensor:
        y = ACTIVATIONS[kind](x)
        return y * up[0] if up else y

    return ours, plain, lambda matrices: matrices, True


def _workload(
    on_gpu: bool, make: Callable[..., Layer], op: str, count: int, dtype: torch.dtype,
    out: torch.dtype,
) -> Workload:  # fmt: skip
    """count: of the matrices that y is made of."""
    m, k = device.sized(*GPU_SHAPE, tiny=256) if on_gpu else CPU_SHAPE
    where = device.where(on_gpu)
    ours, formula, leaves_of, casts_grads = make(k, dtype, out, where)
    cast = partial(_in_torch, on_gpu, out)

    def inputs(i: int) -> Tensors:
        seeds = range(4 * i, 4 * i + count + 1)
        return tuple(device.randn(m, k, dtype=dtype, seed=seed, on=where) for seed in seeds)

    def forward(*leaves: torch.Tensor) -> Any:
        y = formula(*leaves)
        return y, cast(y.detach())

    def plain(forward: Callable[..., Any], cast: Callable[..., Any], given: Tensors) -> Any:
        g, *matrices = given
        leaves = leaves_of(tuple(x.detach().requires_grad_() for x in matrices))
        y, q = forward(*leaves)
        grads = torch.autograd.grad(y, leaves, g)
        return q, [cast(grad) for grad in grads] if casts_grads else grads

    baselines = {"torch eager" if on_gpu else "torch and quantize": partial(plain, forward, cast)}
    if on_gpu:
        compiled = device.compiled(forward), device.compiled(cast)
        baselines["torch.compile"] = partial(plain, *compiled)
    return Workload(
        ours,
        baselines,
        partial(verify.same_as_reference, lambda: ours(inputs(0))),
        inputs,
        ops=(f"{op}_quantize", f"{op}_backward") if on_gpu else (),
        # Two bytes an element of what is read, forward and backward, and of what is written.
        bytes=2.0 * (3 * count + 2) * m * k if on_gpu else 0.0,
    )


_LAYERS: dict[str, tuple[Callable[..., Layer], int, str, bool]] = {
    # how y is made, of so many matrices, what it is, whether it is measured on a GPU too
    "norm_quantize/rms": (partial(_norm, False), 1, "RMSNorm", True),
    "norm_quantize/layer": (partial(_norm, True), 1, "LayerNorm", True),
    "act_quantize/swiglu": (partial(_act, "silu", True), 2, "silu(x) * up", True),
    "act_quantize/gelu": (partial(_act, "gelu", False), 1, "gelu", False),
    "act_quantize/gelu_tanh": (partial(_act, "gelu_tanh", False), 1, "gelu_tanh", False),
    "act_quantize/relu2": (partial(_act, "relu2", False), 1, "relu2", True),
}
for _name, (_make, _count, _what, _too) in _LAYERS.items():
    for _on_gpu in (False, True) if _too else (False,):
        _shape = GPU_SHAPE if _on_gpu else CPU_SHAPE
        for _from, _to in GPU_CASTS if _on_gpu else CPU_CASTS:
            _size = f"/{_shape[0]}x{_shape[1]}" if _on_gpu else ""
            case(
                f"{'cuda/' if _on_gpu else ''}{_name}/{_from}-{_to}{_size}",
                f"{_what} and cast, {_from} -> {_to}, forward and backward, "
                f"{_shape[0]} x {_shape[1]}",
                times_faster(1.0 if _on_gpu else 1.5),
                partial(_workload, _on_gpu, _make, _name.split("_")[0], _count, DTYPES[_from],
                        OUT[_to]),
                quick=_on_gpu or _from == "bf16",
            )  # fmt: skip
