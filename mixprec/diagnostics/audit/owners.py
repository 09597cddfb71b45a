"""Which module, or which line of the program, an op belongs to."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import utils

from ... import _originals
from ...nn._region import Region
from ...recipes import Recipe

_REGION = Region.__torch_function__.__code__
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_LIBRARIES = tuple(f"{name}." for name in ("torch", "mixprec", "contextlib"))


class Owner(NamedTuple):
    """name: a module's path in the model, "" for the model itself, None for none of its modules;
    kind: the module's class; line: the file and line of the program that called the op."""

    name: str | None
    kind: str
    line: str

    @property
    def where(self) -> str:
        """For a finding about a line of code: in the model itself, the line says more."""
        return self.name or self.line or self.kind


class Owners:
    """Looks up the owner of what the current thread runs.

    The module is the innermost one whose `forward` runs, known by its frame, or by that of torch's
    code that calls it: no hook, which would keep fused layers from running as they do without one.
    """

    def __init__(self, model: nn.Module) -> None:
        # A module under several names has the first.
        self._names = {id(module): name for name, module in model.named_modules()}
        self._model, self._modules = model, dict(model.named_modules())
        # A forward may be called without torch's code.
        kinds = {type(module) for module in model.modules()}
        forwards = (inspect.getattr_static(kind, "forward", None) for kind in kinds)
        unwrapped = (inspect.unwrap(f) for f in forwards if isinstance(f, FunctionType))
        codes = (f.__code__ for f in unwrapped if isinstance(f, FunctionType))
        # By id: code that Dynamo makes may have no hash.
        self._forwards = {id(code): code.co_varnames[0] for code in codes if code.co_argcount}
        self._paths: dict[tuple[str, str], str | None] = {}
        self._watched: dict[int, str] = {}
        self.called: dict[str, None] = {}  # in the order of the first calls
        self.regions: set[str] = set()

    def watch(self, scaler: Any) -> None:
        """Note in `called` which methods of a GradScaler run ops, and "clip" for what clips."""
        for name in ("scale", "step", "get_scale", "unscale_", "update"):
            # Methods with one decorator share the code around them.
            self._watched[id(inspect.unwrap(getattr(type(scaler), name)).__code__)] = name
        for clip in (utils.clip_grad_norm_, utils.clip_grad_value_):
            self._watched[id(inspect.unwrap(clip).__code__)] = "clip"

    def find(self) -> Owner:
        """During a backward pass, only of what a checkpoint computes again and of hooks."""
        frame: FrameType | None = sys._getframe(1)
        line = ""
        while frame is not None and frame.f_code is not _ENGINE:
            code = frame.f_code
            if code in _originals.CALLERS or id(code) in self._forwards:
                argument = "self" if code in _originals.CALLERS else self._forwards[id(code)]
                module = frame.f_locals.get(argument)
                name = self._names.get(id(module))
                if name is not None:
                    return Owner(name, type(module).__name__, line)
            elif id(code) in self._watched:
                self.called.setdefault(self._watched[id(code)])
            elif code is _REGION:
                inside = frame.f_locals["self"].inside
                if isinstance(inside, Recipe):
                    self.regions.add(inside.name)
            elif not line and not _is_library(frame):
                line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        return Owner(None, "", line)

    def parameters(self) -> Iterator[torch.Tensor]:
        return self._model.parameters()

    def module(self, owner: Owner) -> nn.Module | None:
        return None if owner.name is None else self._modules[owner.name]

    def layer(self, owner: Owner, path: str) -> Owner:
        """The layer of mixprec with this `name`, which `owner` runs as a part of itself."""
        if not path or owner.name is None:
            return owner
        inside = owner.name, path
        if inside not in self._paths:
            module = self._model.get_submodule(owner.name)
            found = (n for n, m in module.named_modules() if vars(m).get("_path") == path)
            self._paths[inside] = next(found, None)
        inner = self._paths[inside]
        if not inner:
            return owner
        name = f"{owner.name}.{inner}" if owner.name else inner
        return owner._replace(name=name, kind=type(self._model.get_submodule(name)).__name__)


def _is_library(frame: FrameType) -> bool:
    name = f"{frame.f_globals.get('__name__', '')}."
    return name.startswith(_LIBRARIES)
