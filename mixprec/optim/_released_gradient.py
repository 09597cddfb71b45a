"""What `grad` is after the optimizer has applied and freed it: no numbers, but a sentence."""

from __future__ import annotations

from typing import Any

import torch


class ReleasedGradient(torch.Tensor):
    """A tensor without memory in place of a gradient; RuntimeError for each operation on it.

    It has the gradient's shape, dtype and device, so that nobody takes it for no gradient: clipping
    by hand, unscaling, another optimizer's step and autograd, which would add to it, all raise.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, gradient: torch.Tensor) -> ReleasedGradient:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            gradient.shape,
            strides=gradient.stride(),
            dtype=gradient.dtype,
            device=gradient.device,
            storage_size=0,
        )

    @classmethod
    def __torch_dispatch__(cls, op: Any, *_: Any) -> None:
        raise RuntimeError(
            f"release_gradients=True: {op} needs a gradient that its optimizer has applied in "
            "backward and freed: it cannot be read, clipped, unscaled or added to (no accumulation "
            "over several backward passes) before the next step() or zero_grad()"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ReleasedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


def is_released(gradient: torch.Tensor | None) -> bool:
    return type(gradient) is ReleasedGradient
