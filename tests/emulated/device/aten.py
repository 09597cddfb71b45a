"""torch's own ops on the tensors of the fake device (cudart.cpp), computed by the CPU.

The memory is the host's, so a CPU tensor over the same bytes is handed to the CPU's kernel; what
it returns anew is moved to the device. Views and allocations are torch's own.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

# Registered for CUDA, and no more than bookkeeping there.
NATIVE = {
    "_local_scalar_dense", "_reshape_alias", "as_strided", "empty", "empty_strided",
    "record_stream", "resize_", "set_", "unfold", "view",
}  # fmt: skip
# Not registered for CUDA, but with a choice in them that would lead to cuDNN.
CHOOSING = ("aten::convolution", "aten::convolution_backward")
LIBRARIES: list[torch.library.Library] = []
RUNTIME = ctypes.CDLL("libcuda.so.1")
RUNTIME.gpu_on_cpu_captures.argtypes = (ctypes.c_void_p,)
RUNTIME.gpu_on_cpu_launches.restype = ctypes.c_long
RUNTIME.gpu_on_cpu_set_launches.argtypes = (ctypes.c_long,)


def _seen_by_cpu(x: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of x; where there is none, one that can grow."""
    if x.numel() == 0:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
    storage = x.untyped_storage()
    bytes_ = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    with torch._C._DisableTorchDispatch():
        there = torch.empty(0, dtype=x.dtype, device="cpu")
        there.set_(bytes_, x.storage_offset(), x.shape, x.stride())
    return there


def _moved(y: torch.Tensor) -> torch.Tensor:
    there = torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device="cuda")
    _seen_by_cpu(there).copy_(y)
    return there


class _Call:
    """One call of an op: the arguments as the CPU sees them, and the tensors that these are."""

    def __init__(self, op: Callable[..., Any], args: Any, options: Any) -> None:
        self.op = op
        self.given: dict[int, torch.Tensor] = {}  # by the id of what the CPU sees in its place
        self.seen: list[torch.Tensor] = []
        self.args, self.options = pytree.tree_map(self._there, (args, options))

    def _there(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            there = _seen_by_cpu(value)
            self.given[id(there)] = value
            self.seen.append(there)
            return there
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, torch.Generator):
            return torch.Generator().manual_seed(value.initial_seed())
        return value

    def run(self) -> Any:
        return pytree.tree_map(self._back, self.op(*self.args, **self.options))

    def _back(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        theirs = self.given.get(id(value))
        if theirs is None:
            return _moved(value)
        if theirs.shape != value.shape:  # an empty `out` that the op gave its size
            theirs.resize_(value.shape).copy_(value)
        return theirs

    def record(self) -> Any:
        """What run() returns, but with the work, the values too, left to the graph's launches."""
        # Elements that share memory are not written to.
        written = [x for x in self.seen if 0 not in x.stride()]
        before = [x.clone() for x in written]
        with torch.random.fork_rng(devices=[]):  # a capture draws no random numbers
            result = self.run()
        for x, old in zip(written, before, strict=True):
            x.copy_(old)
        fresh = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        known = {id(x) for x in self.given.values()}
        into = {i: _seen_by_cpu(x) for i, x in enumerate(fresh) if id(x) not in known}
        for x in into.values():
            if x.is_floating_point():
                x.fill_(float("nan"))

        def launch(call: _Call = self) -> None:
            again = pytree.tree_leaves(call.op(*call.args, **call.options))
            values = [x for x in again if isinstance(x, torch.Tensor)]
            for i, x in into.items():
                x.copy_(values[i])

        _record(launch)
        return result


_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_recorded: dict[int, Callable[[], None]] = {}
_numbers = itertools.count(1)
_run_recorded = _CALLBACK(lambda number: _recorded[number]())
_drop_recorded = _CALLBACK(lambda number: _recorded.pop(number, None) and None)


def _record(work: Callable[[], None]) -> None:
    number = next(_numbers)
    _recorded[number] = work
    RUNTIME.gpu_on_cpu_record(_run_recorded, _drop_recorded, ctypes.c_void_p(number))


def _captures() -> bool:
    return bool(RUNTIME.gpu_on_cpu_captures(torch.cuda.current_stream().cuda_stream))


def _on_cpu(packet: Callable[..., Any], overload: str) -> Callable[..., Any]:
    op = getattr(packet, overload or "default")
    types = [str(argument.type) for argument in op._schema.arguments]
    tensors = {i for i, kind in enumerate(types) if kind == "Tensor"}

    def run(*args: Any, **options: Any) -> Any:
        # A number comes as one, also where the overload has a tensor for it.
        number = any(isinstance(a, (int, float)) and i in tensors for i, a in enumerate(args))
        call = _Call(packet if number else op, args, options)
        return call.record() if _captures() else call.run()

    return run


def _copy_(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    here, there = (_seen_by_cpu(x) if x.is_cuda else x for x in (to, source))
    if _captures():
        _record(functools.partial(here.copy_, there))
    else:
        here.copy_(there)
    if to.is_cuda != source.is_cuda and not non_blocking:
        torch.cuda.current_stream().synchronize()  # as the device would, and may not be allowed to
    return to


def _scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """That of the CPU takes no scales per row."""
    product = (a.double() * scale_a) @ (b.double() * scale_b)
    return (product if bias is None else product + bias.double()).float().to(out_dtype or a.dtype)


def _mm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """With a wider result, which the CPU's lacks."""
    return (a.double() @ b.double()).to(out_dtype)


def _addmm_out(
    c: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: torch.Tensor,
) -> torch.Tensor:
    return out.copy_((c.double() * beta + alpha * (a.double() @ b.double())).to(out_dtype))


def _as_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """Counted as one launch, whatever ops it runs."""

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        count = RUNTIME.gpu_on_cpu_launches() + 1
        result = function(*args, **options)
        RUNTIME.gpu_on_cpu_set_launches(count)
        return result

    return run


# Where the CPU's op cannot take the place of the GPU's.
OURS = {
    "copy_": _copy_,
    "_scaled_mm": _as_one(_scaled_mm),
    "mm.dtype": _as_one(_mm),
    "addmm.dtype_out": _as_one(_addmm_out),
}


def install() -> None:
    """From now on, for the life of the process."""
    library = torch.library.Library("aten", "IMPL")
    LIBRARIES.append(library)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        of_cuda = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
        for name in (*of_cuda, *CHOOSING):
            namespace, op = name.split("::")
            base, _, overload = op.partition(".")
            if namespace == "aten" and base not in NATIVE:
                run = _on_cpu(getattr(torch.ops.aten, base), overload)
                library.impl(op, run, "CUDA", allow_override=True)
        for op, run in OURS.items():
            library.impl(op, run, "CUDA", allow_override=True)
    torch.cuda._sleep = lambda cycles: None  # a kernel, not an op
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
