"""rotary: pairs of features rotated by an angle of their position."""

from __future__ import annotations

import torch

from ._dispatch import checks
from ._dispatch.op import Op


def rotary_reference(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    b, h, t, d = x.shape
    y = x.new_empty((b, t, h, d)).transpose(1, 2)  # what the projections read and write
    pairs = (d // 2, 2) if interleaved else (2, d // 2)
    first, second = x.float().unflatten(-1, pairs).unbind(-1 if interleaved else -2)
    rotated = first * cos - second * sin, second * cos + first * sin
    y.copy_(torch.stack(rotated, -1 if interleaved else -2).flatten(-2))
    return y


def _check(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    op = "rotary"
    checks.has_dtype(op, "x", x, checks.FLOATS)
    if x.dim() != 4 or x.shape[3] % 2 != 0:
        raise ValueError(f"{op}: x must be [B, H, T, D], D even, got shape {tuple(x.shape)}")
    for name, factor in (("cos", cos), ("sin", sin)):
        checks.has_dtype(op, name, factor, (torch.float32,))
        checks.has_shape(op, name, factor, (x.shape[2], x.shape[3] // 2), "[T, D/2]")
        checks.on_device(op, name, factor, x.device, "x")


def _fake(x: torch.Tensor) -> torch.Tensor:
    b, h, t, d = x.shape
    return x.new_empty((b, t, h, d)).transpose(1, 2)


rotary_op = Op(
    "rotary",
    "(Tensor x, Tensor cos, Tensor sin, bool interleaved) -> Tensor",
    reference=rotary_reference,
    fake=_fake,
    check=_check,
)


def rotary(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Return the pairs of features of x [B, H, T, D] rotated; cos, sin: fp32 [T, D/2].

    mixprec.functional.rotary says more, and has a derivative.
    """
    checks.is_tensor("rotary", "x", x)
    checks.needs_no_grad("rotary", "use mixprec.functional.rotary", x, cos, sin)
    y: torch.Tensor = rotary_op(x, cos, sin, interleaved)
    return y
