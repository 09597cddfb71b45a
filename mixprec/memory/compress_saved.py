"""compress_saved: tensors that autograd saves for backward are kept in 8 or 4 bits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from .._context import context, replaced
from .._modes import nor_below
from .packed import Kept, Packer, Saved
from .plan import form_of
from .running import (
    NAMES,
    OF_MODULES,
    Op,
    Watch,
    current,
    is_held_by_owner,
    is_weight,
    kind_of,
    newest_operand,
)

Bits = int | str | Mapping[str, int | str | None]
_MODES: dict[object, int] = {"int8": 8, "int4": 4, 8: 8, 4: 4}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MIN_ELEMENTS = 4096  # below, the call of a kernel costs more than the memory is worth


@contextmanager
def recorded(record: Callable[[str, torch.Tensor | Saved], None]) -> Iterator[None]:
    """Call record(kind, saved) for each tensor that autograd saves inside, compressed or not."""
    with replaced("record", record), nullcontext() if context.hooks else _hooks(None, None, None):
        yield


@contextmanager
def compress_saved(
    bits: Bits, *, model: nn.Module | None = None, seed: int | None = None
) -> Iterator[None]:
    """Keep the tensors that autograd saves inside the block in 8 or 4 bits until backward.

        with mixprec.compress_saved("int8"):
            loss = model(batch)
        loss.backward()                     # inside or outside of the block

    bits: "int8"; "int4", for 4 bits where they suffice (inputs of linear layers, convolutions, GELU
    and SiLU, norms and products of elements) and 8 elsewhere; or a dict of patterns of module
    names, {"*.attention": 8, "*.mlp": 4, "head": None}, which needs `model`, the module they are
    names in. A pattern holds for all that a module runs, except where a module inside matches too;
    of several that match one module the last applies; modules that none matches save as ever. Of
    modules that run as one function (`convert(fuse=True)`), those with parameters count, and the
    most bits of theirs apply.

    Each group of 128 elements x becomes codes and a range: x ~ min + code * step, rounded
    stochastically, so that what backward reads has the mean x. Where a derivative is not linear,
    what is packed is chosen so that the gradients have the right mean: a bit for ReLU, limited
    values for GELU, normalized ones for norms; see docs/memory.md. The forward pass is not changed.
    A tensor is kept as it is if it is

      - a parameter, a view or cast of one, a buffer or an input, which are in memory anyway;
      - integer, FP8, FP64, of a subclass such as DTensor, or smaller than 4,096 elements;
      - a statistic (logsumexp, mean, rstd), saved by a loss, a mask of attention;
      - q, k or v of a fused attention, in 16 bits; in FP32, they get 16 bits, its result 12;
      - saved by an op that docs/memory.md does not list, or that torch's function modes do not see
        (another library's autograd.Function): its backward may divide by it, take its exponential
        or compare it (amax).

    A tensor that several ops save is packed once, where no gradient can pass through both. One that
    is modified in place later raises RuntimeError in backward, as without the block.

    seed: of the random numbers, with a counter of the tensors packed in the block. None draws one
    from torch's CPU generator when the first tensor is packed, so that torch.manual_seed determines
    a run, and one that `load_checkpoint` resumes goes on with the same bits. Inf and NaN: all
    elements of the group come back as NaN, so that an overflow reaches the gradients.

    The block holds for the thread that entered it and nests, the innermost one applies; without
    grad mode and in code inside torch.compile it has no effect. Inside torch.utils.checkpoint
    nothing is saved but its inputs, as they are. ValueError for bits that are not offered, for
    patterns without a model, and for a pattern that matches no module.

    Source: ActNN (Chen et al., 2021), GACT (Liu et al., 2022).
    """
    modes = check(bits, model)
    if seed is not None and not (isinstance(seed, int) and -(2**63) <= seed < 2**63):
        raise ValueError(f"compress_saved: seed must be an int of 64 bits, got {seed!r}")
    with nullcontext() if torch.compiler.is_compiling() else _hooks(*modes, seed):
        yield


def check(
    bits: Bits, model: nn.Module | None
) -> tuple[int | None, dict[nn.Module, int | None] | None]:
    """The mode of the whole block, or those of modules. Raises the errors of compress_saved."""
    return (None, _by_module(bits, model)) if isinstance(bits, Mapping) else (_mode(bits), None)


def _mode(bits: object) -> int:
    if isinstance(bits, (int, str)) and bits in _MODES:
        return _MODES[bits]
    raise ValueError(f'compress_saved: bits must be "int8", "int4", 8 or 4, got {bits!r}')


def _by_module(
    patterns: Mapping[str, int | str | None], model: nn.Module | None
) -> dict[nn.Module, int | None]:
    if model is None:
        raise ValueError(
            "compress_saved: patterns of module names need model=, the module that has them"
        )
    modes = {p: None if bits is None else _mode(bits) for p, bits in patterns.items()}
    by_module, matched = {}, set()
    for name, module in model.named_modules():
        if fitting := [p for p in modes if fnmatchcase(name, p)]:
            by_module[module] = modes[fitting[-1]]
            matched.update(fitting)
    if unmatched := [p for p in modes if p not in matched]:
        raise ValueError(
            f"compress_saved: bits has patterns that match no module of the model: {unmatched}"
        )
    return by_module


@contextmanager
def _hooks(
    mode: int | None, by_module: dict[nn.Module, int | None] | None, seed: int | None
) -> Iterator[None]:
    modes, watch, packer = _Modes(mode), Watch(NAMES), Packer(seed)
    by_param = WeakTensorKeyDictionary()  # the mode of the parameter's module
    for module, module_mode in (by_module or {}).items():
        by_param.update((p, module_mode) for p in module.parameters(recurse=False))

    @nor_below
    def pack(t: torch.Tensor) -> Kept | Saved:
        op, form = current(t), None
        number = _mode_of(op, modes, by_param)
        if number is not None and _may_compress(t, watch) and not is_weight(t, op):
            form = form_of(t, op, number)
        if op is None or form is None:
            saved: Kept | Saved = Kept(t)
        else:
            saved = packer.pack(t, form, op.sequence, newest_operand(op))
        if context.record is not None:
            context.record(kind_of(op), t if isinstance(saved, Kept) else saved)
        return saved

    with ExitStack() as stack:
        for module, module_mode in (by_module or {}).items():
            stack.enter_context(_mode_inside(module, module_mode, modes))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, _unpack))
        stack.enter_context(watch)
        stack.enter_context(replaced("hooks", context.hooks + 1))
        yield


class _Modes(threading.local):
    """Of the block, and of the modules that this thread is in."""

    def __init__(self, mode: int | None) -> None:
        self.stack = [mode]

    def leave(self) -> None:
        # In a thread that was in the module when the block began, there is nothing to leave.
        if len(self.stack) > 1:
            self.stack.pop()


@nor_below
def _unpack(saved: Kept | Saved) -> torch.Tensor:
    with torch.no_grad():
        return saved.unpack()


def _may_compress(t: torch.Tensor, watch: Watch) -> bool:
    return (
        type(t) is torch.Tensor
        and t.dtype in _FLOATS
        and t.numel() >= MIN_ELEMENTS
        and t.layout == torch.strided
        and not t.is_meta
        and t.untyped_storage().nbytes() >= t.nbytes  # not expanded
        and not is_held_by_owner(t, watch)
    )


class ModuleHook:
    """Of a module that a pattern matches. It changes no values: what runs modules as one function,
    without their hooks, may ignore it."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    @nor_below
    def __call__(self, *_: object) -> None:
        self.call()


@contextmanager
def _mode_inside(module: nn.Module, mode: int | None, modes: _Modes) -> Iterator[None]:
    """`own` is the last of `modes` while `module` runs."""
    enter = ModuleHook(lambda: modes.stack.append(mode))
    leave = ModuleHook(modes.leave)
    before = module.register_forward_pre_hook(enter, prepend=True)
    after = module.register_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def _mode_of(op: Op | None, modes: _Modes, by_param: WeakTensorKeyDictionary) -> int | None:
    """The mode of the module that runs; where several run as one function, that which keeps most
    of those of their own."""
    mode: int | None = modes.stack[-1]
    if op is None or op.name not in OF_MODULES or not len(by_param):
        return mode
    bases = (t if t._base is None else t._base for t in op.tensors())
    module_modes = [by_param[base] for base in bases if base in by_param]
    return mode if not module_modes else None if None in module_modes else max(module_modes)
