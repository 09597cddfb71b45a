"""recurrent and its backward: a layer of an LSTM, a GRU or a plain recurrent network, all steps."""

from __future__ import annotations

from typing import Any

import torch

from ._dispatch import checks
from ._dispatch.op import Op
from ._reference import recurrent as reference

LOW = (torch.bfloat16, torch.float16)
GATES = {name: cell.gates for name, cell in reference.CELLS.items()}
Forward = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Backward = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _check_both(op: str, args: Any, rows: int, h: torch.Tensor, beside: torch.Tensor) -> None:
    """The weight, the cell and the steps of `rows` rows, for a state like h."""
    if args.cell not in GATES:
        raise ValueError(f"{op}: cell must be one of {', '.join(GATES)}, got {args.cell!r}")
    batch, units = h.shape
    checks.has_dtype(op, "weight", args.weight, LOW)
    checks.has_shape(op, "weight", args.weight, (GATES[args.cell] * units, units), "[G * H, H]")
    checks.on_device(op, "weight", args.weight, beside.device, "the rows")
    sizes = args.batch_sizes
    if sizes is None:
        if rows != 0 and (batch == 0 or rows % batch):
            raise ValueError(f"{op}: the rows must be a multiple of B = {batch}, got {rows}")
        return
    checks.has_dtype(op, "batch_sizes", sizes, (torch.int64,))
    if sizes.dim() != 1 or sizes.device.type not in ("cpu", "meta"):
        raise ValueError(f"{op}: batch_sizes must be [T] on the CPU, got {sizes.shape}")
    if not isinstance(sizes, torch._subclasses.FakeTensor) and sizes.device.type == "cpu":
        known = sizes.tolist()
        down = all(0 < b <= a for a, b in zip([batch, *known], known, strict=False))
        if not down or sum(known) != rows:
            raise ValueError(
                f"{op}: batch_sizes must not increase from B = {batch}, and their sum must be the "
                f"rows, {rows}, got {known}"
            )


def _matrix(op: str, name: str, x: torch.Tensor, meaning: str) -> None:
    checks.has_dtype(op, name, x, (torch.float32,))
    if x.dim() != 2:
        raise ValueError(f"{op}: {name} must be {meaning}, got shape {tuple(x.shape)}")


def _state(op: str, name: str, x: torch.Tensor, like: torch.Tensor, owner: str) -> None:
    checks.is_like(op, name, x, like, (torch.float32,), owner)


def _check(args: Any) -> None:
    op, x, h = "recurrent", args.x, args.h
    _matrix(op, "x", x, "[N, G * H]")
    _matrix(op, "h", h, "[B, H]")
    checks.on_device(op, "h", h, x.device, "x")
    _check_both(op, args, x.shape[0], h, x)
    shape = x.shape[0], GATES[args.cell] * h.shape[1]
    checks.has_shape(op, "x", x, shape, "[N, G * H]")
    if (args.c is None) == (args.cell == "lstm"):
        raise ValueError(f"{op}: c must be a tensor for an LSTM, None for others")
    if args.c is not None:
        _state(op, "c", args.c, h, "h")
    if args.bias is not None:
        if args.cell != "gru":
            raise ValueError(f"{op}: bias must be None except for a GRU")
        checks.has_dtype(op, "bias", args.bias, (torch.float32,))
        checks.has_shape(op, "bias", args.bias, (h.shape[1],), "[H]")
        checks.on_device(op, "bias", args.bias, x.device, "x")
    if args.out_dtype not in checks.FLOATS:
        raise ValueError(f"{op}: out_dtype must be fp32, bf16 or fp16, got {args.out_dtype}")


def _check_backward(args: Any) -> None:
    op, g, g_h = "recurrent_backward", args.g, args.g_h
    _matrix(op, "g", g, "[N, H]")
    _matrix(op, "g_h", g_h, "[B, H]")
    checks.on_device(op, "g_h", g_h, g.device, "g")
    _check_both(op, args, g.shape[0], g_h, g)
    checks.has_shape(op, "g", g, (g.shape[0], g_h.shape[1]), "[N, H]")
    if args.g_c is not None:
        _state(op, "g_c", args.g_c, g_h, "g_h")
    shape = g.shape[0], reference.CELLS[args.cell].saved * g.shape[1]
    checks.has_dtype(op, "saved", args.saved, (torch.float32,))
    checks.has_shape(op, "saved", args.saved, shape, "[N, S * H]")
    checks.on_device(op, "saved", args.saved, g.device, "g")


def _fake(args: Any) -> Forward:
    rows, (batch, units) = args.x.shape[0], args.h.shape
    kept = rows if args.save else 0
    numbers = reference.CELLS[args.cell].saved
    return (
        args.x.new_empty((rows, units), dtype=args.out_dtype),
        args.h.new_empty((batch, units)),
        args.h.new_empty((0 if args.c is None else batch, units)),
        args.x.new_empty((kept, units), dtype=args.weight.dtype),
        args.x.new_empty((kept, numbers * units)),
    )


def _fake_backward(args: Any) -> Backward:
    (batch, units), gates = args.g_h.shape, GATES[args.cell] * args.g.shape[1]
    return (
        args.g.new_empty((args.g.shape[0], gates)),
        args.g.new_empty((args.g.shape[0], gates), dtype=args.weight.dtype),
        args.g_h.new_empty((batch, units)),
        args.g_h.new_empty((batch if args.cell == "lstm" else 0, units)),
    )


recurrent_op = Op(
    "recurrent",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor h, Tensor? c, Tensor? batch_sizes, str cell, "
    "bool reverse, bool save, ScalarType out_dtype) -> "
    "(Tensor out, Tensor h_n, Tensor c_n, Tensor h_prev, Tensor saved)",
    reference=reference.forward,
    fake=_fake,
    check=_check,
)
recurrent_backward_op = Op(
    "recurrent_backward",
    "(Tensor g, Tensor g_h, Tensor? g_c, Tensor weight, Tensor saved, Tensor? batch_sizes, "
    "str cell, bool reverse) -> (Tensor dx, Tensor dgates, Tensor dh, Tensor dc)",
    reference=reference.backward,
    fake=_fake_backward,
    check=_check_backward,
)


def recurrent(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    h: torch.Tensor,
    c: torch.Tensor | None,
    batch_sizes: torch.Tensor | None,
    cell: str,
    *,
    reverse: bool = False,
    save: bool = True,
    out_dtype: torch.dtype = torch.float32,
) -> Forward:
    """Return (out, h_n, c_n, h_prev, saved): all steps of a recurrent layer in one direction.

    x: fp32 [N, G * H], the products of the input with its weights, with biases; its rows are those
    of step 0, of step 1, and so on: B for each, or batch_sizes, int64 [T] on the CPU, which do not
    increase. weight: bf16 or fp16 [G * H, H]. h, c: fp32 [B, H], the state at the start; c is for
    an LSTM. cell: "lstm", "gru", "tanh" or "relu", with the gates and formulas of torch.nn. bias:
    fp32 [H], of the gate n of a GRU. reverse: from the last step to the first.

        s_t = round(h_{t-1}) @ weight^T        FP32 sums, h rounded to weight's dtype
        h_t, c_t = step(x_t + s_t, c_{t-1})    in FP32

    out: [N, H] of out_dtype, h_t rounded once; h_n, c_n: fp32 [B, H], the state at the end (c_n is
    [0, H] without c); for backward, empty if not `save`: h_prev [N, H], the rounded h_{t-1}, and
    saved, fp32 [N, S * H], the values of the gates and what else the derivative reads. Subnormal
    bf16 numbers may count as zero. TypeError or ValueError names an invalid argument.
    """
    for name, t in (("x", x), ("weight", weight), ("h", h)):
        checks.is_tensor("recurrent", name, t)
    checks.needs_no_grad("recurrent", "use mixprec.nn.LSTM, GRU or RNN", x, weight, h)
    args = x, weight, bias, h, c, batch_sizes, cell, reverse, save, out_dtype
    out, h_n, c_n, h_prev, saved = recurrent_op(*args)
    return out, h_n, c_n, h_prev, saved


def recurrent_backward(
    g: torch.Tensor,
    g_h: torch.Tensor,
    g_c: torch.Tensor | None,
    weight: torch.Tensor,
    saved: torch.Tensor,
    batch_sizes: torch.Tensor | None,
    cell: str,
    *,
    reverse: bool = False,
) -> Backward:
    """Return (dx, dgates, dh, dc) of `recurrent`, from the gradients of out, h_n and c_n.

    g: fp32 [N, H]; g_h, g_c: fp32 [B, H], None being zeros; the rest as there. dx: fp32
    [N, G * H], the gradient of x; dgates: the same of the sums s, rounded to weight's dtype, from
    which the gradient of h_{t-1} is dgates_t @ weight, with FP32 sums; that of the weight is
    dgates^T @ h_prev. dh, dc: fp32 [B, H], of the state at the start. TypeError or ValueError
    names an invalid argument.
    """
    for name, t in (("g", g), ("g_h", g_h), ("weight", weight), ("saved", saved)):
        checks.is_tensor("recurrent_backward", name, t)
    checks.needs_no_grad("recurrent_backward", "call it under torch.no_grad()", g, g_h, weight)
    args = g, g_h, g_c, weight, saved, batch_sizes, cell, reverse
    dx, dgates, dh, dc = recurrent_backward_op(*args)
    return dx, dgates, dh, dc
