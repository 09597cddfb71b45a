"""Quantized: a tensor in a low-precision format, with its scale."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .formats import Format


class Quantized(NamedTuple):
    """x ~ data * scale_inv, as returned by `mixprec.quantize`.

    data: x's shape, contiguous, dtype fmt.dtype. scale_inv: fp32, 1 / scale of each block, in the
    shape that `mixprec.quantize` lists for the granularity. amax: fp32 [], max |x| before scaling.
    data_t: [K, M] contiguous, x^T quantized (leading dimensions flattened), or None. scale_inv_t:
    the scales of data_t; None for "tensor", where they are scale_inv.

    In the block formats ("mx", "nvfp4") data has fmt's codes, two a byte for E2M1, so that its last
    dimension is ceil(columns / 2); scale_inv has the codes that `mixprec.quantize` describes, one
    for each block along the columns; tensor_scale_inv, fp32 [], multiplies all of x ("nvfp4" only).
    is_t: this is the `t()` of such a tensor, with blocks along dimension 0.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor
    amax: torch.Tensor
    data_t: torch.Tensor | None
    scale_inv_t: torch.Tensor | None
    fmt: Format
    granularity: str
    tensor_scale_inv: torch.Tensor | None = None
    columns: int | None = None  # along the blocks; None without blocks of 32 or 16
    is_t: bool = False

    @property
    def shape(self) -> torch.Size:
        """The shape of x."""
        if self.columns is None:
            return self.data.shape
        if self.is_t:
            return torch.Size((self.columns, self.data.shape[1]))
        return torch.Size((*self.data.shape[:-1], self.columns))

    @property
    def device(self) -> torch.device:
        return self.data.device

    def t(self) -> Quantized:
        """The transpose of a 2-D Quantized, the same values: the operand b of x @ w^T, from w.

        Where data_t holds the same codes ("tensor" and "block128x128") it is data_t, else a
        strided view; the scales are transposed too.
        """
        if self.data.dim() != 2:
            raise ValueError(f"Quantized.t: data must be 2-D, got shape {tuple(self.data.shape)}")
        one = self.scale_inv.dim() < 2
        scale_inv = self.scale_inv if one else self.scale_inv.t()
        if self.data_t is None or self.granularity not in ("tensor", "block128x128"):
            view = self._replace(
                data=self.data.t(), scale_inv=scale_inv, data_t=None, scale_inv_t=None
            )
            return view if self.columns is None else view._replace(is_t=not self.is_t)
        scale_inv_t = None if one else self.scale_inv
        return self._replace(
            data=self.data_t, scale_inv=scale_inv, data_t=self.data, scale_inv_t=scale_inv_t
        )

    def transposed(self) -> Quantized:
        """x^T, quantized with the scales of its own rows and blocks: data_t and scale_inv_t.

        ValueError where `quantize` was called without transpose=True.
        """
        if self.data_t is None:
            raise ValueError("Quantized.transposed: data_t must be there: quantize(transpose=True)")
        scale_inv = self.scale_inv if self.scale_inv_t is None else self.scale_inv_t
        x_t = self._replace(data=self.data_t, scale_inv=scale_inv, data_t=None, scale_inv_t=None)
        return x_t if self.columns is None else x_t._replace(columns=self.shape[:-1].numel())
