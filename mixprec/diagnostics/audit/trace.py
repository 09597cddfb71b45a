"""Records the ops of training steps, forward and backward, as torch dispatches them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.weak import WeakTensorKeyDictionary

from ..._modes import nor_below
from ...functional import _products
from ...nn._layer import Layer
from ...optim._base import Optimizer
from ...optim._state import short
from ...recipes import OUTLIERS, Recipe
from . import modes, ops, provenance
from .diff import Points
from .noise import measured
from .ops import Call
from .provenance import Owner, Owners
from .records import AGAIN, BACKWARD, FORWARD, STEP, Op, accumulation, operand_formats
from .shadow import Ran, Shadow

aten = torch.ops.aten
_ADD_ = aten.add_.Tensor
_LOW = (torch.bfloat16, torch.float16)
_ZERO = (aten.zero_.default, aten._foreach_zero_.default)
_SAMPLE = 4096  # elements of each parameter
_TORCHS = {c for c in vars(torch.optim).values() if isinstance(c, type)} - {torch.optim.LBFGS}


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


class _Gemm(NamedTuple):
    """A product of mixprec that is about to run, and the dtypes of torch.autocast."""

    kind: str
    recipe: Recipe
    name: str
    autocast: dict[str, torch.dtype]


class Recorder(TorchDispatchMode):
    """A mode that notes each op that the module `ops` lists in `ops`.

    devices: the types of device of products; cast_back: where tensors are cast to fewer bits and
    back at once, with both dtypes, how often; sums: where products of no parameter are added to a
    tensor of 16 bits, its dtype and shape, of how many it is the sum; steps: those that the
    optimizer, if audit was given it, has begun; has_compiled: whether functions that torch.compile
    has returned were called; has_compiled_backward: whether code that was compiled for a forward
    pass before the block ran its backward pass.
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
        self.ops: dict[Op, Op] = {}
        self.devices: set[str] = set()
        self.cast_back: Counter[tuple[str, str, str]] = Counter()
        self.has_backward, self.steps, self._skipped = False, 0, 0
        self.owners, self._optimizer = Owners(model), optimizer
        self.updates = None if optimizer is None else Updates(optimizer)
        self.sums: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
        self.gradients = Gradients(model.parameters())
        self.points = Points()
        if scaler is not None:
            self.owners.watch(scaler)
        self.calls = modes.Calls()
        self.provenance = provenance.Provenance(self.calls, model.named_parameters())
        self._origins: dict[int, _Origin] = {}  # by the sequence number of a node
        self._gemm: _Gemm | None = None
        self._stepping = False
        self.has_compiled = self.has_compiled_backward = False

    @property
    def skips_all(self) -> bool:
        """Whether a scaler has kept the optimizer from every step, as torch's does, or the
        optimizer has skipped each, as ours do."""
        return self._optimizer is not None and self._skips() - self._skipped == self.steps

    def _skips(self) -> int:
        optimizer = self._optimizer
        return int(optimizer.skipped) if isinstance(optimizer, Optimizer) else 0

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        optimizer, updates = self._optimizer, self.updates

        def before(*_: Any) -> None:
            self._stepping = True
            self.steps += 1
            updates.before()  # type: ignore[union-attr]

        def after(*_: Any) -> None:
            updates.after()  # type: ignore[union-attr]
            self._stepping = False
            if self._shadow is not None:
                self._shadow.clear()

        with contextlib.ExitStack() as stack:
            if optimizer is not None:
                stack.callback(optimizer.register_step_pre_hook(before).remove)
                stack.callback(optimizer.register_step_post_hook(after).remove)
                self._skipped = self._skips()
            _products.listeners.append(self._product)
            stack.callback(_products.listeners.remove, self._product)
            for context in (modes.torch_patched(), self, self.calls):
                stack.enter_context(context)
            yield

    def _product(self, kind: str, recipe: Recipe, name: str) -> None:
        if self in _get_current_dispatch_mode_stack():  # else it is another thread's
            self._gemm = _Gemm(kind, recipe, name, modes.autocast_dtypes())

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
        call = Call(func, args, kwargs)
        if call.listed is None and torch.is_inference_mode_enabled() and ops.is_composite(func):
            if self.calls.call.autocast:
                raise RuntimeError(
                    "audit: torch.inference_mode with torch.autocast computes in other dtypes "
                    "while ops are watched: use torch.no_grad in place of inference_mode"
                )
            with self:  # elsewhere it has arrived as its parts
                return func.decompose(*args, **kwargs)
        self.has_compiled = self.has_compiled or modes.is_in_compiled()
        place = self._place()
        shadow = None if place.phase == STEP else self._shadow
        if shadow is not None:
            for gradient in ops.tensors(self.calls.gradients):
                if not gradient.requires_grad:  # the others are of inputs=
                    shadow.roles.put(gradient, "g")
            shadow.prepare(call)
        inside = call.listed and self.calls.call.autocast and ops.calls_others(func)
        with modes.autocast_inside() if inside else contextlib.nullcontext():
            call.run()
        ran = None
        if shadow is not None:
            ran = shadow.follow(call)
            is_root = self.calls.backward > 0 and place.phase == FORWARD  # that of the loss
            shadow.mark(call, place.phase == BACKWARD or is_root)
        decided = None if call.listed is None else self._record(call, call.listed, place, ran)
        is_ours = func is provenance.TO_COPY and isinstance(self.owners.module(place.owner), Layer)
        is_back = self.provenance.note(call, decided, is_ours)
        if is_back and place.phase == FORWARD:
            narrow, wide = (short(t.dtype) for t in (call.inputs[0], call.result))
            self.cast_back[place.owner.where, wide, narrow] += 1
        if not torch.is_grad_enabled() and not self._stepping:
            self._note_sum(call)
        self.gradients.note(call, place.phase == BACKWARD)
        return call.result

    def _note_sum(self, call: Call) -> None:
        is_product = call.listed is not None and call.listed.kind == "product"
        if (times := self.provenance.products_in(call, is_product)) < 2:
            return
        owner = self.owners.find()
        if owner.name is not None or owner.line:  # else autograd's engine, of a weight used twice
            key = owner.where, short(call.results[0].dtype), tuple(call.results[0].shape)
            self.sums[key] = max(times, self.sums[key])

    def _source(self, owner: Owner, recipe: Recipe) -> str:
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

    def _record(self, call: Call, listed: ops.Listed, place: _Place, ran: Ran | None) -> str:
        """Returns what set the dtype of the result."""
        phase, owner, origin = place
        if phase == BACKWARD and origin is None:
            name = torch._C._current_autograd_node().name()
            self.has_compiled_backward |= name == "CompiledFunctionBackward"
        lost = {}
        if ran is not None and self._shadow is not None:
            with torch.no_grad():
                lost = measured(call, ran, self._shadow)
        operands = [t for name in listed.operands for t in ops.tensors(call.given[name])]
        formats = tuple(short(t.dtype) for t in operands)
        device, is_ours = operands[0].device.type, call.func.namespace == "mixprec"
        gemm, result_decided = None, None
        if listed.kind in ("product", "convolution"):
            gemm, self._gemm = self._gemm, None
        if gemm is not None:
            formats = operand_formats(gemm.recipe, gemm.kind)
            owner = self.owners.layer(owner, gemm.name)
            decided = f"{self._source(owner, gemm.recipe)} {gemm.recipe.name}"
            if call.results:  # whose dtype is that of the layer's input, or of torch.autocast
                result = call.results[0]
                is_autocast = result.dtype == gemm.autocast.get(result.device.type)
                result_decided = provenance.AUTOCAST if is_autocast else provenance.TENSOR_DTYPE
        elif phase == BACKWARD:
            unknown = provenance.MIXPREC if is_ours else provenance.UNKNOWN
            decided = (origin and origin.decided) or unknown
        elif is_ours:
            decided = provenance.MIXPREC
        else:
            decided = self.provenance.decided(operands)
            low = self.calls.call.autocast.get(device)
            if low is not None and ops.calls_others(call.func):
                formats, decided = (short(low),) * len(operands), provenance.AUTOCAST
        weight = next(filter(None, (self.provenance.facts(t).weight for t in operands)), "")
        if phase == BACKWARD:
            weight = origin.weight if origin else ""
        elif origin is not None and origin.decided in (None, provenance.MIXPREC):
            origin.decided, origin.weight = decided, weight
        results = call.results or operands[:1]
        if listed.kind != "reduction":
            self.devices.add(device)
        op = Op(
            *owner,
            listed.kind,
            phase,
            call.op,
            tuple(map(ops.shape, operands)),
            formats,
            accumulation(listed.kind, operands[0].dtype, device, call.func.namespace),
            short(results[0].dtype),
            decided,
            weight if listed.kind == "product" else "",
        )
        size = sum(t.numel() * t.element_size() for t in (*operands, *results))
        self.ops.setdefault(op, op).add(call.flops, size, lost)
        if self._shadow is not None and phase in (FORWARD, BACKWARD):
            where = owner.name if owner.name is not None else owner.line
            self.points.record(self._shadow, where, phase, call, ran, lost)
        return decided if result_decided is None else result_decided


class Gradients:
    """summed: of a parameter, the dtype of `grad` and how often a backward pass has added to it."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self.summed: dict[torch.Tensor, tuple[str, int]] = {}
        # By gradient: -1 for one that may be 0, as from zero_grad(set_to_none=False).
        self._times: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        for p in params:
            if p.grad is not None:
                self._times[p.grad] = -1

    def note(self, call: Call, in_backward: bool) -> None:
        """An op has run."""
        if call.func in _ZERO:
            for t in call.inputs:
                self._times[t] = -1
        elif call.func is _ADD_ and in_backward:
            node: Any = torch._C._current_autograd_node()
            if hasattr(node, "variable"):  # it adds to the gradient of an earlier backward pass
                param, grad = node.variable, node.variable.grad
                self._times[grad] = times = self._times.get(grad, 0) + 1
                if times > 0:
                    most = self.summed.get(param, ("", 0))[1]
                    self.summed[param] = short(grad.dtype), max(times, most)


class Updates:
    """Of the sampled elements with a gradient: how many there are, and how many no step changed.

    Only of torch's optimizers: others may keep masters of the weights, which change. LBFGS does
    nothing where it has converged, and a GradScaler makes fused kernels skip a step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._is_known = type(optimizer) in _TORCHS
        self._before: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._counts: list[torch.Tensor] = []
        self.dtype = ""

    def before(self) -> None:
        """A step begins."""
        self._before = []
        is_scaled = getattr(self._optimizer, "found_inf", None) is not None
        if not self._is_known or is_scaled:
            return
        groups = (g for g in self._optimizer.param_groups if float(g["lr"]) != 0)
        for p in (p for group in groups for p in group["params"]):
            if p.dtype in _LOW and p.grad is not None and not p.grad.is_sparse:
                self.dtype = short(p.dtype)
                self._before.append((p, _some(p).clone(), _some(p.grad) != 0))

    def after(self) -> None:
        """It has ended."""
        for p, old, has_gradient in self._before:
            lost = has_gradient & (_some(p) == old)
            counts = torch.stack([torch.count_nonzero(lost), torch.count_nonzero(has_gradient)])
            self._counts.append(counts.to("cpu", non_blocking=True))
        self._before = []

    def lost(self) -> float:
        """The share of the elements; 0 if there is none."""
        if not self._counts:
            return 0.0
        lost, all_of_them = torch.stack(self._counts).sum(0).tolist()
        return lost / all_of_them if all_of_them else 0.0


def _some(t: torch.Tensor) -> torch.Tensor:
    return t.detach().reshape(-1)[:_SAMPLE]
