"""What an AOT graph of torch.compile computes: its ops, and who decided their dtypes."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from ... import recipes
from ...optim._state8 import short
from . import casts, ops
from .op import AGAIN, BACKWARD, FORWARD
from .traced import Functions

_COPY, _CLONE = "aten::_to_copy", torch.ops.aten.clone.default
_CONVERTS = (_COPY, "prims::convert_element_type")
_LIBRARIES = tuple(map(os.path.dirname, (torch.__file__, recipes.__file__)))
_FRAME = re.compile(r'File "(.+)", line (\d+)')


class Decided(NamedTuple):
    """By place in the graph: the reasons of the dtypes; what is a parameter, or a view of one; the
    names of these, and of copies."""

    reasons: list[str]
    params: set[int]
    weights: dict[int, str]


@dataclass
class Step:
    """A node as it was before the compiler changed the graph.

    value: a fake one; inputs: the places of what it reads; cast: the reason of a cast; is_inside: a
    part of one of torch's functions, whose casts are its own; result: the reason of the result of
    one of our ops; low: in what torch.autocast computes there; modules: ids, the innermost first;
    number: of the autograd node.
    """

    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any
    inputs: list[int]
    phase: str
    modules: list[int]
    line: str
    number: int | None
    listed: ops.Listed | None = None
    cast: str | None = None
    is_inside: bool = False
    result: str | None = None
    low: torch.dtype | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [t for t in tree_leaves(self.value) if isinstance(t, torch.Tensor)]

    @property
    def arguments(self) -> ops.Arguments:
        return ops.arguments(self.func, self.args, self.kwargs)


class Graph:
    """A forward or backward graph, as AOTAutograd hands it to the compiler. inputs: the places of
    its arguments; outputs: of what it returns; hidden: functions whose ops are not read."""

    def __init__(self, graph: GraphModule, functions: Functions, forward: Graph | None) -> None:
        self._is_backward, self._forward = forward is not None, dict[str, tuple[Graph, int]]()
        if forward is not None:
            self._forward = {step.name: (forward, i) for i, step in enumerate(forward.steps)}
        self._functions, self.places = functions, dict[Node, int]()
        self.steps: list[Step] = []
        self.hidden: set[str] = set()
        self.inputs: list[int] = []
        self.outputs: list[int | None] = []
        for node in graph.graph.nodes:
            if node.op == "output":
                self.outputs = [self.places.get(n) for n in tree_leaves(node.args[0])]
                break
            if node.op == "placeholder":
                self.inputs.append(len(self.steps))
            self.places[node] = len(self.steps)
            self.steps.append(self._step(node))

    def _step(self, node: Node) -> Step:
        meta = _meta(node)
        func, args, kwargs, value = _called(node)
        step = Step(
            node.name,
            func,
            args,
            kwargs,
            value,
            [self.places[n] for n in node.all_input_nodes],
            self._phase(node.name, meta.get("partitioner_tag")),
            _modules(meta),
            _line(meta),
            meta.get("seq_nr"),
        )
        if not isinstance(func, torch._ops.OpOverload):
            if isinstance(func, torch._ops.HigherOrderOperator):
                self.hidden.add(func.name())
            return step
        step.listed = ops.listed(func)
        original = meta.get("original_aten", func)
        step.is_inside = original is not func and str(original) != "aten._to_copy.default"
        if step.is_inside and len(step.inputs) == 2 and isinstance(original, torch._ops.OpOverload):
            step.listed = step.listed or ops.part(func, original)
        call = self._functions.call(node)
        if _is_convert(func) and not step.is_inside and step.inputs:
            before, after = self.steps[step.inputs[0]].tensors[0], step.tensors[0]
            if casts.is_cast(before, after):
                step.cast = casts.UNKNOWN if call is None else call.reason(before, after)
        if call is None or not step.tensors:
            return step
        if call.autocast is not None:
            step.low = call.autocast.get(step.tensors[0].device.type)
        if func.namespace == "mixprec":
            is_low = step.tensors[0].dtype == step.low
            step.result = casts.AUTOCAST if is_low else casts.AS_MADE
            step.result = casts.UNKNOWN if call.autocast is None else step.result
        return step

    def _phase(self, name: str, tag: str | None) -> str:
        if not self._is_backward:
            return BACKWARD if tag == "is_backward" else FORWARD
        return AGAIN if tag == "is_forward" or name in self._forward else BACKWARD

    def operands(self, step: Step) -> list[int]:
        """The places of the operands of a listed step."""
        assert step.listed is not None
        given = step.arguments
        found = (n for name in step.listed.operands for n in tree_leaves(given[name]))
        return [self.places[n] for n in found if isinstance(n, Node)]

    def _source(self, place: int) -> Step:
        """The step that place is of, but for views."""
        step = self.steps[place]
        while step.inputs and getattr(step.func, "is_view", False):
            step = self.steps[step.inputs[0]]
        return step

    def block_format(self, place: int) -> str:
        """Of an operand with the values of a block format in another dtype; "" for the others."""
        step = self._source(place)
        is_decoded = getattr(step.func, "namespace", "") == "mixprec" and "fmt" in step.arguments
        return str(step.arguments["fmt"]) if is_decoded and step.inputs else ""

    def stored(self, place: int, *, is_part: bool = False) -> str:
        """The format of an operand of a convolution as a layer has cast it, before it was decoded
        or widened for a kernel of the vendor; is_part: or by the compiler, for a part of the op."""
        step = self._before(place, is_part)
        if not step.inputs and step.name in self._forward:  # kept for backward
            forward, place = self._forward[step.name]
            return forward.stored(place)
        if not step.inputs or getattr(step.func, "namespace", "") != "mixprec":
            return short(step.tensors[0].dtype)
        given, data = step.arguments, self.steps[step.inputs[0]]
        return str(given["fmt"]) if "fmt" in given else short(data.tensors[0].dtype)

    def _before(self, place: int, is_part: bool) -> Step:
        """The step that an operand is of, but for views, copies and casts to more bits; is_part:
        only those of the compiler."""
        step = self._source(place)
        while step.inputs and (_is_convert(step.func) or step.func is _CLONE):
            source = self._source(step.inputs[0])
            narrows = source.tensors[0].dtype.itemsize > step.tensors[0].dtype.itemsize
            if narrows or (is_part and not step.is_inside):
                break
            step = source
        return step

    def may_lose_cast(self, step: Step, places: Sequence[int], found: str) -> bool:
        """Whether a compiler that fuses may leave out a cast of operands: sums and elementwise ops
        are fused with it; one that autocast makes takes back one before it."""
        dtype = self.steps[places[0]].tensors[0].dtype
        is_sum = step.listed is not None and step.listed.kind == "reduction"
        if dtype.itemsize < 4:
            return found != casts.AUTOCAST and (is_sum or dtype == step.low)
        is_fused = step.func is torch.ops.aten.mul.Tensor
        return is_fused and any(_is_convert(self._before(i, is_part=True).func) for i in places)

    def decided(
        self, reasons: Iterable[str], params: Iterable[bool], weights: Iterable[str]
    ) -> Decided:
        """From the reason of each input, whether it is a parameter, and the name of that."""
        found = Decided([casts.AS_MADE] * len(self.steps), set(), {})
        known = zip(self.inputs, reasons, params, weights, strict=False)
        for place, reason, is_param, name in known:
            found.reasons[place] = reason
            found.params.update([place] if is_param else [])
            found.weights.update({place: name} if name else {})
        for place, step in enumerate(self.steps):
            if step.inputs and step.tensors:
                is_view, source = getattr(step.func, "is_view", False), step.inputs[0]
                if is_view and source in found.params:
                    found.params.add(place)
                is_copy = _is_convert(step.func) or step.func is _CLONE
                if (is_view or is_copy) and source in found.weights:
                    found.weights[place] = found.weights[source]
                found.reasons[place] = self._reason(step, found)
        return found

    def _reason(self, step: Step, found: Decided) -> str:
        """Of the result of a step, as `casts.Provenance` has it."""
        known = step.cast or step.result
        if known is not None:
            return known
        if step.listed is not None:
            return self.of_operands(self.operands(step), found)
        dtype = step.tensors[0].dtype
        inputs = [
            i
            for i in step.inputs
            if step.is_inside or any(t.dtype == dtype for t in self.steps[i].tensors)
        ]
        return self._of_largest(inputs, found)

    def of_operands(self, places: Sequence[int], found: Decided) -> str:
        """Who decided the dtypes of an op."""
        if any(found.reasons[i] == casts.AUTOCAST for i in places):
            return casts.AUTOCAST
        if any(i in found.params for i in places):
            return casts.AS_MADE
        return self._of_largest(places, found)

    def _of_largest(self, places: Iterable[int], found: Decided) -> str:
        def size(place: int) -> int:
            return max((_hint(t.numel()) for t in self.steps[place].tensors), default=0)

        largest = max(places, key=size, default=None)
        return casts.AS_MADE if largest is None else found.reasons[largest]


def _is_convert(func: Any) -> bool:
    return isinstance(func, torch._ops.OpOverload) and func.name() in _CONVERTS


def _called(node: Node) -> tuple[Any, tuple[Any, ...], dict[str, Any], Any]:
    """The op, its arguments and value, also where one of torch's functions calls it."""
    func, args, kwargs, value = node.target, node.args, dict(node.kwargs), node.meta.get("val")
    if not isinstance(func, torch._ops.HigherOrderOperator):
        return func, args, kwargs, value
    name, after = func.name(), value[1:] if isinstance(value, (tuple, list)) else value
    if name == "run_and_save_rng_state":
        return args[0], args[1:], kwargs, after
    if name in ("run_with_rng_state", "with_effects"):
        return args[1], args[2:], kwargs, value if name == "run_with_rng_state" else after
    if name.startswith("auto_functionalized"):  # arguments that it writes have other names
        return args[0], (), kwargs, value
    return func, args, kwargs, value


def _meta(node: Node) -> dict[str, Any]:
    """Of a node, or of a part of its result where AOTAutograd has replaced the node."""
    if "seq_nr" not in node.meta:
        parts = [user for user in node.users if user.target is operator.getitem]
        return next((found for found in map(_meta, parts) if "seq_nr" in found), node.meta)
    return node.meta


def _hint(n: Any) -> int:
    """A size; a symbolic one as it was when it was traced."""
    known = n.node.hint if isinstance(n, torch.SymInt) else n
    return 0 if known is None else int(known)


def _modules(meta: dict[str, Any]) -> list[int]:
    stack = meta.get("fwd_nn_module_stack") or meta.get("nn_module_stack") or {}
    keys = (str(key).partition("@")[0] for key in reversed(stack))
    return [int(key) for key in keys if key.isdigit()]


def _line(meta: dict[str, Any]) -> str:
    frames = _FRAME.findall(meta.get("stack_trace") or "")
    return next((":".join(f) for f in reversed(frames) if not f[0].startswith(_LIBRARIES)), "")
