"""torch.jit and torch.fx, which cannot trace the layers, and what has to be done for them."""

from __future__ import annotations

import pytest
import torch
from cases import for_each
from torch import nn

import mixprec

pytestmark = pytest.mark.filterwarnings("ignore")  # of what is deprecated, and traced
MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 8)), (2, 8)),
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), (2, 8)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3)), (1, 3, 5, 5)),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose1d(3, 4, 3)), (1, 3, 5)),
}


@for_each("fuse", [False, True])
@for_each("recipe", ["bf16", "fp8"])
@for_each("name", MODELS)
def test_the_error_names_unconvert(name: str, recipe: str, fuse: bool) -> None:
    make, shape = MODELS[name]
    model, x = mixprec.convert(make(), recipe, fuse=fuse), torch.randn(shape)
    for trace in (torch.jit.script, lambda m: torch.jit.trace(m, x), torch.fx.symbolic_trace):
        with pytest.raises((RuntimeError, TypeError), match=r"mixprec\.unconvert\(model\)"):
            trace(model)
    with mixprec.autocast(enabled=False):
        torch.jit.trace(model, x)
    torch.jit.trace(mixprec.unconvert(model), x)


def test_multihead_attention() -> None:
    layer = mixprec.convert(nn.Sequential(nn.MultiheadAttention(8, 2)), "bf16")[0]

    class Self(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x, x, x)[0]

    with pytest.raises(TypeError, match=r"mixprec\.unconvert\(model\)"):
        torch.fx.symbolic_trace(Self())
