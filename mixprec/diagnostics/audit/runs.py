"""Runs of the graphs of torch.compile: each adds the ops of its graph to an audit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from ...functional._products import ROLES
from ...nn._layer import Layer
from ...nn._region import Region, current_region, recipe_here
from ...optim._state8 import short
from ...recipes import Recipe
from . import casts
from .graphs import Graph, Step
from .op import FORWARD, SHORT, STEP, operand_formats
from .owners import Owner
from .roots import Root
from .traced import Functions

if TYPE_CHECKING:
    from .recorder import Recorder

_PRODUCTS = ("product", "convolution")
_FP8 = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}


@dataclass
class _Forward:
    """A run of a forward graph. decided, and weights: by the number of the autograd node."""

    owner: Owner
    roots: list[nn.Module]
    region: Region | None
    decided: dict[int | None, str] = field(default_factory=dict)
    weights: dict[int | None, str] = field(default_factory=dict)


class Runs:
    """Of one graph that Dynamo has traced: of the forward and the backward graph made of it."""

    def __init__(self, recorder: Recorder, functions: Functions, root: Root, lossy: bool) -> None:
        """root: of what was traced; lossy: the compiler may leave out casts between ops that it
        fuses."""
        self.recorder, self.functions, self.lossy = recorder, functions, lossy
        self.root = root
        self._forward: Graph | None = None
        self._known: dict[int, _Forward] = {}  # by the number of the node of autograd

    def graph(self, graph: torch.fx.GraphModule, is_backward: bool) -> Graph:
        read = Graph(graph, self.functions, self._forward if is_backward else None)
        if not is_backward:
            self._forward = read
        return read

    def begin(self, graph: Graph, args: Sequence[Any]) -> Run:
        """What is to be known of a run before it: the compiled code frees its arguments."""
        provenance, owners = self.recorder.provenance, self.recorder.owners
        is_backward = graph is not self._forward
        number, phase = self.recorder.phase_of_graph(is_backward)
        if is_backward:
            return Run(self, graph, self._known.get(number), phase, args)
        known = [provenance.reason(arg) for arg in args]
        region = current_region()
        if region is not None and isinstance(region.inside, Recipe):
            owners.regions.add(region.inside.name)
        forward = _Forward(owners.find(), self.root.now(), region)
        self._known[number] = forward
        run = Run(self, graph, forward, phase, args)
        run.found = graph.decided(
            known, map(provenance.is_parameter, args), map(provenance.weight, args)
        )
        return run


class Run:
    """One run of a graph."""

    def __init__(
        self, runs: Runs, graph: Graph, forward: _Forward | None, phase: str, args: Sequence[Any]
    ) -> None:
        self._recorder, self._graph, self._root = runs.recorder, graph, runs.root
        self._forward, self._phase = forward, phase
        self._lossy, self._has_regions = runs.lossy, runs.functions.has_regions
        self._symbols = _symbols(graph, args)
        self.found = graph.decided([], [], [])

    def end(self, outputs: Any) -> None:
        """It has run."""
        self._recorder.compiled.hidden |= self._graph.hidden
        for step in self._graph.steps:
            if step.listed is not None:
                self._record(step)
        results = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        for place, result in zip(self._graph.outputs, results, strict=False):
            if place is not None and isinstance(result, torch.Tensor):
                self._recorder.provenance.know(result, self.found.reasons[place])

    def _record(self, step: Step) -> None:
        assert step.listed is not None
        places = self._graph.operands(step)
        owner, decided = self._owner(step), self._decided(step, places)
        is_part = step.func is torch.ops.aten.mul.Tensor
        formats = [
            self._graph.stored(i, is_part=True)
            if is_part
            else short(self._graph.steps[i].tensors[0].dtype)
            for i in places
        ]
        if step.listed.kind in _PRODUCTS:
            formats = [
                self._graph.block_format(i) or f for i, f in zip(places, formats, strict=True)
            ]
            formats = [_FP8.get(f, f) for f in formats]
            by_recipe, formats = self._by_recipe(step, places, owner, formats)
            decided = by_recipe or decided
        elif step.func.namespace == "mixprec":
            decided = casts.MIXPREC
        weight = next((self.found.weights[i] for i in places if i in self.found.weights), "")
        if self._forward is not None:
            if step.phase == FORWARD:
                self._forward.decided.setdefault(step.number, decided)
                self._forward.weights.setdefault(step.number, weight)
            else:
                weight = self._forward.weights.get(step.number, "")
        phase = self._phase if step.phase == FORWARD or self._phase == STEP else step.phase
        args, value = self._sized(step.arguments), self._sized(step.value)
        operands = [self._sized(self._graph.steps[i].tensors[0]) for i in places]
        device = self._graph.steps[places[0]].tensors[0].device.type
        self._recorder.add(
            step.func, step.listed, owner, phase, device, args, value, operands,
            tuple(formats), decided, weight,
        )  # fmt: skip

    def _owner(self, step: Step) -> Owner:
        owners, forward = self._recorder.owners, self._forward
        for module in step.modules:
            now = self._root.module(module, [] if forward is None else forward.roots)
            if (name := owners.name(now)) is not None:
                return owners.named(name)
        if forward is not None and forward.owner.name is not None:
            return forward.owner
        return Owner(None, "", step.line)

    def _decided(self, step: Step, places: list[int]) -> str:
        forward = self._forward
        if step.phase != FORWARD:
            return forward.decided.get(step.number, casts.UNKNOWN) if forward else casts.UNKNOWN
        decided = self._graph.of_operands(places, self.found)
        if self._lossy and self._graph.may_lose_cast(step, places, decided):
            decided = casts.UNKNOWN
        return decided

    def _recipe(self, layer: Layer) -> Recipe | None:
        """That of a layer in this run; None: it computes as torch's, or it is not known."""
        if self._forward is None or self._has_regions:
            return None
        return recipe_here(layer.recipe, self._forward.region)

    def _by_recipe(
        self, step: Step, places: list[int], owner: Owner, formats: list[str]
    ) -> tuple[str | None, list[str]]:
        """Who decided a product of a layer of mixprec, if the operands are those of its recipe, and
        their formats."""
        layer = self._recorder.owners.module(owner)
        is_ours = step.func.namespace == "mixprec"
        if not isinstance(layer, Layer):
            return (casts.MIXPREC if is_ours else None), formats
        recipe = self._recipe(layer)
        if recipe is None:
            return (casts.UNKNOWN if is_ours else None), formats
        is_convolution = step.listed is not None and step.listed.kind == "convolution"
        pairs = self._convolved(step, places) if is_convolution else [formats]
        known = _formats(recipe)
        # One of ours that no format says is the sum for a bias.
        if is_ours or all([SHORT.get(f, f) for f in pair] in known for pair in pairs):
            return f"{self._recorder.source(owner, recipe)} {recipe.name}", pairs[-1]
        return None, formats

    def _convolved(self, step: Step, places: list[int]) -> list[list[str]]:
        """The formats of the operands of each product that a convolution's op computes."""
        stored = [_FP8.get(f, f) for f in map(self._graph.stored, places)]
        if step.func.overloadpacket is not torch.ops.aten.convolution_backward:
            return [stored]
        g, x, w = stored
        mask = step.arguments["output_mask"]
        return [pair for pair, need in zip(([g, w], [g, x]), mask, strict=False) if need]

    def _sized(self, value: Any) -> Any:
        """With tensors that have sizes and no values, for the formulas of FLOPs."""

        def of(x: Any) -> Any:
            if isinstance(x, Node):
                return self._sized(self._graph.steps[self._graph.places[x]].value)
            if isinstance(x, torch.SymInt):
                return self._size(x)
            if isinstance(x, torch.Tensor):
                shape = [self._size(n) for n in x.shape]
                return torch.empty(shape, dtype=x.dtype, device="meta")
            return x

        return tree_map(of, map_arg(value, of))

    def _size(self, n: Any) -> int:
        size = n.node.expr.xreplace(self._symbols) if isinstance(n, torch.SymInt) else n
        if getattr(size, "is_number", True):
            return int(size)
        self._recorder.compiled.has_unsized = True
        return 0


def _formats(recipe: Recipe) -> list[list[str]]:
    """Of the operands of a layer's three products."""
    return [[SHORT.get(name, name) for name in operand_formats(recipe, kind)] for kind in ROLES]


def _symbols(graph: Graph, args: Sequence[Any]) -> dict[Any, int]:
    """The sizes that a graph of dynamic shapes has in a run."""
    found: dict[Any, int] = {}
    for place, arg in zip(graph.inputs, args, strict=False):
        value = graph.steps[place].value
        is_tensor = isinstance(value, torch.Tensor) and isinstance(arg, torch.Tensor)
        sizes = zip(value.shape, arg.shape, strict=True) if is_tensor else [(value, arg)]
        for symbol, n in sizes:
            if isinstance(symbol, torch.SymInt) and isinstance(n, int):
                found[symbol.node.expr] = n
    return found
