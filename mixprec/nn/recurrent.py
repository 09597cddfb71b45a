"""LSTM, GRU and RNN: those of torch.nn with a recipe."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from .._context import context
from ..functional._recurrent import Sequence, recurrent, state_recipe
from ..ops._dispatch import checks
from ..recipes import Recipe
from . import _region
from ._layer import Layer

_CELLS = {"LSTM": "lstm", "GRU": "gru", "RNN_TANH": "tanh", "RNN_RELU": "relu"}
_PROJECTED = "proj_size is not supported"
_ON_GPU = "recurrent layers have kernels for CPUs only"


def why_not(module: nn.Module) -> str | None:
    """Why a recurrent module of torch cannot become one of these; None if it can."""
    if getattr(module, "proj_size", 0) > 0:
        return _PROJECTED
    return _ON_GPU if any(p.is_cuda for p in module.parameters()) else None


class _Recurrent(Layer):
    """What the three share."""

    _one_product = False
    _warned = False
    mode: str
    input_size: int
    hidden_size: int
    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool

    def __init__(
        self, *args: Any, recipe: Recipe | str = "fp8", name: str = "", **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if getattr(self, "proj_size", 0) > 0:
            raise ValueError(f"{type(self).__name__}: {_PROJECTED}")
        self.recipe = Recipe.parse(recipe)
        self._path = name

    @property
    def _first_weight(self) -> torch.Tensor:
        first: torch.Tensor = self.weight_ih_l0  # type: ignore[assignment]
        return first

    @property
    def _recipes(self) -> tuple[Recipe, ...]:
        return self._recipe, state_recipe(self._recipe)

    def forward(self, input: Any, hx: Any = None) -> Any:
        """input: [T, B, K], [B, T, K] with batch_first, [T, K] or a PackedSequence; hx, results and
        errors as in torch."""
        self._watch_main_grads()
        recipe = _region.recipe_here(self._recipe)
        data = input.data if isinstance(input, PackedSequence) else input
        if recipe is None or not self._has_kernel(data):
            return super().forward(input, hx)
        if isinstance(input, PackedSequence):
            x, sizes, order, back = input
            batch = int(sizes[0])
            states = self._states(hx, x, batch, True, order)
            y, states = self._layers(x, sizes, states, recipe)
            finals = tuple(s if back is None else s.index_select(1, back) for s in states)
            return PackedSequence(y, sizes, order, back), self._as_given(finals, True)
        self._check(input)
        batched = input.dim() == 3
        x = input if batched else input.unsqueeze(1)
        x = x.transpose(0, 1) if batched and self.batch_first else x
        steps, batch = x.shape[:2]
        states = self._states(hx, x, batch, batched, None)
        y, finals = self._layers(x.flatten(0, 1), None, states, recipe)
        y = y.unflatten(0, (steps, batch))
        y = y.transpose(0, 1) if batched and self.batch_first else y if batched else y.squeeze(1)
        return y, self._as_given(finals, batched)

    def _has_kernel(self, x: object) -> bool:
        """On a GPU torch's module is faster than the reference."""
        if not (isinstance(x, torch.Tensor) and x.is_cuda) or context.backend is not None:
            return True
        if not self._warned and not torch.compiler.is_compiling():
            self._warned = True
            warnings.warn(
                f"{self._path or type(self).__name__} computes as torch's module: {_ON_GPU}",
                stacklevel=3,
            )
        return False

    def _check(self, x: torch.Tensor) -> None:
        kind = checks.of_layer(type(self).__name__, self._path)
        checks.has_dtype(kind, "input", x, checks.FLOATS, checks.CAST_X)
        steps = x.shape[1 if x.dim() == 3 and self.batch_first else 0]
        if x.dim() not in (2, 3) or x.shape[-1] != self.input_size or steps == 0:
            layout = "[B, T, K]" if self.batch_first else "[T, B, K]"
            raise ValueError(
                f"{kind}: input must be {layout} or [T, K] with K = {self.input_size} and a step "
                f"or more, got shape {tuple(x.shape)}"
            )

    def _states(
        self, hx: Any, x: torch.Tensor, batch: int, batched: bool, order: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """h and, of an LSTM, c at the start, [layers * directions, B, H]."""
        is_lstm, kind = self.mode == "LSTM", checks.of_layer(type(self).__name__, self._path)
        count = self.num_layers * (2 if self.bidirectional else 1)
        shape = (count, batch, self.hidden_size)
        if hx is None:
            return (x.new_zeros(shape, dtype=torch.float32),) * (2 if is_lstm else 1)
        given = tuple(hx) if is_lstm else (hx,)
        states = []
        for name, state in zip(("h_0", "c_0"), given, strict=False):
            checks.has_dtype(kind, name, state, checks.FLOATS)
            wide = state if batched else state.unsqueeze(1)
            if wide.shape != shape:
                expected = shape if batched else (count, self.hidden_size)
                raise RuntimeError(
                    f"{kind}: {name} must have shape {expected}, got {tuple(state.shape)}"
                )
            states.append(wide if order is None else wide.index_select(1, order))
        return tuple(states)

    def _layers(
        self,
        x: torch.Tensor,
        sizes: torch.Tensor | None,
        states: tuple[torch.Tensor, ...],
        recipe: Recipe,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """y [N, directions * H] of all layers, and the states at the end, for x [N, K]."""
        cell, starts = _CELLS[self.mode], iter(zip(*(s.unbind(0) for s in states), strict=True))
        out_dtype = self._state(x.dtype, x.device, recipe).out_dtype
        finals = []
        for layer in range(self.num_layers):
            outputs = []
            for reverse in (False, True)[: 2 if self.bidirectional else 1]:
                state = self._state(x.dtype, x.device, recipe)
                names = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if self.bias else ()))
                suffix = f"_l{layer}{'_reverse' if reverse else ''}"
                weights = tuple(getattr(self, name + suffix) for name in names)
                h, c = (*next(starts), None)[:2]
                y, *final = recurrent(
                    *(x, weights, h, c, Sequence(cell, reverse, sizes, out_dtype)),
                    recipe=recipe,
                    name=self._path,
                    delayed=state.delayed,
                    clipped=state.clipped,
                )
                outputs.append(y)
                finals.append([one.to(out_dtype) for one in final[: len(states)]])
            x = torch.cat(outputs, 1) if self.bidirectional else outputs[0]
            if self.dropout > 0 and layer + 1 < self.num_layers:
                x = nn.functional.dropout(x, self.dropout, self.training)
        return x, tuple(torch.stack(each) for each in zip(*finals, strict=True))

    def _as_given(self, finals: tuple[torch.Tensor, ...], batched: bool) -> Any:
        finals = finals if batched else tuple(s.squeeze(1) for s in finals)
        return finals if self.mode == "LSTM" else finals[0]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.recipe}"


class LSTM(_Recurrent, nn.LSTM):
    """torch.nn.LSTM with a recipe: arguments, parameters, state dict, inputs and results are the
    same, but proj_size, for which ValueError is raised.

    The products of the input of each layer with weight_ih use `recipe`, as in `mixprec.nn.Linear`.
    Those of the state with weight_hh use its 16-bit dtype, bf16 for FP8 and block formats, because
    their errors repeat at every step; all sums, the gates and the cell state are FP32. The results
    have the input's dtype; under torch.autocast, the autocast dtype. Parameters may be fp32, bf16
    or fp16. Delayed scales are shared by all layers and directions. Dropout between layers is
    torch's. On a GPU, for which there is no kernel, it computes as torch's module and warns once.

    `mixprec.reuse_weights` does nothing here, `mixprec.compress_saved` compresses only the inputs
    of the layers. Second derivatives and torch.func raise RuntimeError.
    """

    __module__ = "mixprec.nn"  # the path that pickle stores


class GRU(_Recurrent, nn.GRU):
    """torch.nn.GRU with a recipe: see `mixprec.nn.LSTM`."""

    __module__ = "mixprec.nn"


class RNN(_Recurrent, nn.RNN):
    """torch.nn.RNN, with tanh or ReLU, with a recipe: see `mixprec.nn.LSTM`."""

    __module__ = "mixprec.nn"


FORWARDS = {nn.LSTM.forward: LSTM, nn.GRU.forward: GRU, nn.RNN.forward: RNN}


def layer_for(module: nn.Module) -> type[Layer] | None:
    """The layer that `module` of torch can become, if it computes as torch's class does."""
    kind: Any = type(module)
    layer = FORWARDS.get(kind.forward) if isinstance(module, nn.RNNBase) else None
    return layer if layer is not None and why_not(module) is None else None
