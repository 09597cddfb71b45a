"""Quantized: a tensor in a low-precision format together with the scale that gives it meaning."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .formats import Format


class Quantized(NamedTuple):
    """x ~ data * scale_inv, as returned by `mixprec.quantize`.

    data: x's shape, contiguous, dtype fmt.dtype. scale_inv: fp32 [] (1 / scale).
    amax: fp32 [], max |x| before scaling. data_t: [K, M] contiguous, the transpose of data seen
    as [M, K] (leading dimensions flattened), or None. scale_inv_t: the scales of data_t.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor
    amax: torch.Tensor
    data_t: torch.Tensor | None
    scale_inv_t: torch.Tensor | None
    fmt: Format
    granularity: str

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device

    def t(self) -> Quantized:
        """The transpose of a 2-D Quantized: data_t where it was made, else a strided view."""
        if self.data.dim() != 2:
            raise ValueError(f"Quantized.t: data must be 2-D, got shape {tuple(self.data.shape)}")
        flipped = self.data.t() if self.data_t is None else self.data_t
        scale_inv = self.scale_inv if self.scale_inv_t is None else self.scale_inv_t
        return Quantized(
            flipped, scale_inv, self.amax, self.data, self.scale_inv, self.fmt, self.granularity
        )
