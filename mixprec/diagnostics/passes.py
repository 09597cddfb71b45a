"""Passes of a user's model: its arguments and its loss, and everything as it was after them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .._checkpoint_file import random_states_kept


def call(model: nn.Module, batch: Any) -> Any:
    """model(**batch) for a mapping, model(*batch) for a tuple or list, model(batch) otherwise."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in mappings, tuples and lists; of DTensors, the local part."""
    if isinstance(value, torch.Tensor):
        yield getattr(value, "_local_tensor", value)
    elif isinstance(value, (Mapping, tuple, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors(item)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with function(tensor) in place of each tensor in mappings, tuples and lists."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if not isinstance(value, (tuple, list)):
        return value
    items = [map_tensors(function, item) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def scalar_loss(
    who: str, model: nn.Module, batch: Any, loss: Callable[[Any], Any] | None, remedy: str
) -> torch.Tensor:
    """The loss of a batch as a tensor []: loss(output), or the output, or its `loss` (a key or an
    attribute); ValueError if it is not one number, with what to do."""
    output = value = call(model, batch) if loss is None else loss(call(model, batch))
    if not isinstance(output, torch.Tensor):
        has_keys = isinstance(output, Mapping)
        value = output.get("loss") if has_keys else getattr(output, "loss", None)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.reshape(())
    is_tensor = isinstance(value, torch.Tensor)
    got = f"shape {tuple(value.shape)}" if is_tensor else type(output).__name__
    raise ValueError(f"{who}: the loss must be one number, got {got}: {remedy}")


@contextlib.contextmanager
def state_restored(model: nn.Module, others: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Restore at the end the buffers, children and other attributes of the modules of `model`, and
    the values of these tensors and of `others`.

    Parameters are not copied. A Python object that an attribute keeps is the same again, with
    whatever was done to it (such as a list that was appended to).
    """
    modules = [
        (module, _registries(module, copied=True), {*module._non_persistent_buffers_set})
        for module in model.modules()
    ]
    tensors = [v for _, dicts, _ in modules for d in dicts for v in d.values() if _has_value(v)]
    kept = {id(t): t for t in (*tensors, *model.buffers(), *others)}.values()
    values = [(t, t.data, t.detach().clone()) for t in kept]
    try:
        yield
    finally:
        for module, before, names in modules:
            for now, then in zip(_registries(module), before, strict=True):
                # The same objects under the same names, in the same order.
                if now.keys() - then.keys() or any(now.get(n, then) is not then[n] for n in then):
                    now.clear()
                    now.update(then)
            module._non_persistent_buffers_set.clear()
            module._non_persistent_buffers_set.update(names)
        with torch.no_grad():
            for t, data, value in values:
                data.copy_(value)  # which leaves the version that a backward pass compares
                if type(t) is torch.Tensor and not t.is_set_to(data):
                    t.data = data  # it had got other memory


def _registries(module: nn.Module, copied: bool = False) -> list[dict[str, Any]]:
    """The buffers of a module, its children and its attributes. Of torch's parallel wrappers the
    buffers only: the rest says what of a larger state has been built."""
    if isinstance(module, torch.jit.ScriptModule):  # which has views of what it holds
        return []
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    registries: list[dict[str, Any]] = [module._buffers]
    if not isinstance(module, (nn.parallel.DistributedDataParallel, fsdp)):
        registries += [module._modules, vars(module)]
    return [{**registry} for registry in registries] if copied else registries


def _has_value(value: object) -> bool:
    """A tensor to copy: not a parameter under a second name."""
    return isinstance(value, torch.Tensor) and not (
        isinstance(value, nn.Parameter) or value.is_inference()
    )


@contextlib.contextmanager
def restored(model: nn.Module, batch: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Restore gradients, also those of a batch, buffers, attributes and random generators at the
    end."""
    grads = [(t, t.grad) for t in (*model.parameters(), *(t for t in batch if t.is_leaf))]
    mains = [getattr(p, "main_grad", None) for p, _ in grads]
    try:
        for t, _ in grads:
            t.grad = None
        main_grads = [t for t in mains if t is not None]
        with random_states_kept(), state_restored(model, main_grads):
            yield
    finally:
        for t, grad in grads:
            t.grad = grad
