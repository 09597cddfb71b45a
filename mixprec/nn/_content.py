"""The exact content of functions and of classes of modules, whatever they are called.

Two functions of one content compute the same: their source is the same but for docstrings,
annotations and decorators, it is what their code was compiled from, and each name that they use
stands for the same: a function of one content, or one class or module. A class has the content of
its forward pass, with the methods that this calls. What cannot be seen in full is unknown.
"""

from __future__ import annotations

import ast
import builtins
import dis
import hashlib
import inspect
import linecache
import sys
import weakref
from collections.abc import Collection, Iterator
from tokenize import TokenError
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

# Of a class that defines one of these, a call is more than one of its forward pass.
_SPECIAL = (
    *("__getattr__", "__getattribute__", "__setattr__"),
    *("__call__", "_call_impl", "_wrapped_call_impl"),
)
# Globals that are neither functions, classes nor modules: where the one that is meant stands.
_OBJECTS = {"ACT2FN": "transformers.activations"}
_NOT_CONTENT = (
    *("annotation", "returns", "decorator_list", "type_comment", "type_params", "ctx", "kind"),
)


# Of what is no source of a function.
_ERRORS = (
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    StopIteration,
    TokenError,
)


class _UnknownError(Exception):
    pass


class Content:
    """digest: None if unknown. methods: "forward", and those of the class that it calls."""

    def __init__(self, thing: Any) -> None:
        # What it is read from: attributes of the class itself, by name; names in the globals of
        # functions, None where there is none; functions, with their code and defaults.
        self.attributes: dict[str, Any] = {}
        self.names: list[tuple[dict[str, Any], str, Any]] = []
        self.functions: list[tuple[Any, CodeType, Any, Any]] = []
        self.methods: list[str] = []
        self.digest: str | None = None
        texts: dict[str, Any] = {}
        try:
            (self._read_class if isinstance(thing, type) else self._read_function)(thing, texts)
        except _UnknownError:
            return
        self.digest = hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()[:16]

    def is_still_of(self, thing: Any) -> bool:
        """Whether nothing that it was read from has been replaced since."""
        current = vars(thing)
        return (
            all(current.get(name) is x for name, x in self.attributes.items())
            and all(scope.get(name) is x for scope, name, x in self.names)
            and all(
                f.__code__ is code and f.__defaults__ == defaults and f.__kwdefaults__ == keywords
                for f, code, defaults, keywords in self.functions
            )
        )

    def _read_class(self, kind: type, texts: dict[str, Any]) -> None:
        current = vars(kind)
        self.attributes = {name: current.get(name) for name in (*_SPECIAL, "forward")}
        if type(kind) is not type or kind.__bases__ != (nn.Module,):
            raise _UnknownError
        if any(name in current for name in _SPECIAL):
            raise _UnknownError
        names = ["forward"]
        for name in names:  # and those that these read of self
            attribute = self.attributes[name] = current.get(name)
            method = attribute.__func__ if isinstance(attribute, staticmethod) else attribute
            if isinstance(method, FunctionType):
                read = _attributes(self._read_function(method, texts, f"self.{name}"))
                names += () if method is not attribute else sorted(read - {*names})
                self.methods.append(name)
            elif name == "forward" or hasattr(type(attribute), "__get__"):
                raise _UnknownError

    def _read_function(self, function: Any, texts: dict[str, Any], key: str = "") -> ast.AST:
        if not isinstance(function, FunctionType):
            raise _UnknownError
        code, scope = function.__code__, function.__globals__
        self.functions.append((function, code, function.__defaults__, function.__kwdefaults__))
        node = _source(function)
        texts[key] = (code.co_freevars, _text(node, name=""))
        for name in sorted(set(_globals(code))):
            value = scope.get(name)
            self.names.append((scope, name, value))
            if name not in scope and hasattr(builtins, name):
                continue
            if any(n == name and x is not value for _, n, x in self.names):
                raise _UnknownError  # one name for several
            if isinstance(value, FunctionType):
                if name not in texts:
                    self._read_function(value, texts, name)
            else:
                texts[name] = _place(name, value)
        return node


_contents: weakref.WeakKeyDictionary[Any, Content] = weakref.WeakKeyDictionary()


def content_of(thing: Any) -> Content:
    """The content of a function, or of a class that is derived from nn.Module alone.

    That of a function with variables of another function says nothing of these.
    """
    content = _contents.get(thing)
    if content is None or not content.is_still_of(thing):
        content = _contents[thing] = Content(thing)
    return content


class KnownContents:
    """The classes or functions that have one of these contents."""

    def __init__(self, digests: Collection[str]) -> None:
        self.digests = digests
        # Nothing is replaced in it: torch.compile traces `get`, and guards what that has read.
        self._found: dict[Any, Content] = {}

    def get(self, thing: Any) -> Content | None:
        """The content, if it is one of these; None for another one, and for what is first met
        while it is compiled."""
        content = self._found.get(thing)
        if content is not None:
            return content if content.is_still_of(thing) else None
        if torch.compiler.is_compiling() or content_of(thing).digest not in self.digests:
            return None
        return self._found.setdefault(thing, content_of(thing))


def undecorated(function: Any, wrappers: Collection[str]) -> tuple[Any, list[dict[str, Any]]]:
    """What is inside wrappers of these contents, whose variable `func` it is, and the variables of
    each, from the outermost."""
    variables: list[dict[str, Any]] = []
    while isinstance(function, FunctionType) and content_of(function).digest in wrappers:
        variables.append({**inspect.getclosurevars(function).nonlocals})
        function = variables[-1]["func"]
    return function, variables


def _place(name: str, value: Any) -> str:
    """The name of a module, or the place of a class or object."""
    if isinstance(value, ModuleType) and sys.modules.get(value.__name__) is value:
        return value.__name__
    where = _OBJECTS.get(name, "")
    if isinstance(value, type):
        name, where = value.__name__, value.__module__
    if value is None or getattr(sys.modules.get(where), name, None) is not value:
        raise _UnknownError
    return f"{where}.{name}"


def _source(function: FunctionType) -> ast.FunctionDef:
    """What the function was compiled from, if nothing has replaced its code, file or defaults."""
    code = function.__code__
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, function.__globals__)[code.co_firstlineno - 1 :]
    try:
        before = "if 1:\n" if lines[0][0].isspace() else "\n"
        node: Any = ast.parse(before + "".join(inspect.getblock(lines))).body[0]
        (node,) = node.body if isinstance(node, ast.If) else (node,)
        ast.increment_lineno(node, code.co_firstlineno - 2)
        # Its variables may be from a function around it; and code has other instructions for
        # methods of what its module imports.
        imports = (f"import {name}" for name in _globals(code) if _is_imported(name, function))
        definition = f"def around({', '.join(code.co_freevars)}): pass"
        around: Any = ast.parse("\n".join((*imports, definition)))
        around.body[-1].body = [node]
        flags = code.co_flags & annotations.compiler_flag
        (outer,) = _codes(compile(around, code.co_filename, "exec", flags, dont_inherit=True))
        same = next(inner for inner in _codes(outer) if inner.co_name == node.name)
        defaults = tuple(map(ast.literal_eval, node.args.defaults))
        keywords = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        by_name = {a.arg: ast.literal_eval(d) for a, d in keywords if d is not None}
    except _ERRORS:
        raise _UnknownError from None
    given = repr((function.__defaults__ or (), function.__kwdefaults__ or {}))
    is_same = same.replace(co_flags=code.co_flags) == code  # some say where it is defined
    if not (isinstance(node, ast.FunctionDef) and is_same and repr((defaults, by_name)) == given):
        raise _UnknownError
    return node


def _codes(code: CodeType) -> list[CodeType]:
    """Those of the functions in it."""
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _globals(code: CodeType) -> Iterator[str]:
    """The names of the globals that it reads."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for inner in _codes(code):
        yield from _globals(inner)


def _is_imported(name: str, function: FunctionType) -> bool:
    value, here = (function.__globals__.get(n) for n in (name, "__name__"))
    return isinstance(value, ModuleType) or getattr(value, "__module__", here) != here


def _text(node: Any, *, name: str | None = None) -> Any:
    """The syntax tree, as tuples: the same in all versions of Python. name: instead of its own."""
    if isinstance(node, list):
        return tuple(map(_text, node))
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        node = ast.Assign(targets=[node.target], value=node.value)
    fields = {n: getattr(node, n, None) for n in node._fields if n not in _NOT_CONTENT}
    if isinstance(node, ast.FunctionDef):
        fields["body"] = node.body[ast.get_docstring(node) is not None :]
        fields["name"] = node.name if name is None else name
    content = ((n, _text(x)) for n, x in sorted(fields.items()) if x not in (None, []))
    return type(node).__name__, *content


def _attributes(node: Any) -> set[str]:
    """What a method reads of its first argument."""
    arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args)][:1]
    accesses = (n for n in ast.walk(node) if isinstance(n, ast.Attribute))
    return {n.attr for n in accesses if isinstance(n.value, ast.Name) and n.value.id in arguments}


def imported_class(module: str, name: str) -> Any:
    """The class `name` of `module`; None if that has not been imported, or has no such class."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind if isinstance(kind, type) else None


def adapted_layer() -> Any:
    """The class of peft's layers that adapt another one, their base_layer."""
    return imported_class("peft.tuners.tuners_utils", "BaseTunerLayer")
