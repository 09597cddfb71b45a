"""LSTM, GRU and RNN, forward and backward, against those of torch in FP32."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import mixprec

from .. import device, verify
from .registry import Workload, both_passes, case, times_the_time

# steps, rows of a batch, inputs, units
SHAPES = ((32, 16, 128, 128), (64, 32, 256, 256), (128, 8, 512, 512), (256, 4, 64, 64))
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
TARGET = 1.2
# In bf16; the rounding of the state repeats at every step.
SQNR = 35.0


def _pass(model: nn.Module, x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaves = [x, *model.parameters()]
    return both_passes(lambda: model(x)[0], leaves, g)


def _workload(kind: str, shape: tuple[int, int, int, int]) -> Workload:
    steps, rows, inputs, units = shape
    torch.manual_seed(0)
    torchs = KINDS[kind](inputs, units)
    ours = mixprec.convert(KINDS[kind](inputs, units), "bf16")
    ours.load_state_dict(torchs.state_dict())
    x = device.randn(steps, rows, inputs, seed=1, on="cpu").requires_grad_()
    g = device.randn(steps, rows, units, seed=2, on="cpu")
    run = partial(_pass, ours, x, g)

    def check() -> str | None:
        wide = KINDS[kind](inputs, units).double()
        wide.load_state_dict(torchs.state_dict())
        exact = _pass(wide, x.detach().double().requires_grad_(), g.double())
        names = ("y", "grad of x", *(f"grad of {name}" for name, _ in torchs.named_parameters()))
        return verify.sqnr_at_least(dict.fromkeys(names, SQNR), run(), exact)

    gates = torchs.weight_ih_l0.shape[0]
    return Workload(
        run,
        {"torch fp32": partial(_pass, torchs, x, g)},
        check,
        flops=3 * 2.0 * steps * rows * (inputs + units) * gates,
    )


for _kind in KINDS:
    for _shape in SHAPES:
        _t, _b, _k, _h = _shape
        case(
            f"recurrent/{_kind}/{_t}x{_b}x{_k}x{_h}",
            f"{_kind.upper()}, {_t} steps of [{_b}, {_k}], {_h} units, bf16, forward + backward",
            times_the_time(TARGET),
            partial(_workload, _kind, _shape),
            quick=_shape == SHAPES[0],
        )
