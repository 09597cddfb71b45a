"""Records the ops of training steps, forward and backward, as torch dispatches them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from ..._modes import nor_below
from ...functional import _products
from ...nn._layer import Layer
from ...optim._base import Optimizer
from ...optim._state import short
from ...recipes import OUTLIERS, Recipe
from . import ops, provenance
from .accumulation import Gradients, Sums, Updates
from .noise import measured
from .patches import FORCE_EAGER, is_in_compiled
from .provenance import Owner, Owners
from .records import AGAIN, BACKWARD, FORWARD, STEP, Lost, Op, Total, accumulation, operand_formats
from .shadow import Ran, Shadow
from .trace import Trace, record


@dataclass
class _Origin:
    """Of an autograd node: who ran the forward op, what set its dtypes, and its weight."""

    owner: Owner
    decided: str | None = None
    weight: str = ""


class _Place(NamedTuple):
    """Of an op: the phase, its owner, and the node that it is of, if any."""

    phase: str
    owner: Owner
    origin: _Origin | None = None


@dataclass
class _Gemm:
    """A product of mixprec that is about to run. What it returns has the dtype of the layer's
    input, or of torch.autocast."""

    kind: str
    recipe: Recipe
    name: str
    formats: tuple[str, ...] = field(init=False)
    autocast: dict[str, torch.dtype] = field(default_factory=provenance.autocast_dtypes)

    def result_decided_by(self, result: torch.Tensor) -> str:
        has_autocast = result.dtype == self.autocast.get(result.device.type)
        return provenance.AUTOCAST if has_autocast else provenance.TENSOR_DTYPE

    def __post_init__(self) -> None:
        self.formats = operand_formats(self.recipe, self.kind)


class Recorder(TorchDispatchMode):
    """A mode that notes each op that the module `ops` lists in `ops`.

    devices: the types of device of products; cast_back: where tensors are cast to fewer bits and
    back at once, with both dtypes, how often; sums: where products of no parameter are added to a
    tensor of 16 bits, its dtype and shape, of how many it is the sum; has_compiled: whether
    functions that torch.compile has returned were called; has_compiled_backward: whether code that
    was compiled for a forward pass before the block ran its backward pass.
    """

    supports_higher_order_operators = True  # that their error is ours

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        scaler: Any,
        shadow: Shadow | None,
    ) -> None:
        super().__init__()
        self._shadow = shadow
        self.ops: dict[Op, Total] = {}
        self.devices: set[str] = set()
        self.cast_back: Counter[tuple[str, str, str]] = Counter()
        self.has_backward, self._steps, self._skipped = False, 0, 0
        self.owners, self._optimizer = Owners(model), optimizer
        self.updates = None if optimizer is None else Updates(optimizer)
        self.sums: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
        self._sums, self.gradients = Sums(model.parameters()), Gradients(model.parameters())
        self.trace = Trace()
        if scaler is not None:
            self.owners.watch(scaler)
        self._calls = provenance.Calls()
        self.provenance = provenance.Provenance(self._calls, model.named_parameters())
        self._origins: dict[int, _Origin] = {}  # by the sequence number of a node
        self._gemm: _Gemm | None = None
        self._stepping = False
        self.has_compiled = self.has_compiled_backward = False

    @property
    def called(self) -> list[str]:
        """The methods of the scaler that have run, as "scale", and "clip" for gradients that were
        clipped, by their first call."""
        return [*self.owners.called]

    @property
    def regions(self) -> set[str]:
        """The names of the recipes of mixprec.autocast that functions of torch ran in."""
        return self.owners.regions

    @property
    def pools(self) -> bool:
        """Whether torch.max_pool1d has run, which a dispatch mode leads to other code."""
        return self._calls.pools

    @property
    def autocast_on(self) -> set[str]:
        """The types of device that torch.autocast was on for."""
        return self._calls.autocast_on

    @property
    def has_stepped(self) -> bool:
        """Whether the optimizer, if audit was given it, has begun a step."""
        return self._steps > 0

    @property
    def skips_all(self) -> bool:
        """Whether a scaler has kept the optimizer from every step, as torch's does, or the
        optimizer has skipped each, as ours do."""
        return self._optimizer is not None and self._skips() - self._skipped == self._steps

    def _skips(self) -> int:
        optimizer = self._optimizer
        return int(optimizer.skipped) if isinstance(optimizer, Optimizer) else 0

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        def before(*_: Any) -> None:
            self._stepping = True
            self._steps += 1
            assert self.updates is not None
            self.updates.before()

        def after(*_: Any) -> None:
            assert self.updates is not None
            self.updates.after()
            self._stepping = False
            if self._shadow is not None:
                self._shadow.clear()

        with contextlib.ExitStack() as stack:
            if self._optimizer is not None:
                for register, hook in (
                    (self._optimizer.register_step_pre_hook, before),
                    (self._optimizer.register_step_post_hook, after),
                ):
                    stack.callback(register(hook).remove)
                self._skipped = self._skips()
            _products.listeners.append(self._product)
            stack.callback(_products.listeners.remove, self._product)
            stack.enter_context(FORCE_EAGER.held())
            stack.enter_context(self)
            stack.enter_context(self._calls)
            stack.enter_context(provenance.NOT_ASKED.held())
            yield

    def _product(self, kind: str, recipe: Recipe, name: str) -> None:
        if self in _get_current_dispatch_mode_stack():  # else it is another thread's
            self._gemm = _Gemm(kind, recipe, name)

    @nor_below
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            raise NotImplementedError(
                f"audit: torch runs {func.name()} only compiled, and in an audit nothing is: leave "
                "it out of the block"
            )
        listed = ops.listed(func)
        if listed is None and torch.is_inference_mode_enabled() and ops.is_composite(func):
            if self._calls.call.autocast:
                raise RuntimeError(
                    "audit: torch.inference_mode with torch.autocast computes in other dtypes "
                    "while ops are watched: use torch.no_grad in place of inference_mode"
                )
            with self:  # elsewhere it has arrived as its parts
                return func.decompose(*args, **kwargs)
        self.has_compiled = self.has_compiled or is_in_compiled()
        place = self._place()
        shadow = None if place.phase == STEP else self._shadow
        if shadow is not None:
            for gradient in _tensors(self._calls.gradients):
                if not gradient.requires_grad:  # the others are of inputs=
                    shadow.roles.put(gradient, "g")
            shadow.prepare(func, args, kwargs, listed)
        inside = listed is not None and self._calls.call.autocast and ops.calls_others(func)
        with provenance.autocast_inside() if inside else contextlib.nullcontext():
            result = func(*args, **kwargs)
        inputs = _tensors((args, kwargs))
        ran = None
        if shadow is not None:
            ran = shadow.follow(func, args, kwargs, result, listed)
            is_root = self._calls.backward > 0 and place.phase == FORWARD  # that of the loss
            is_backward = place.phase == BACKWARD or is_root
            shadow.mark(func, args, kwargs, _tensors(result), is_backward)
        decided = None
        if listed is not None:
            if place.phase == BACKWARD and place.origin is None:
                name = torch._C._current_autograd_node().name()
                self.has_compiled_backward |= name == "CompiledFunctionBackward"
            lost = {} if ran is None else self._lost(func, listed, args, kwargs, result, ran)
            given = ops.arguments(func, args, kwargs)
            decided = self._record(func, listed, place, given, result, lost, ran)
        is_ours = func is provenance.TO_COPY and isinstance(self.owners.module(place.owner), Layer)
        is_back = self.provenance.note(func, inputs, _tensors(result), decided, is_ours)
        if is_back and place.phase == FORWARD:
            narrow, wide = (short(t.dtype) for t in (inputs[0], result))
            self.cast_back[place.owner.where, wide, narrow] += 1
        if not torch.is_grad_enabled() and not self._stepping:
            self._note_sum(func, listed, inputs, _tensors(result))
        self.gradients.note(func, inputs, place.phase == BACKWARD)
        return result

    def _lost(
        self, func: Any, listed: ops.Listed, args: Any, kwargs: Any, result: Any, ran: Ran
    ) -> dict[str, Lost]:
        assert self._shadow is not None, "ran"
        with torch.no_grad():
            return measured(func, listed, args, kwargs, result, ran, self._shadow)

    def _note_sum(self, func: Any, listed: ops.Listed | None, inputs: Any, outputs: Any) -> None:
        is_torchs = func.namespace == "aten" and len(outputs) > 0  # ours sum in FP32
        is_product = listed is not None and listed.kind == "product"
        if is_product and self.provenance.has_parameter(inputs):
            is_product = False
        if not is_torchs or (times := self._sums.note(func, inputs, outputs, is_product)) < 2:
            return
        owner = self.owners.find()
        if owner.name is not None or owner.line:  # else autograd's engine, of a weight used twice
            key = owner.where, short(outputs[0].dtype), tuple(outputs[0].shape)
            self.sums[key] = max(times, self.sums[key])

    def source(self, owner: Owner, recipe: Recipe) -> str:
        """Where the recipe of a product is from."""
        layer = self.owners.module(owner)
        if not isinstance(layer, Layer):
            return provenance.RECIPE
        if recipe not in (layer.recipe, OUTLIERS):
            return provenance.REGION
        return provenance.OVERRIDE if layer._is_override else provenance.RECIPE

    def _place(self) -> _Place:
        """Of an op that is about to run."""
        node = None if self._stepping else torch._C._current_autograd_node()
        owner = self.owners.find()
        if self._stepping:
            return _Place(STEP, owner)
        if node is not None and owner.name is None:
            self.has_backward = True
            origin = self._origins.get(node._sequence_nr())
            if torch.is_grad_enabled():  # create_graph=True
                self._origins.setdefault(_get_sequence_nr() - 1, origin or _Origin(owner))
            return _Place(BACKWARD, owner if origin is None else origin.owner, origin)
        # Autograd makes the node of an op, or of a Function, before it runs it.
        origin = self._origins.setdefault(_get_sequence_nr() - 1, _Origin(owner))
        return _Place(FORWARD if node is None else AGAIN, owner, origin)

    def _record(
        self,
        func: Any,
        listed: ops.Listed,
        place: _Place,
        args: ops.Arguments,
        result: Any,
        lost: dict[str, Lost],
        ran: Ran | None,
    ) -> str:
        """Returns what set the dtype of the result."""
        operands = [t for name in listed.operands for t in _tensors(args[name])]
        formats = tuple(short(t.dtype) for t in operands)
        owner, gemm, result_decided = place.owner, None, None
        if listed.kind in ("product", "convolution"):
            gemm, self._gemm = self._gemm, None
        if gemm is not None:
            formats, owner = gemm.formats, self.owners.layer(owner, gemm.name)
            decided = f"{self.source(owner, gemm.recipe)} {gemm.recipe.name}"
            result_decided = (
                gemm.result_decided_by(_tensors(result)[0]) if _tensors(result) else None
            )
        elif place.phase == BACKWARD:
            unknown = provenance.MIXPREC if func.namespace == "mixprec" else provenance.UNKNOWN
            decided = (place.origin and place.origin.decided) or unknown
        elif func.namespace == "mixprec":
            decided = provenance.MIXPREC
        else:
            decided = self.provenance.decided(operands)
            low = self._calls.call.autocast.get(operands[0].device.type)
            if low is not None and ops.calls_others(func):
                formats, decided = (short(low),) * len(operands), provenance.AUTOCAST
        weight = next(filter(None, map(self.provenance.weight, operands)), "")
        if place.phase == BACKWARD:
            weight = place.origin.weight if place.origin else ""
        elif place.origin is not None and place.origin.decided in (None, provenance.MIXPREC):
            place.origin.decided, place.origin.weight = decided, weight
        device = operands[0].device.type
        phase = place.phase
        self.add(
            func, listed, owner, phase, device, args, result, operands, formats, decided, weight,
            lost,
        )  # fmt: skip
        if self._shadow is not None and phase in (FORWARD, BACKWARD):
            where = owner.name if owner.name is not None else owner.line
            results = _tensors(result)
            record(self.trace, self._shadow, where, phase, func, listed, args, results, ran, lost)
        return decided if result_decided is None else result_decided

    def add(
        self,
        func: Any,
        listed: ops.Listed,
        owner: Owner,
        phase: str,
        device: str,
        args: ops.Arguments,
        result: Any,
        operands: list[torch.Tensor],
        formats: tuple[str, ...],
        decided: str,
        weight: str,
        lost: Mapping[str, Lost] | None = None,
    ) -> None:
        """A call of an op."""
        results = _tensors(result) or operands[:1]
        if listed.kind != "reduction":
            self.devices.add(device)
        op = Op(
            *owner,
            listed.kind,
            phase,
            func.name().split("::")[-1].split(".")[0],
            tuple(map(ops.shape, operands)),
            formats,
            accumulation(listed.kind, operands[0].dtype, device, func.namespace),
            short(results[0].dtype),
            decided,
            weight if listed.kind == "product" else "",
        )
        size = sum(t.numel() * t.element_size() for t in (*operands, *results))
        self.ops.setdefault(op, Total()).add(listed.flops(args, result), size, lost or {})


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
