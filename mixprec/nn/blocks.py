"""NormLinear, MLP, GatedMLP and ResidualSequential: parts of transformer blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..recipes import Recipe
from ._fused import FusedBlock
from .known import register_fusion
from .linear import Linear


class _ReLUSquared(nn.Module):
    """relu(x)^2. Source: Primer (So et al., 2021)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.relu(x)
        return y * y


register_fusion(_ReLUSquared, lambda module: "relu2")
_ACTS: dict[str, Callable[[], nn.Module]] = {
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, "tanh"),
    "relu2": _ReLUSquared,
}


def _norm(
    of: str, kind: str, width: int, eps: float, device: torch.device | str | None
) -> nn.Module:
    """FP32 parameters, as cast_parameters leaves them."""
    if kind not in ("rms", "layer"):
        raise ValueError(f'{of}: norm must be "rms" or "layer", got {kind!r}')
    make = nn.RMSNorm if kind == "rms" else nn.LayerNorm
    return make(width, eps=eps, device=device)


class NormLinear(nn.Module):
    """Linear layers behind a norm: outputs norm(x) @ weight^T + bias, without a pass for the cast.

    in_features: K; out_features: N, or several, for layers that share the operand, such as query,
    key and value. norm: "rms" or "layer", children `norm` and `linears`. forward(x [..., K],
    residual=None) returns a tensor [..., N], or a tuple with one of each N; with a residual it
    normalizes x + residual and returns that as well, last. Formula and roundings:
    `mixprec.functional.norm_linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        bias: bool = True,
        *,
        norm: str = "rms",
        eps: float = 1e-6,
        recipe: Recipe | str = "fp8",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        self.norm = _norm("NormLinear", norm, in_features, eps, device)
        self.linears = nn.ModuleList(
            Linear(in_features, n, bias, device, dtype, recipe=recipe) for n in sizes
        )
        self._single = isinstance(out_features, int)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        outputs = FusedBlock([*self.linears], norm=self.norm)(x, residual)
        return outputs[0] if self._single and residual is None else outputs


class MLP(nn.Module):
    """down(act(up(norm(x)))): x [..., width], hidden values [..., hidden].

    act: "gelu", "gelu_tanh", "silu" or "relu2"; norm: None, "rms" or "layer". forward(x,
    residual=None): with a residual it takes x + residual, and returns that as well, last. Formula
    and roundings: `mixprec.functional.mlp`.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        bias: bool = True,
        *,
        act: str = "gelu",
        norm: str | None = None,
        eps: float = 1e-6,
        recipe: Recipe | str = "fp8",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if act not in _ACTS:
            raise ValueError(
                f"{type(self).__name__}: act must be one of {', '.join(_ACTS)}, got {act!r}"
            )
        self.norm = None if norm is None else _norm(type(self).__name__, norm, width, eps, device)
        self.up = Linear(width, hidden, bias, device, dtype, recipe=recipe)
        self.act = _ACTS[act]()
        self.down = Linear(hidden, width, bias, device, dtype, recipe=recipe)

    @property
    def _first(self) -> list[nn.Module]:
        return [self.up]

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        block = FusedBlock(self._first, norm=self.norm, act=self.act, last=self.down)
        outputs = block(x, residual)
        return outputs[0] if residual is None else outputs


class GatedMLP(MLP):
    """down(act(gate(norm(x))) * up(norm(x))), as in Llama, with the arguments of `MLP`; act is
    "silu" by default, and there are no biases. Source: GLU Variants Improve Transformer (Shazeer,
    2020).
    """

    def __init__(
        self, width: int, hidden: int, bias: bool = False, *, act: str = "silu", **options: Any
    ) -> None:
        super().__init__(width, hidden, bias, act=act, **options)
        up, recipe = self.up.weight, self.up.recipe
        self.gate = Linear(width, hidden, bias, up.device, up.dtype, recipe=recipe)

    @property
    def _first(self) -> list[nn.Module]:
        return [self.gate, self.up]


class ResidualSequential(nn.Sequential):
    """nn.Sequential of x + residual, as a block of a transformer that begins with a norm.

        total = x + residual        x without a residual
        y     = the modules, one after the other, of total

    forward(x, residual=None) returns (y, total); what comes next takes y as its residual, so that
    no block ends in an addition:

        y, x = attention(x, y)
        y, x = mlp(x, y)

    With `mixprec.convert(fuse=True)` a first norm with linear layers behind it adds, normalizes and
    casts in one pass, and in backward its gradient and that of total are added in one: total has
    the bits of x + residual, and the gradient of x is rounded once. Everywhere else torch adds.
    """

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x if residual is None else x + residual
        return super().forward(total), total
