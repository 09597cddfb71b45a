"""Gradients that code of the program sums in 16 bits, over chunks of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_aten = torch.ops.aten
_CAST = _aten._to_copy.default
_ADDS = (_aten.add_.Tensor, _aten.add.Tensor)
_PRODUCTS = (_aten.addmm_.default, _aten.addmm.default, _aten.addmm.out)  # with what they add to
_LOW = (torch.bfloat16, torch.float16)


class Sums:
    """How often products were added to one 16-bit tensor of the shape of a parameter. Products with
    a parameter are no part of such a sum: a residual stream adds them, once for each layer."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self._weights: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # and casts and views
        for p in params:
            self._weights[p] = None
        self._shapes = {p.shape for p in self._weights if p.dim() == 2}
        self._products: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._times: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def note(
        self, func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor], is_product: bool
    ) -> int:
        """An op has run. is_product: of two tensors, no views of parameters. Returns how many
        products its result is a sum of, if that has 16 bits, and 0 if it is no sum."""
        if (func.is_view or func is _CAST) and inputs and inputs[0] in self._weights:
            for t in outputs:
                self._weights[t] = None
            return 0
        is_product = is_product and not any(t in self._weights for t in inputs)
        if func in _ADDS and len(inputs) == 2 and inputs[1] in self._products:
            return self._add(inputs[0], outputs[0])
        if not is_product:
            if func is _CAST and inputs[0] in self._products:
                self._products[outputs[0]] = None
            return 0
        if func in _PRODUCTS and (times := self._add(inputs[0], outputs[0])):
            return times
        self._products[outputs[0]] = None
        return 0

    def _add(self, before: torch.Tensor, result: torch.Tensor) -> int:
        if result.dtype not in _LOW or result.shape not in self._shapes:
            return 0
        self._times[result] = times = self._times.get(before, before in self._products) + 1
        return int(times)
