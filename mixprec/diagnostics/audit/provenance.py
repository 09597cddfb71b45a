"""Which module, or which line of the program, runs an op, and what has set dtypes of tensors."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import utils
from torch.utils.weak import WeakTensorKeyDictionary

from ... import _originals
from ...nn.autocast import Region
from ...recipes import Recipe
from .modes import Calls
from .ops import Call

_REGION = Region.__torch_function__.__code__
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_LIBRARIES = tuple(f"{name}." for name in ("torch", "mixprec", "contextlib"))
TENSOR_DTYPE = "tensor dtype"  # the dtype of parameters, inputs and what is computed of them
AUTOCAST = "torch.autocast"
CAST = "cast"  # by the program: x.to(dtype), softmax(dtype=)
TORCH = "torch"  # inside of one of its functions
RECIPE = "recipe"  # of a layer of mixprec, or of one of its functions
OVERRIDE = "override"  # a recipe from the overrides of convert
REGION = "mixprec.autocast"
MIXPREC = "mixprec"  # inside of one of its functions, without a recipe
OURS = (RECIPE, OVERRIDE, REGION, MIXPREC)
UNKNOWN = "unknown"
CASTS = {
    getattr(torch.Tensor, name)
    for name in ("to", "type", "type_as", "float", "double", "half", "bfloat16")
}
_ATTENTION = (
    torch.nn.functional.scaled_dot_product_attention,
    torch.nn.functional.multi_head_attention_forward,  # which calls it with tensors [B, H, S, D]
)
aten = torch.ops.aten
TO_COPY = aten._to_copy.default
COPIES = (TO_COPY, aten.clone.default)
_ADDS = (aten.add_.Tensor, aten.add.Tensor)
_ADDMM = (aten.addmm_.default, aten.addmm.default, aten.addmm.out)  # with what they add to
_LOW = (torch.bfloat16, torch.float16)


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
            elif not line:
                module_name = f"{frame.f_globals.get('__name__', '')}."
                if not module_name.startswith(_LIBRARIES):
                    line = f"{code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        return Owner(None, "", line)

    def module(self, owner: Owner) -> nn.Module | None:
        return None if owner.name is None else self._modules[owner.name]

    def layer(self, owner: Owner, path: str) -> Owner:
        """The layer of mixprec with this `name`, which `owner` runs as a part of itself."""
        if not path or owner.name is None:
            return owner
        inside = owner.name, path
        if inside not in self._paths:
            module = self._model.get_submodule(owner.name)
            names = (n for n, m in module.named_modules() if vars(m).get("_path") == path)
            self._paths[inside] = next(names, None)
        inner = self._paths[inside]
        if not inner:
            return owner
        name = f"{owner.name}.{inner}" if owner.name else inner
        return owner._replace(name=name, kind=type(self._model.get_submodule(name)).__name__)


@dataclass
class _Facts:
    """Of a tensor: why it has its dtype; which one it had before a cast; the name of the parameter
    that it is, or a view or copy of; whether it is no copy; whether it is a product, or a cast of
    one; of how many products it is the sum."""

    reason: str = TENSOR_DTYPE
    source: torch.dtype | None = None
    weight: str = ""
    is_parameter: bool = False
    is_product: bool = False
    times: int = 0


_NOTHING = _Facts()


class Provenance:
    """What is known of the tensors that ops return."""

    def __init__(self, calls: Calls, params: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._calls = calls
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        for name, p in params:
            self._known[p] = _Facts(weight=name, is_parameter=True)
        self._shapes = {p.shape for p in self._known if p.dim() == 2}

    def _of(self, t: torch.Tensor) -> _Facts:
        """To be written to."""
        facts: _Facts = self._known.setdefault(t, _Facts())
        return facts

    def facts(self, t: torch.Tensor) -> _Facts:
        facts: _Facts = self._known.get(t, _NOTHING)
        return facts

    def decided(self, operands: list[torch.Tensor]) -> str:
        """Who decided the dtypes of an op: autocast if it cast an operand; else a parameter, to
        which the others were fitted; else what the largest operand has."""
        known = [self.facts(t) for t in operands]
        if any(facts.reason == AUTOCAST for facts in known):
            return AUTOCAST
        if any(facts.is_parameter for facts in known):
            return TENSOR_DTYPE
        return self._largest_reason(operands)

    def _largest_reason(self, tensors: Iterable[torch.Tensor]) -> str:
        largest = max(tensors, key=torch.Tensor.numel, default=None)
        return TENSOR_DTYPE if largest is None else self.facts(largest).reason

    def note(self, call: Call, decided: str | None, is_ours: bool) -> bool:
        """An op has run. decided: of one that is listed; is_ours: in a layer of mixprec. A cast has
        the reason of its call, another result that of the largest input with its dtype. Returns
        whether it is a cast back to the dtype that another cast, to fewer bits, has just left: not
        of what a layer casts, which computes in its recipe and returns the dtype of its input."""
        func, inputs, outputs = call.func, call.inputs, call.results
        if not outputs:
            return False
        first, is_back, reason = outputs[0], False, decided
        before = self.facts(inputs[0]) if inputs else _NOTHING
        is_cast = func is TO_COPY and inputs[0].dtype != first.dtype
        # An integer has no precision that a program could have kept.
        if is_cast and inputs[0].is_floating_point() and first.is_floating_point():
            reason = self._cast_reason(first)
            if not is_ours:
                wide = before.source
                is_back = wide == first.dtype and wide.itemsize > inputs[0].dtype.itemsize
                self._of(first).source = inputs[0].dtype
        if before.weight and (func.is_view or func in COPIES):
            for t in outputs:
                facts = self._of(t)
                facts.weight = before.weight
                facts.is_parameter |= before.is_parameter and func.is_view
        if reason is None:
            reason = self._largest_reason(t for t in inputs if t.dtype == first.dtype)
        if reason != TENSOR_DTYPE:
            for t in outputs:
                if t.is_floating_point():
                    self._of(t).reason = reason
        return is_back

    def products_in(self, call: Call, is_product: bool) -> int:
        """Of how many products the result of an op of torch is the sum, if it has 16 bits and the
        shape of a parameter, else 0: gradients that the program sums itself, over chunks of a
        batch. Products with a parameter are no part of such a sum: a residual stream adds them,
        once for each layer."""
        func, inputs, outputs = call.func, call.inputs, call.results
        if func.namespace != "aten" or not inputs or not outputs:
            return 0  # ours sum in FP32
        is_product = is_product and not any(self.facts(t).weight for t in inputs)
        is_sum = func in _ADDS and len(inputs) == 2 and self.facts(inputs[1]).is_product
        if is_sum or (is_product and func in _ADDMM):
            before = self.facts(inputs[0])
            if outputs[0].dtype in _LOW and outputs[0].shape in self._shapes:
                times = (before.times or before.is_product) + 1
                self._of(outputs[0]).times = times
                return times
        if not is_sum and (is_product or (func is TO_COPY and self.facts(inputs[0]).is_product)):
            self._of(outputs[0]).is_product = True
        return 0

    def _cast_reason(self, result: torch.Tensor) -> str:
        call = self._calls.call
        if call.func in CASTS or call.has_dtype:
            return CAST
        if call.func in _ATTENTION and result.dtype == torch.float32 and result.dim() == 4:
            return TORCH  # autocast casts to 16 bits; attention without a kernel casts back
        dtype = call.autocast.get(result.device.type)
        if dtype and result.dtype in (dtype, torch.float32):
            return AUTOCAST
        return UNKNOWN if call.func is None else TORCH
