"""amax: the largest magnitude in a tensor, from which its scale is computed."""

from __future__ import annotations

import torch

from ._dispatch import checks
from ._dispatch.op import Op


def amax_reference(x: torch.Tensor) -> torch.Tensor:
    """max |x| in FP32; NaN if any element is NaN, else Inf if any is; 0 for an empty tensor."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return x.float().abs().amax()


def _fake(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((), dtype=torch.float32)


def _check(x: torch.Tensor) -> None:
    checks.has_dtype("amax", "x", x, checks.FLOATS)


amax_op = Op(
    "amax",
    "(Tensor x) -> Tensor",
    reference=amax_reference,
    fake=_fake,
    check=_check,
    triton="amax",
)


def amax(x: torch.Tensor) -> torch.Tensor:
    """Return max |x| as an fp32 scalar tensor [] on x's device, without a host sync.

    x: any shape and strides, fp32, bf16 or fp16. NaN if any element is NaN, else Inf if any is
    infinite; 0 for an empty tensor. Raises TypeError or ValueError for other inputs.
    """
    checks.needs_no_grad("amax", "call it on x.detach()", x)
    return amax_op(x)
