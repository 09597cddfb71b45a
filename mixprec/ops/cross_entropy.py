"""cross_entropy and its gradient for a tile of the logits: some columns of all classes."""

from __future__ import annotations

from typing import Any

import torch

from ._dispatch import checks
from ._dispatch.op import Op
from ._reference.rounding import exp_fp32

COLUMNS = 4  # of the statistics of a row: see `cross_entropy`


def _exp(d: torch.Tensor) -> torch.Tensor:
    """e^d as csrc/math/cross_entropy.h has it: 0 below -87, e^87 above 87; NaN stays."""
    return torch.where(d < -87.0, 0.0, exp_fp32(torch.where(d > 87.0, 87.0, d)))


def _tanh(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    """tanh(logits / softcap)"""
    v = logits * (2.0 / softcap)
    u = v * 0.5
    q = u * u
    series = ((q * (-17.0 / 315.0) + 2.0 / 15.0) * q - 1.0 / 3.0) * q * u + u
    return torch.where(q < 0.015625, series, 1.0 - 2.0 / (_exp(v) + 1.0))


def cross_entropy_reference(
    logits: torch.Tensor, target: torch.Tensor, rows: torch.Tensor, first: int, softcap: float
) -> torch.Tensor:
    x = logits if softcap == 0 else _tanh(logits, softcap) * softcap
    maximum, total, picked, sums = rows.unbind(1)
    if logits.shape[1] == 0:
        return rows.clone()
    largest = torch.where(x.isnan(), -torch.inf, x).amax(1).maximum(maximum)
    shift = torch.where(largest == -torch.inf, 0.0, largest)
    total = total * _exp(maximum - shift) + _exp(x - shift[:, None]).sum(1)
    column = target - first
    inside = (column >= 0) & (column < logits.shape[1])
    own = x.gather(1, torch.where(inside, column, 0)[:, None])[:, 0]
    return torch.stack([largest, total, torch.where(inside, own, picked), sums + x.sum(1)], 1)


def cross_entropy_backward_reference(args: Any) -> torch.Tensor:
    x, column = args.logits.contiguous(), args.target - args.first
    tanh = None if args.softcap == 0 else _tanh(x, args.softcap)
    x = x if tanh is None else tanh * args.softcap
    factor = args.logsumexp * (2.0 * args.z_loss) + 1.0
    g = _exp(x - args.logsumexp[:, None]) * factor[:, None] - args.label_smoothing / args.classes
    own = torch.arange(x.shape[1], device=x.device) == column[:, None]
    g = g - own.float() * (1.0 - args.label_smoothing)
    if tanh is not None:
        g = g * (1.0 - tanh * tanh)
    weight = args.weight[:, None]
    return torch.where(weight == 0.0, 0.0, g * weight).to(args.out_dtype)


def _check(op: str, args: Any) -> None:
    logits = args.logits
    checks.has_dtype(op, "logits", logits, (torch.float32,))
    if logits.dim() != 2:
        raise ValueError(f"{op}: logits must be [N, T], got shape {tuple(logits.shape)}")
    n, fp32 = logits.shape[0], (torch.float32,)
    checks.matches(op, "target", args.target, (torch.int64,), logits, (n,), "[N]", "logits")
    if op == "cross_entropy":
        checks.matches(op, "rows", args.rows, fp32, logits, (n, COLUMNS), "[N, 4]", "logits")
        return
    for name in ("logsumexp", "weight"):
        checks.matches(op, name, getattr(args, name), fp32, logits, (n,), "[N]", "logits")
    checks.is_float(op, "out_dtype", args.out_dtype)


cross_entropy_op = Op(
    "cross_entropy",
    "(Tensor logits, Tensor target, Tensor rows, int first, float softcap) -> Tensor",
    reference=cross_entropy_reference,
    fake=lambda logits: logits.new_empty((logits.shape[0], COLUMNS)),
    check=lambda args: _check("cross_entropy", args),
    triton="cross_entropy",
)
cross_entropy_backward_op = Op(
    "cross_entropy_backward",
    "(Tensor logits, Tensor target, Tensor logsumexp, Tensor weight, int first, int classes, "
    "float label_smoothing, float z_loss, float softcap, ScalarType out_dtype) -> Tensor",
    reference=cross_entropy_backward_reference,
    fake=lambda logits, out_dtype: logits.new_empty(logits.shape, dtype=out_dtype),
    check=lambda args: _check("cross_entropy_backward", args),
    triton="cross_entropy",
)


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    rows: torch.Tensor,
    first: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Return the statistics of each row, [N, 4], after this tile: the maximum m of its logits, the
    sum of e^(logit - m), the logit of its target (unchanged if another tile has it), and the sum of
    logits.

    logits: fp32 [N, T], the classes [first, first + T); target: int64 [N]; rows: fp32 [N, 4], those
    of the tiles before. softcap: 0, or c of c * tanh(logit / c), which takes the logit's place.

    Before the first tile rows are -inf, 0, NaN, 0. mixprec.functional.linear_cross_entropy makes a
    loss of them, and has a derivative. TypeError or ValueError names an invalid argument.
    """
    hint = "use mixprec.functional.linear_cross_entropy"
    checks.needs_no_grad("cross_entropy", hint, logits, rows)
    return cross_entropy_op(logits, target, rows, first, softcap)


def cross_entropy_backward(
    logits: torch.Tensor,
    target: torch.Tensor,
    logsumexp: torch.Tensor,
    weight: torch.Tensor,
    first: int,
    classes: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return the gradient of the loss of each row to its logits, times weight [N], in out_dtype:

        g = ((p * (1 + 2 * z_loss * logsumexp) - label_smoothing / classes)
             - (1 - label_smoothing) [class is target]) * weight,   p = e^(logit - logsumexp)

    and times 1 - tanh(logit / c)^2 with a softcap c; 0 where the weight is 0. FP32, in this order,
    then one rounding. logsumexp, weight: fp32 [N]; the rest as in `cross_entropy`.
    TypeError or ValueError names an invalid argument.
    """
    op, hint = "cross_entropy_backward", "call it under torch.no_grad()"
    checks.needs_no_grad(op, hint, logits, logsumexp, weight)
    settings = first, classes, label_smoothing, z_loss, softcap, out_dtype
    return cross_entropy_backward_op(logits, target, logsumexp, weight, *settings)
