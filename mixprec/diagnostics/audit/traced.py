"""The functions of a program that torch.compile has traced, and what they say of casts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from ...nn._region import Region
from . import casts

_METHODS = {function.__name__ for function in casts.CASTS}  # of tensors, as torch.fx has them
_ENTER = torch.amp.autocast_mode._enter_autocast
_EXIT = torch.amp.autocast_mode._exit_autocast
_GRADIENTS = (torch.autograd.grad, torch._C._functorch._grad_increment_nesting)


class Call(NamedTuple):
    """casts: it casts a tensor; autocast: by the type of device, what torch.autocast computes in
    there. None: not the same for all that have its name."""

    casts: bool | None
    autocast: dict[str, torch.dtype] | None

    def reason(self, before: torch.Tensor, after: torch.Tensor) -> str:
        """Of a cast, as `casts.Provenance` has it for one that runs."""
        if self.casts is None or self.autocast is None:
            return casts.UNKNOWN
        if self.casts:
            return casts.CAST
        dtype = self.autocast.get(after.device.type)
        return casts.AUTOCAST if dtype and after.dtype in (dtype, torch.float32) else casts.TORCH


class Functions:
    """Those of the graph that Dynamo has traced, by the names that AOTAutograd keeps of them."""

    def __init__(self, graph: GraphModule) -> None:
        self._calls: dict[tuple[str, ...], Call] = {}
        self.autocast_on: set[str] = set()
        self.has_gradients = False  # of torch.func.grad and others, computed in the graph
        traced = torch._guards.TracingContext.get_traced_code() or []
        self.has_regions = Region.__init__.__code__ in traced  # of mixprec.autocast
        self._read(graph, casts.autocast_dtypes())

    def call(self, node: Node) -> Call | None:
        """Of a node of an AOT graph. None: it is not known."""
        return self._calls.get(_names(node))

    def _read(self, graph: GraphModule, autocast: dict[str, torch.dtype]) -> None:
        around = []
        for node in graph.graph.nodes:
            if node.target is _ENTER:
                around.append(autocast)
                kind, dtype, enabled = node.args[:3]
                autocast = {k: v for k, v in autocast.items() if k != kind}
                if enabled:
                    autocast[kind] = dtype or torch.get_autocast_dtype(kind)
            elif node.target is _EXIT:
                autocast = around.pop()
            self.has_gradients |= node.target in _GRADIENTS
            # An op of ours may have a region of its own, which is not the program's.
            is_wrapped = _is_ours(node) and (node.prev.target, node.next.target) == (_ENTER, _EXIT)
            here = around[-1] if is_wrapped else autocast
            self.autocast_on.update(here)
            for part in node.all_input_nodes:
                body: Any = part.op == "get_attr" and getattr(graph, part.target, None)
                if isinstance(body, GraphModule):
                    self._read(body, here)
            if names := _names(node):
                known: Any = _METHODS if node.op == "call_method" else casts.CASTS
                is_cast = node.target in known or node.kwargs.get("dtype") is not None
                known = self._calls.get(names, Call(is_cast, here))
                self._calls[names] = Call(
                    is_cast if known.casts == is_cast else None,
                    here if known.autocast == here else None,
                )


def _is_ours(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "mixprec"


def _names(node: Node) -> tuple[str, ...]:
    return tuple(name for name, _ in node.meta.get("source_fn_stack") or ())
