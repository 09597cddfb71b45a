"""unchanged: a model is as it was after a forward pass that only measured it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .._checkpoint_file import random_states_kept


@contextlib.contextmanager
def unchanged(model: nn.Module, more: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Restore at the end the buffers, children and other attributes of the modules of `model`, and
    the values of these tensors and of `more`.

    Parameters are not copied. A Python object that an attribute keeps is the same again, with
    whatever was done to it (such as a list that was appended to).
    """
    modules = [(module, _registries(module)) for module in model.modules()]
    not_saved = [(module, {*module._non_persistent_buffers_set}) for module, _ in modules]
    held = [v for _, dicts in modules for d in dicts for v in d.values() if _has_value(v)]
    kept = {id(t): t for t in (*held, *model.buffers(), *more)}.values()
    values = [(t, t.data, t.detach().clone()) for t in kept]
    try:
        yield
    finally:
        for module, before in modules:
            for now, then in zip(_registries(module, copied=False), before, strict=True):
                _restore(now, then)
        for module, names in not_saved:
            module._non_persistent_buffers_set.clear()
            module._non_persistent_buffers_set.update(names)
        with torch.no_grad():
            for t, data, value in values:
                data.copy_(value)  # which leaves the version that a backward pass compares
                if type(t) is torch.Tensor and not t.is_set_to(data):
                    t.data = data  # it had got other memory


def _registries(module: nn.Module, copied: bool = True) -> list[dict[str, Any]]:
    """The buffers of a module, its children and its attributes. Of torch's parallel wrappers the
    buffers only: the rest says what of a larger state has been built."""
    if isinstance(module, torch.jit.ScriptModule):  # which has views of what it holds
        return []
    found: list[dict[str, Any]] = [module._buffers]
    if not isinstance(module, _wrappers()):
        found += [module._modules, vars(module)]
    return [{**registry} for registry in found] if copied else found


def _wrappers() -> tuple[type[nn.Module], ...]:
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return (nn.parallel.DistributedDataParallel, *([fsdp] if fsdp is not None else []))


def _has_value(value: object) -> bool:
    """A tensor to copy: not a parameter under a second name."""
    return isinstance(value, torch.Tensor) and not (
        isinstance(value, nn.Parameter) or value.is_inference()
    )


def _restore(now: dict[str, Any], then: dict[str, Any]) -> None:
    """The same objects under the same names, in the same order."""
    if now.keys() - then.keys() or any(now.get(name, then) is not then[name] for name in then):
        now.clear()
        now.update(then)


@contextlib.contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers, attributes and random generators at the end."""
    grads = [(p, p.grad) for p in model.parameters()]
    mains = [getattr(p, "main_grad", None) for p, _ in grads]
    try:
        for p, _ in grads:
            p.grad = None
        with random_states_kept(), unchanged(model, [t for t in mains if t is not None]):
            yield
    finally:
        for p, grad in grads:
            p.grad = grad
