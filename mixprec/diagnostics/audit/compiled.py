"""Compiled code inside of an audit: it is compiled again, with its graphs read on the way.

Dynamo keeps what it has compiled by backend. Inside of the block each compiled function gets a
backend of the block in place of its own, which calls that: what was compiled before is neither run
nor changed, and runs again after the block.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from . import dynamo
from .roots import Root
from .runs import Runs
from .traced import Functions

if TYPE_CHECKING:
    from .recorder import Recorder

_INDUCTOR, _AOT_EAGER = "inductor", "aot_eager"
_regions = itertools.count(2**40)  # of Dynamo's caches; torch.compile counts its own from 0


def _known(backend: Any) -> tuple[str, bool]:
    """The name of a backend of torch.compile, and whether its AOT graphs can be read."""
    lookup = torch._dynamo.lookup_backend
    function = getattr(backend, "compiler_fn", backend)
    inductor = torch._TorchCompileInductorWrapper
    if isinstance(function, inductor) or function is lookup(_INDUCTOR):
        return _INDUCTOR, True
    if function is lookup(_AOT_EAGER):
        return _AOT_EAGER, True
    return getattr(function, "__name__", type(function).__name__), False


class Compiled:
    """What torch.compile does while `watching`.

    runs: how often graphs ran; called: whether compiled functions were; unread: the backends that
    are not read, and how their functions ran; missed: graphs that were not seen; hidden: functions
    in graphs whose ops were not; is_older: code that was compiled for the program ran its backward
    pass; has_unsized: only values of tensors tell some sizes; has_gradients: of torch.func.grad or
    torch.autograd.grad, in graphs of a forward pass.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.runs, self.missed, self.called = 0, 0, False
        self.is_older, self.has_unsized, self.has_gradients = False, False, False
        self.unread: dict[str, str] = {}
        self.hidden: set[str] = set()
        self._callbacks: dict[int, tuple[Any, Any]] = {}
        self._backends: list[_Backend] = []
        self._codes: list[CodeType] = []  # some have constants that have no hash
        self.frames: list[Any] = []  # that are being traced
        self._region, self._is_over = next(_regions), False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with dynamo.ASKING.held(), dynamo.keeping_sizes():
            try:
                yield
            finally:
                self._is_over = True
                dynamo.free(self._codes, self._region)
                for known in (self._codes, self._callbacks, self._backends):
                    known.clear()

    def callback(self, given: Any) -> Any:
        """What compiles the frames of a function inside of the block in place of `given`."""
        if not callable(given):  # torch._dynamo.run: code that is there may run
            self.called |= given is False
            return None
        own = given._torchdynamo_orig_backend
        while not hasattr(own, "_clone_with_backend"):
            given, own = own, own._torchdynamo_orig_backend
        self.called = True
        frames: Any = sys.modules["torch._dynamo.eval_frame"]
        backend = frames.innermost_backend(own)
        name, is_read = _known(backend)
        if not is_read:
            count = frames.set_fullgraph_compiled_frame_count
            if count(0) < 0:
                count(-1)
                self.unread[name] = "uncompiled"
                return None
            self.unread[name] = "as aot_eager runs it"  # fullgraph=True: it has to be compiled
            backend, name = torch._dynamo.lookup_backend(_AOT_EAGER), _AOT_EAGER
        frames.set_eval_frame_isolate_recompiles_id(self._region)
        if id(given) not in self._callbacks:
            inner = own._clone_with_backend(self._backend(backend, name))
            self._callbacks[id(given)] = given, dynamo.compiling(given.hooks, inner, self._tracing)
        return self._callbacks[id(given)][1]

    @contextlib.contextmanager
    def _tracing(self, frame: Any) -> Iterator[None]:
        if not any(code is frame.f_code for code in self._codes):
            self._codes.append(frame.f_code)
        self.frames.append(frame)
        try:
            yield
        finally:
            self.frames.pop()

    def _backend(self, backend: Any, name: str) -> _Backend:
        """One for equal backends, whose functions share compiled code."""
        known = (b for b in self._backends if b.backend == backend)
        if (found := next(known, None)) is None:
            self._backends.append(found := _Backend(self, backend, name))
        return found

    def read(self, compiler: Callable[..., Any], runs: Runs, is_backward: bool) -> Any:
        """A compiler of AOT graphs that reads them first."""

        def compile(graph: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_over:
                return compiler(graph, *args, **kwargs)
            read = runs.graph(graph, is_backward)
            with _disable_current_modes():  # a backward graph is compiled when it first runs
                function = compiler(graph, *args, **kwargs)
            is_boxed = getattr(function, "_boxed_call", False)

            def run(*args: Any) -> Any:
                if self._is_over or self.recorder not in _get_current_dispatch_mode_stack():
                    return function(*args)
                with dynamo.without(self.recorder):
                    begun = runs.begin(read, args[0] if is_boxed else args)
                    outputs = function(*args)
                    begun.end(outputs)
                self.runs += 1
                return outputs

            counted: Any = torch._dynamo.disable(run, reason="mixprec.audit counts the runs")
            counted._boxed_call = is_boxed
            return counted

        return torch._dynamo.disable(compile, reason="mixprec.audit reads the graph")


class _Backend:
    """A backend that also shows its graphs."""

    def __init__(self, compiled: Compiled, backend: Any, name: str) -> None:
        self._compiled, self.backend, self.__name__ = compiled, backend, name

    def __call__(self, graph: Any, inputs: Any, **kwargs: Any) -> Any:
        common: Any = sys.modules["torch._dynamo.backends.common"]
        simplified, compiled = common.aot_module_simplified, self._compiled
        lossy = self.__name__ != _AOT_EAGER
        seen = []

        def show(traced: Any, args: Any, **options: Any) -> Any:
            functions, root = Functions(traced), Root(compiled.frames[-1])
            compiled.recorder.autocast_on.update(functions.autocast_on)
            compiled.has_gradients |= functions.has_gradients
            runs = Runs(compiled.recorder, functions, root, lossy)
            seen.append(runs)
            for role in ("fw_compiler", "inference_compiler", "bw_compiler"):
                options[role] = compiled.read(options[role], runs, role == "bw_compiler")
            return simplified(traced, args, **options)

        with mock.patch.object(common, "aot_module_simplified", show):
            found = self.backend(graph, inputs, **kwargs)
        compiled.missed += not seen
        return found
