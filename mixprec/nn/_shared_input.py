"""SharedInput: a module that calls several linear layers with one tensor, such as those of query,
key and value. The tensor is cast once, and kept once for backward."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ._fused import Part
from ._norms import Swapped
from ._shared_outputs import running

__all__ = ["SharedInput", "children_that_share"]


class SharedInput(Swapped):
    """shared: the names of the layers that take one tensor, in the order in which they are called.
    Their gradients of it are added in FP32 and rounded once."""

    shared: tuple[tuple[str, ...], ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # which finds casts that are the same
            return self.alone(*args, **kwargs)
        layers: Any = ([self._modules.get(name) for name in names] for names in self.shared)
        with running([Part(group) for group in layers if None not in group]):
            return self.alone(*args, **kwargs)


@cache
def children_that_share(forward: Callable[..., Any]) -> list[list[str]]:
    """The children that a forward pass calls in every case with the same value of one variable and
    nothing else: two or more names in a list."""
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return []
    if not isinstance(function, ast.FunctionDef) or not function.args.args:
        return []
    calls = _Calls(function.args.args[0].arg)
    for statement in function.body:
        calls.visit(statement)
    return [names for names in calls.by_value.values() if len(set(names)) == len(names) > 1]


class _Calls(ast.NodeVisitor):
    """by_value: the children called, by variable, by how often it had been assigned, and by how
    many statements may have ended the forward pass before."""

    def __init__(self, own: str) -> None:
        self.own = own  # usually "self"
        self.assigned: dict[str, int] = {}
        self.exits = 0
        self.by_value: dict[tuple[str, int, int], list[str]] = {}
        self.in_every_case = True

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)  # before what it is assigned to
        for target in node.targets:
            self.visit(target)

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.assigned[node.id] = self.assigned.get(node.id, 0) + 1

    def _exit(self, node: ast.AST) -> None:
        self.generic_visit(node)
        self.exits += 1

    visit_Return = visit_Raise = _exit

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=self.own), attr=child),
                args=[ast.Name(id=variable)],
                keywords=[],
            ) if self.in_every_case:
                value = variable, self.assigned.get(variable, 0), self.exits
                self.by_value.setdefault(value, []).append(child)

    def _branch(self, node: ast.AST) -> None:
        before, self.in_every_case = self.in_every_case, False
        self.generic_visit(node)
        self.in_every_case = before

    visit_If = visit_IfExp = visit_BoolOp = visit_Match = visit_Try = visit_With = _branch
    visit_For = visit_While = visit_FunctionDef = visit_Lambda = _branch
    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _branch
