"""compress_saved: tensors that autograd saves for backward are kept in 8 or 4 bits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from fnmatch import fnmatchcase

import torch
from torch import nn

from . import kinds
from .packed import Kept, Packer, Saved
from .running import Watch, current, is_held_by_owner

__all__ = ["Bits", "check", "compress_saved", "recorded"]

Bits = int | str | Mapping[str, int | str | None]
_MODES: dict[object, int] = {"int8": 8, "int4": 4, 8: 8, 4: 4}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MIN_ELEMENTS = 4096  # below, the call of a kernel costs more than the memory is worth


class _Thread(threading.local):
    record: Callable[[str, torch.Tensor | Saved], None] | None = None
    blocks = 0  # that this thread is in


_thread = _Thread()


@contextmanager
def recorded(record: Callable[[str, torch.Tensor | Saved], None]) -> Iterator[None]:
    """Call record(kind, saved) for each tensor that autograd saves inside, compressed or not."""
    before, _thread.record = _thread.record, record
    try:
        with nullcontext() if _thread.blocks else _hooks(None, None, None):
            yield
    finally:
        _thread.record = before


@contextmanager
def compress_saved(
    bits: Bits, *, model: nn.Module | None = None, seed: int | None = None
) -> Iterator[None]:
    """Keep the tensors that autograd saves inside the block in 8 or 4 bits until backward.

        with mixprec.compress_saved("int8"):
            loss = model(batch)
        loss.backward()                     # inside or outside of the block

    bits: "int8"; "int4", for 4 bits where they suffice (inputs of linear layers, convolutions, most
    activations, norms and products of elements) and 8 elsewhere; or a dict of patterns of module
    names, {"*.attention": 8, "*.mlp": 4, "head": None}, which needs `model`, the module they are
    names in. A pattern holds for all that a module runs, except where a module inside matches too;
    of several that match one module the last applies; modules that none matches save as ever.

    Each group of 128 elements x becomes codes and a range: x ~ min + code * step, rounded
    stochastically, so that what backward reads has the mean x. The forward pass is not changed.
    A tensor is kept as it is if it is

      - a parameter, a view or cast of one, a buffer or an input, which are in memory anyway;
      - integer, FP8, FP64, of a subclass such as DTensor, or smaller than 4,096 elements;
      - a statistic (logsumexp, mean, rstd), saved by a loss, a mask of attention;
      - saved by an op that docs/memory.md does not list: its backward may divide by it, take its
        exponential or compare it (amax);
      - FP32 and saved by an op that torch's function modes do not see (another library's
        autograd.Function): it may be a statistic.

    A tensor that several ops save is packed once.

    seed: of the random numbers, with a counter of the tensors packed in the block. None draws one
    from torch's CPU generator when the first tensor is packed, so that torch.manual_seed determines
    a run, and one that `load_checkpoint` resumes goes on with the same bits. Inf and NaN: all
    elements of the group come back as NaN, so that an overflow reaches the gradients.

    The block holds for the thread that entered it and nests, the innermost one applies; without
    grad mode and in code inside torch.compile it has no effect. Inside torch.utils.checkpoint
    nothing is saved but its inputs; those in 16 bits are compressed, and its recomputation starts
    from them. ValueError for bits that are not offered, for patterns without a model, and for a
    pattern that matches no module.

    Source: ActNN (Chen et al., 2021), GACT (Liu et al., 2022).
    """
    modes = check(bits, model)
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
    found, matched = {}, set()
    for name, module in model.named_modules():
        if fitting := [p for p in modes if fnmatchcase(name, p)]:
            found[module] = modes[fitting[-1]]
            matched.update(fitting)
    if unmatched := [p for p in modes if p not in matched]:
        raise ValueError(
            f"compress_saved: bits has patterns that match no module of the model: {unmatched}"
        )
    return found


@contextmanager
def _hooks(
    mode: int | None, by_module: dict[nn.Module, int | None] | None, seed: int | None
) -> Iterator[None]:
    modes, watch, packer = _Modes(mode), Watch(), Packer(seed)

    def pack(t: torch.Tensor) -> Kept | Saved:
        op, number = current(), modes.stack[-1]
        if number is not None and not _may_compress(t, watch):
            number = None
        if number is not None:
            number = None if kinds.is_weight(t, op) else kinds.bits_for(t, op, number)
        saved = Kept(t, t._version) if number is None else packer.pack(t, number)
        if _thread.record is not None:
            _thread.record(kinds.kind_of(op), t if isinstance(saved, Kept) else saved)
        return saved

    with ExitStack() as stack:
        for module, own in (by_module or {}).items():
            stack.enter_context(_mode_inside(module, own, modes))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, _unpack))
        stack.enter_context(watch)
        _thread.blocks += 1
        try:
            yield
        finally:
            _thread.blocks -= 1


class _Modes(threading.local):
    """Of the block, and of the modules that this thread is in."""

    def __init__(self, mode: int | None) -> None:
        self.stack = [mode]


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


@contextmanager
def _mode_inside(module: nn.Module, own: int | None, modes: _Modes) -> Iterator[None]:
    """`own` is the last of `modes` while `module` runs."""
    before = module.register_forward_pre_hook(lambda *_: modes.stack.append(own), prepend=True)
    after = module.register_forward_hook(lambda *_: _drop(modes), always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def _drop(modes: _Modes) -> None:
    if len(modes.stack) > 1:  # in a thread that was in the module when the block began, it is not
        modes.stack.pop()
