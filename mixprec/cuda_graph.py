"""graphed: a whole training step as one CUDA graph."""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from itertools import compress
from typing import Any, TypeVar

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils import _pytree as pytree

from . import scaling
from ._graph_users import CONSTANTS, Users, gradient_of, stride_of, used, version_of
from .amp.grad_scaler import GradScaler
from .optim._base import Optimizer

Step = TypeVar("Step", bound=Callable[..., Any])

_here = threading.local()
_OFTEN = 3  # calls in a row that find a change, after which a warning names it


def graphed(step: Step, *, warmup: int = 3) -> Step:
    """Return a function that runs a training step, on a GPU as one CUDA graph.

        @mixprec.graphed
        def step(x, y):
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss

        for x, y in batches:
            loss = step(x, y)
            scheduler.step()

    The first `warmup` calls run `step` as it is, the next one captures it, and all others replay
    it: one launch for the host. Each call trains on its own inputs, and N calls leave the bits of N
    calls of `step` (except for `compress_saved`, which draws other random numbers). `step` may hold
    all that does not wait for the device: forward and backward passes of several micro-batches,
    loss scaling, clipping, skipped steps, the update.

    Arguments are dense tensors on one GPU that need no gradient, with the same shape, dtype and
    strides in every call, and constants, in any nesting; results are tensors on the GPU and None,
    in any nesting: the caller gets copies, without history. ValueError otherwise. If no argument is
    on a GPU, `step` runs as it is.

    A replay runs no Python. The modules, optimizers and scalers that `step` calls are found while
    it runs, and before each replay their parameters, buffers, states, settings and attributes that
    are numbers, functions, lists, dicts or sets, also nested ones, hooks of modules and optimizers,
    and the regions around the call, are compared with those at the capture. After a change (train
    and eval, a loaded optimizer, a frozen parameter, a new group, weight_decay) the call runs as it
    is and the next one captures again; a warning names what changes in each call. The lr of
    mixprec's optimizers may: it is written to the device. Whatever else `step` reads, such as a
    tensor in a global variable, must be written in place.

    RuntimeError, with the reason, for what cannot be captured: `.item()` and other waits for the
    device, random numbers of the CPU, a learning rate scheduler inside `step`, release_gradients,
    `reuse_weights` or torch.autocast with its cache around `step`, a scale on the CPU. warmup: 1 or
    more.
    """
    if not callable(step):
        raise TypeError(f"graphed: step must be a function, got {type(step).__name__}")
    if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 1:
        raise ValueError(f"graphed: warmup must be an int, 1 or more, got {warmup!r}")
    return functools.update_wrapper(_Graphed(step, warmup), step)  # type: ignore[return-value]


class _Graphed:
    """A step that is warm after some calls, and then captured."""

    def __init__(self, step: Callable[..., Any], warmup: int) -> None:
        self._step, self._left = step, warmup
        self._inputs: _Inputs | None = None
        self._users: Users | None = None  # of the last call without a graph
        self._graph: _Graph | None = None
        self._changes = 0  # in a row
        self._kinds: list[Any] = []  # of the results of the last call without a graph

    @_disable_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (inputs := self._inputs) is None:
            tensors = [x for x in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(x)]
            device = next((x.device for x in tensors if x.is_cuda), None)
            if device is None:
                return self._step(*args, **kwargs)
            self._inputs = inputs = _Inputs(args, kwargs, device)
            self._stream = _stream(device)
        if torch._C._cuda_isCurrentStreamCapturing():
            raise RuntimeError("graphed: step must not call a graphed function: graph it alone")
        leaves = inputs.checked(args, kwargs)
        change = None
        if self._users is not None and self._left <= 0:
            is_stale = self._graph is not None and not self._graph.grads_are_known()
            change = "grad" if is_stale else self._users.change()
        if change is not None:
            self._graph, self._changes = None, self._changes + 1
            if self._changes == _OFTEN:
                _warn(change)
        if change is not None or self._left > 0 or self._is_watched():
            return self._eager(args, kwargs, leaves)
        self._changes = 0
        if self._graph is None:
            assert self._users is not None, "found by the last call without a graph"
            self._graph = _Graph(self._step, inputs, leaves, self._users, self._stream, self._kinds)
        result = self._graph.replay(leaves)
        if self._graph.change is not None:
            _warn(self._graph.change)
            self._graph, self._users, self._left = None, None, sys.maxsize
        return result

    def _is_watched(self) -> bool:
        """Whether something is to see each op of this call, or of a capture each call of Python."""
        stats = sys.modules.get(f"{__package__}.stats")
        is_sampled = stats is not None and stats.is_sampling()
        is_profiled = self._graph is None and sys.getprofile() is not None
        return is_sampled or is_profiled or torch._C._len_torch_dispatch_stack() > 0

    def _eager(self, args: Any, kwargs: Any, leaves: list[Any]) -> Any:
        """The step without a graph, on the stream of captures, as torch.cuda.graph asks."""
        current, versions = torch.cuda.current_stream(), _versions(leaves)
        self._stream.wait_stream(current)
        is_last = self._graph is None and self._left <= 1
        # Some ops write without a new version.
        copies = [x.clone() if torch.is_tensor(x) else x for x in leaves] if is_last else leaves
        with torch.cuda.stream(self._stream), used(is_last) as found:
            result = self._step(*args, **kwargs)
        current.wait_stream(self._stream)
        _check_outputs(result)
        self._kinds = _kinds(result)
        if _versions(leaves) != versions or not all(map(_same_bytes, leaves, copies)):
            raise ValueError("graphed: step must not write to its inputs: let it work on a clone()")
        if found is not None:
            self._users = Users(found)
        if found is not None or self._left > 1:
            self._left -= 1
        if self._users is not None:
            self._users.remember()
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)


def _stream(device: torch.device) -> torch.cuda.Stream:
    """That of all captures of this thread: what autograd keeps of a parameter belongs to the stream
    that used it first, and a capture of another one would leave it out."""
    streams: dict[torch.device, torch.cuda.Stream] = vars(_here).setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    return streams[device]


def _warn(change: str) -> None:
    warnings.warn(
        f"graphed: step runs without a graph, because {change} changes from call to call; what it "
        "has to see anew in each call must be a tensor on the GPU that is written in place",
        stacklevel=5,  # the caller of step, beyond the frames of _disable_dynamo
    )


class _Inputs:
    """What the inputs of each call must be: as those of the first."""

    def __init__(self, args: Any, kwargs: Any, device: torch.device) -> None:
        self.device = device
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._is_flat = not kwargs and all(torch.is_tensor(x) for x in args)
        self._expected = list(map(_described, leaves))
        for i, x in enumerate(leaves):
            wrong = None
            if not isinstance(x, torch.Tensor):
                wrong = None if isinstance(x, CONSTANTS) else f"be a tensor, got {type(x).__name__}"
            elif type(x) not in (torch.Tensor, nn.Parameter) or x.layout != torch.strided:
                wrong = f"be a plain torch.Tensor, got {type(x).__name__}, {x.layout}"
            elif x.device != device:
                wrong = f"be on {device} as another one, got one on {x.device}"
            elif x.requires_grad:
                wrong = "need no gradient, which would stay with the graph's copy: detach() it"
            elif torch.empty_like(x, device="meta").stride() != x.stride():
                wrong = f"be dense, got shape {tuple(x.shape)}, strides {x.stride()}: contiguous()"
            if wrong is not None:
                raise ValueError(f"graphed: inputs[{i}] must {wrong}")

    def checked(self, args: Any, kwargs: Any) -> list[Any]:
        """The leaves of the inputs of a call."""
        leaves, spec = list(args), self._spec
        if not self._is_flat or kwargs or len(args) != len(self._expected):
            leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec is not self._spec and spec != self._spec:
            raise ValueError(f"graphed: inputs must be nested as {self._spec}, got {spec}")
        for i, (x, expected) in enumerate(zip(leaves, self._expected, strict=True)):
            got = x
            if isinstance(x, torch.Tensor):  # without a call of Python for each
                got = (x.dtype, x.shape, stride_of(x), x.device, x.requires_grad)
            # 0.0 and -0.0 are equal, NaN is not; so are 1, 1.0 and True.
            if got != expected if type(got) is tuple else repr(got) != repr(expected):
                raise ValueError(
                    f"graphed: inputs[{i}] must be {expected} as in the first call, got {got}: a "
                    "graph has fixed shapes; graph step again for others, or call it as it is"
                )
        return leaves

    def unflatten(self, leaves: list[Any]) -> Any:
        return pytree.tree_unflatten(leaves, self._spec)


def _described(x: Any) -> Any:
    is_tensor = isinstance(x, torch.Tensor)
    return (x.dtype, x.shape, stride_of(x), x.device, x.requires_grad) if is_tensor else x


def _check_outputs(result: Any) -> None:
    for x in pytree.tree_leaves(result):
        if x is not None and not (isinstance(x, torch.Tensor) and x.is_cuda):
            raise ValueError(
                f"graphed: step must return tensors on the GPU or None, got {_described(x)!r}, "
                "which each replay would repeat: return the tensor, and call .item() outside"
            )


def _kinds(result: Any) -> list[Any]:
    return [x if x is None else (x.dtype, tuple(x.shape)) for x in pytree.tree_leaves(result)]


def _same_bytes(x: Any, copy: Any) -> bool:
    if x is copy:
        return True
    a, b = (t.contiguous().flatten().view(torch.uint8) for t in (x, copy))
    return bool((a == b).all())


def _versions(leaves: list[Any]) -> list[int]:
    return [version_of(x) for x in leaves if torch.is_tensor(x) and not x.is_inference()]


class _Graph:
    """One capture of a step, and its replays."""

    def __init__(
        self,
        step: Callable[..., Any],
        inputs: _Inputs,
        leaves: list[Any],
        users: Users,
        stream: torch.cuda.Stream,
        kinds: list[Any],
    ) -> None:
        if (reason := users.refusal()) is not None:
            raise RuntimeError(f"graphed: step cannot be captured: {reason}")
        self._inputs = [x.clone() if torch.is_tensor(x) else x for x in leaves]
        args, kwargs = inputs.unflatten(self._inputs)
        self._groups = users.with_rates()
        self._lrs = [float(group["lr"]) for group in self._groups]
        self._rates = [
            torch.full((), lr, dtype=torch.float64, device=inputs.device) for lr in self._lrs
        ]
        self._params = users.params()
        before = list(map(gradient_of, self._params))
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as those that pin memory, go on.
        capture = torch.cuda.graph(self._graph, None, stream, "thread_local")
        drawn = torch.default_generator.get_state()
        errors: list[Exception] = []  # the first one: a capture that has failed cannot be ended
        try:
            with torch.cuda.stream(stream), self._with_rates(), capture, _kept(errors):
                result = step(*args, **kwargs)
                if not torch.equal(torch.default_generator.get_state(), drawn):
                    raise RuntimeError(
                        "it draws random numbers on the CPU, which a replay would not: draw them "
                        "on the GPU, or outside"
                    )
            if (captured := _kinds(result)) != kinds:
                raise RuntimeError(
                    f"it returns {captured}, without a graph {kinds}: lr is an FP64 tensor in it"
                )
        except Exception as error:
            for p, grad in zip(self._params, before, strict=True):
                p.grad = grad
            for scaler in users.scalers:
                scaler._per_optimizer_states.clear()
            cause = [*errors, error][0]
            if not isinstance(cause, (RuntimeError, ValueError)):
                raise cause from None
            first = str(cause).split("\n")[0]
            if "CUDA error" in first:
                first += "; .item(), .cpu(), print, `if` of a tensor, as lr is one, and the like"
                first += " wait for the device"
            raise RuntimeError(f"graphed: step cannot be captured: {first}") from error
        _check_outputs(result)
        detached = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)
        self._outputs, self._spec = pytree.tree_flatten(detached)
        self._is_one = isinstance(result, torch.Tensor)
        # What `grad` is after a replay, and must be before it, where step has not replaced it.
        self._grads = list(map(gradient_of, self._params))
        pairs = list(zip(before, self._grads, strict=True))
        is_replaced = [b is not a and b is not None and a is not None for b, a in pairs]
        self._is_read = [not (new and users.clears_first) for new in is_replaced]
        self._before = list(compress(before, self._is_read))
        # What else Python leaves behind.
        self._scalers = [scaler for scaler in users.scalers if isinstance(scaler, GradScaler)]
        owners = [o for o in users.optimizers if isinstance(o, Optimizer)]
        counts = [*(o.grad_counts for o in owners)]
        counts += [each for s in self._scalers for each in s._reader.counts.values()]
        places = [(vars(o), name) for o in owners for name in ("_sums", "_last_skip")]
        places += [(vars(each), "_last") for each in counts]
        self._left = [(entries, name, entries[name]) for entries, name in places]
        # A step also updates the scales of other models: they must not be freed.
        self._others = [[*layer.buffers(recurse=False)] for layer in scaling._layers]
        # What a step changes itself, on the host, a replay does not.
        reads_replaced = any(is_replaced) and not users.clears_first
        self.change = "grad" if reads_replaced else users.own_change()
        users.remember()

    @contextlib.contextmanager
    def _with_rates(self) -> Iterator[None]:
        """The lr of each group as a tensor of the graph, with the same bits."""
        groups, before = self._groups, [group["lr"] for group in self._groups]
        try:
            for group, rate in zip(groups, self._rates, strict=True):
                group["lr"] = rate
            yield
            if any(g["lr"] is not rate for g, rate in zip(groups, self._rates, strict=True)):
                raise RuntimeError("it sets lr, which a replay would not: set it after step")
        finally:
            for group, lr in zip(groups, before, strict=True):
                group["lr"] = lr

    def grads_are_known(self) -> bool:
        now = compress(map(gradient_of, self._params), self._is_read)
        return all(map(operator.is_, now, self._before))

    def replay(self, leaves: list[Any]) -> Any:
        for mine, x in zip(self._inputs, leaves, strict=True):
            if isinstance(mine, torch.Tensor):
                mine.copy_(x)
        lrs = list(map(float, map(operator.itemgetter("lr"), self._groups)))
        if lrs != self._lrs:
            for rate, lr, before in zip(self._rates, lrs, self._lrs, strict=True):
                if lr != before:
                    rate.fill_(lr)
            self._lrs = lrs
        self._graph.replay()
        for entries, name, value in self._left:
            entries[name] = value
        if not all(map(operator.is_, map(gradient_of, self._params), self._grads)):
            for p, grad in zip(self._params, self._grads, strict=True):
                p.grad = grad
        for scaler in self._scalers:
            scaler._after_replay()
        if self._is_one:
            return self._outputs[0].clone()
        outputs = [None if x is None else x.clone() for x in self._outputs]
        return pytree.tree_unflatten(outputs, self._spec)


@contextlib.contextmanager
def _kept(errors: list[Exception]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        errors.append(error)
        raise
