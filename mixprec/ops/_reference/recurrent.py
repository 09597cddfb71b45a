"""recurrent and its backward in plain torch: a loop over steps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch

Tensors = tuple[torch.Tensor, ...]


class Cell(NamedTuple):
    """step(x, s, h, c, bias) -> the new h, the new c, what is saved; x [b, G, H] are the products
    of the input and s those of h. grads(saved, dh, dc) -> the gradients of x, those of s, and what
    remains of dh and dc beside the products. saved: how many numbers a unit saves.
    """

    gates: int
    saved: int
    step: Callable[..., tuple[torch.Tensor, torch.Tensor | None, Tensors]]
    grads: Callable[..., tuple[Tensors, Tensors, torch.Tensor | None, torch.Tensor | None]]


def _lstm(x: Any, s: Any, h: Any, c: Any, bias: Any) -> Any:
    i, f, g, o = (x + s).unbind(1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new = f * c + i * g
    return o * new.tanh(), new, (i, f, g, o, c)


def _lstm_grads(saved: Tensors, dh: Any, dc: Any) -> Any:
    i, f, g, o, c = saved
    t = (f * c + i * g).tanh()
    dc = dc + dh * o * (1 - t * t)
    grads = dc * g * i * (1 - i), dc * c * f * (1 - f), dc * i * (1 - g * g), dh * t * o * (1 - o)
    return grads, grads, None, dc * f


def _gru(x: Any, s: Any, h: Any, c: Any, bias: Any) -> Any:
    (x_r, x_z, x_n), (s_r, s_z, q) = x.unbind(1), s.unbind(1)
    q = q if bias is None else q + bias
    r, z = (x_r + s_r).sigmoid(), (x_z + s_z).sigmoid()
    n = (x_n + r * q).tanh()
    rest = h - n
    return n + z * rest, None, (r, z, n, q, rest)


def _gru_grads(saved: Tensors, dh: Any, dc: Any) -> Any:
    r, z, n, q, rest = saved
    dn = dh * (1 - z) * (1 - n * n)
    gates = dn * q * r * (1 - r), dh * rest * z * (1 - z)
    return (*gates, dn), (*gates, dn * r), dh * z, None


def _tanh(x: Any, s: Any, h: Any, c: Any, bias: Any) -> Any:
    y = (x + s)[:, 0].tanh()
    return y, None, (y,)


def _tanh_grads(saved: Tensors, dh: Any, dc: Any) -> Any:
    d = dh * (1 - saved[0] * saved[0])
    return (d,), (d,), None, None


def _relu(x: Any, s: Any, h: Any, c: Any, bias: Any) -> Any:
    y = (x + s)[:, 0].relu()
    return y, None, (y,)


def _relu_grads(saved: Tensors, dh: Any, dc: Any) -> Any:
    d = torch.where(saved[0] <= 0, 0.0, dh)
    return (d,), (d,), None, None


CELLS = {
    "lstm": Cell(4, 5, _lstm, _lstm_grads),
    "gru": Cell(3, 5, _gru, _gru_grads),
    "tanh": Cell(1, 1, _tanh, _tanh_grads),
    "relu": Cell(1, 1, _relu, _relu_grads),
}


def _rows(rows: int, batch: int, batch_sizes: torch.Tensor | None, reverse: bool) -> list[slice]:
    """The rows of each step, in the order in which the steps are computed."""
    if batch_sizes is None:
        sizes = [batch] * (rows // batch if batch else 0)
    else:
        sizes = batch_sizes.tolist()
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    steps = [slice(a, b) for a, b in pairwise(ends)]
    return steps[::-1] if reverse else steps


def forward(args: Any) -> Tensors:
    cell, low, (batch, units) = CELLS[args.cell], args.weight.dtype, args.h.shape
    rows, kept = args.x.shape[0], args.x.shape[0] if args.save else 0
    h, c = args.h.clone(), args.h.new_zeros(0, units) if args.c is None else args.c.clone()
    out = args.x.new_empty((rows, units), dtype=args.out_dtype)
    h_prev = args.x.new_empty((kept, units), dtype=low)
    saved = args.x.new_empty((kept, cell.saved * units))
    for step in _rows(rows, batch, args.batch_sizes, args.reverse):
        b = step.stop - step.start
        before = h[:b].to(low)
        sums = (before.float() @ args.weight.float().t()).unflatten(1, (cell.gates, units))
        x = args.x[step].unflatten(1, (cell.gates, units))
        new, new_c, keep = cell.step(x, sums, h[:b], c[:b], args.bias)
        if args.save:
            h_prev[step], saved[step] = before, torch.cat(keep, 1)
        h[:b] = out[step] = new
        if new_c is not None:
            c[:b] = new_c
    return out, h, c, h_prev, saved


def backward(args: Any) -> Tensors:
    cell, low, (batch, units) = CELLS[args.cell], args.weight.dtype, args.g_h.shape
    rows = args.g.shape[0]
    dh, dc = args.g_h.clone(), args.g.new_zeros(0, units)
    if args.cell == "lstm":
        dc = torch.zeros_like(dh) if args.g_c is None else args.g_c.clone()
    dx = args.g.new_empty((rows, cell.gates * units))
    dgates = torch.empty_like(dx, dtype=low)
    for step in _rows(rows, batch, args.batch_sizes, not args.reverse):
        b = step.stop - step.start
        saved = args.saved[step].chunk(cell.saved, 1)
        dx_step, ds_step, rest, new_dc = cell.grads(saved, args.g[step] + dh[:b], dc[:b])
        dx[step], dgates[step] = torch.cat(dx_step, 1), torch.cat(ds_step, 1)
        dh[:b] = dgates[step].float() @ args.weight.float()
        if rest is not None:
            dh[:b] += rest
        if new_dc is not None:
            dc[:b] = new_dc
    return dx, dgates, dh, dc
