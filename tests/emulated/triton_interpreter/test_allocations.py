"""What the launchers of the fused ops allocate: their results, and no values that are not cast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import normal
from emulated.agreement import launcher, tensors
from emulated.triton_interpreter.helpers import triton  # also skips without the interpreter
from emulated.values.test_fused import BF16, CASTS, F32
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

assert triton.knobs.runtime.interpret
x, other = (normal((33, 40), BF16, seed=seed) for seed in range(2))
CALLS: list[tuple[Any, ...]] = [
    ("norm_quantize", x, None, None, None, 1e-5, False),
    ("norm_quantize", x, other, other[0], other[1], 1e-5, True),
    ("act_quantize", x, None, "gelu"),
    ("act_quantize", x, other, "silu"),
    ("act_backward", other, x, None, "gelu_tanh"),
    ("act_backward", other, x, other, "relu2"),
]


class Large(TorchDispatchMode):
    """Keeps the FP32 tensors of x's size or more that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        self.kept += large(made)
        return made


def large(made: Any) -> list[torch.Tensor]:
    return [t for t in tensors([made]) if t.dtype == F32 and t.numel() >= x.numel()]


@pytest.mark.parametrize("turn", range(len(CASTS)))
def test_no_values_in_fp32(turn: int) -> None:
    """But for those that are asked for."""
    for name, *arguments in CALLS[turn % 2 :: 2]:
        with Large() as mode:
            results = launcher(name)(*arguments, *CASTS[turn])
        places = ({t.data_ptr() for t in found} for found in (mode.kept, large(results)))
        assert next(places) == next(places), (name, CASTS[turn])
