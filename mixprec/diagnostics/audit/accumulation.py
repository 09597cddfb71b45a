"""What a step adds in 16 bits: gradients of micro-batches and of chunks of a batch, and updates."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...optim._state import short

aten = torch.ops.aten
_CAST = aten._to_copy.default
_ADDS = (aten.add_.Tensor, aten.add.Tensor)
_PRODUCTS = (aten.addmm_.default, aten.addmm.default, aten.addmm.out)  # with what they add to
_LOW = (torch.bfloat16, torch.float16)
_ADD_ = aten.add_.Tensor
_ZERO = (aten.zero_.default, aten._foreach_zero_.default)
_SAMPLE = 4096  # elements of each parameter
_TORCHS = {c for c in vars(torch.optim).values() if isinstance(c, type)} - {torch.optim.LBFGS}


@functools.cache
def _accumulate_grad() -> Any:
    """The class of the nodes that write `grad`."""
    with torch.enable_grad():
        node: Any = (torch.ones((), requires_grad=True) * 1).grad_fn
        return type(node.next_functions[0][0])


class Gradients:
    """summed: of a parameter, the dtype of `grad` and how often a backward pass has added to it."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        _accumulate_grad()
        self.summed: dict[torch.Tensor, tuple[str, int]] = {}
        self._times: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # by gradient
        self._zeroed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        for p in params:
            if p.grad is not None:  # it may be 0
                self._zeroed[p.grad] = None

    def note(self, func: Any, inputs: list[torch.Tensor], in_backward: bool) -> None:
        """An op has run."""
        if func is _ADD_ and in_backward:
            self._added()
        elif func in _ZERO:
            for t in inputs:
                self._zeroed[t] = None

    def _added(self) -> None:
        """A gradient has been added to that of an earlier backward pass."""
        node: Any = torch._C._current_autograd_node()
        if not isinstance(node, _accumulate_grad()):
            return
        param, grad = node.variable, node.variable.grad
        if self._zeroed.pop(grad, self) is None:  # by zero_grad(set_to_none=False)
            self._times[grad] = 0
            return
        self._times[grad] = times = self._times.get(grad, 0) + 1
        most = self.summed.get(param, ("", 0))[1]
        self.summed[param] = short(grad.dtype), max(times, most)


class Sums:
    """Gradients that the program sums itself, over chunks of a batch: how often products were added
    to one 16-bit tensor of the shape of a parameter. Products with a parameter are no part of such
    a sum: a residual stream adds them, once for each layer."""

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


class Updates:
    """Of the sampled elements with a gradient: how many there are, and how many no step changed.

    Only of torch's optimizers: others may keep masters of the weights, which change. LBFGS does
    nothing where it has converged, and a GradScaler makes fused kernels skip a step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._is_known = type(optimizer) in _TORCHS
        self._before: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._counts: list[torch.Tensor] = []
        self.dtype = ""

    def before(self) -> None:
        """A step begins."""
        self._before = []
        is_scaled = getattr(self._optimizer, "found_inf", None) is not None
        for group in self._optimizer.param_groups if self._is_known and not is_scaled else ():
            for p in group["params"] if float(group["lr"]) != 0 else ():
                if p.dtype in _LOW and p.grad is not None and not p.grad.is_sparse:
                    self.dtype = short(p.dtype)
                    self._before.append((p, _some(p).clone(), _some(p.grad) != 0))

    def after(self) -> None:
        """It has ended."""
        for p, old, has_gradient in self._before:
            lost = has_gradient & (_some(p) == old)
            counts = torch.stack([torch.count_nonzero(lost), torch.count_nonzero(has_gradient)])
            self._counts.append(counts.to("cpu", non_blocking=True))
        self._before = []

    def lost(self) -> float:
        """The share of the elements; 0 if there is none."""
        if not self._counts:
            return 0.0
        lost, all_of_them = torch.stack(self._counts).sum(0).tolist()
        return lost / all_of_them if all_of_them else 0.0


def _some(t: torch.Tensor) -> torch.Tensor:
    return t.detach().reshape(-1)[:_SAMPLE]
