"""The gradient of a parameter: the part of this rank, and whether a GradScaler has scaled it."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

LOW_PRECISION = (torch.bfloat16, torch.float16)
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))  # types of tensors of which none is sharded


def gradient_of(param: torch.Tensor) -> torch.Tensor | None:
    """`main_grad`, an FP32 gradient that some frameworks keep for a 16-bit param, else `grad`."""
    main = vars(param).get("main_grad")
    return param.grad if main is None or (param.grad is None and is_copy(main)) else main


def is_copy(main_grad: torch.Tensor | None) -> bool:
    """Whether DDP wrote it with `grad`, and writes it anew: nothing is added to it."""
    return getattr(main_grad, "is_copy_of_grad", False)


def watch(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Call `hook` after each backward pass that writes `grad`, before DDP reads it, and after the
    hooks that there are now."""
    hooks = param._post_accumulate_grad_hooks
    if hooks is None or hook not in hooks.values():
        param.register_post_accumulate_grad_hook(hook)
    elif next(reversed(hooks.values())) is not hook:
        key = next(key for key, each in hooks.items() if each is hook)
        hooks[key] = hooks.pop(key)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, without importing torch.distributed.tensor."""
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that is on this rank; any other tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Whether torch.distributed.fsdp.fully_shard was called with this module."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def has_run(module: torch.nn.Module) -> bool:
    """Whether a model that fully_shard has wrapped has run, which fixes its dtypes."""
    return is_fully_sharded(module) and module._get_fsdp_state()._is_root is not None  # type: ignore[operator]


def sharded_groups(model: torch.nn.Module) -> list[dict[str, torch.nn.Parameter]]:
    """The trained params, by name, of each group that fully_shard gathers together, which are to
    have one dtype."""
    groups: dict[int, dict[str, torch.nn.Parameter]] = {}

    def visit(module: torch.nn.Module, prefix: str, state: Any) -> None:
        if is_fully_sharded(module):
            state = module._get_fsdp_state()  # type: ignore[operator]
        if state is not None:
            named = {prefix + name: p for name, p in module._parameters.items() if p is not None}
            its = {n: p for n, p in named.items() if p.requires_grad and is_sharded(p)}
            groups.setdefault(id(state), {}).update(its)
        for name, child in module.named_children():
            visit(child, f"{prefix}{name}.", state)

    visit(model, "", None)
    return list(groups.values())


def set_data(param: torch.Tensor, values: torch.Tensor) -> None:
    """param.data = values; of a DTensor the assignment alone would leave the local tensor."""
    param.data = values
    if is_sharded(param):
        values._local_tensor.__class__ = type(param._local_tensor)  # type: ignore[attr-defined]
        param._local_tensor, param._spec = values._local_tensor, values._spec  # type: ignore[attr-defined]


def placed_like(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The gradient of a DTensor, redistributed to the placements of its param.

    With sequence parallelism, the gradient of a replicated norm is a partial sum on each rank.
    """
    if is_sharded(grad) and grad.placements != param.placements:  # type: ignore[attr-defined]
        return grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]
    return grad


def any_sharded(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether any is a DTensor. Checks each type once, which is faster for many tensors."""
    return any(hasattr(kind, "placements") for kind in set(map(type, tensors)))


# By autograd's number. Not per thread: a pass has a thread for each device.
_passes: deque[int] = deque(maxlen=64)
_marks = [False]  # whether any optimizer asks


def start() -> None:
    """Losses are marked from here on."""
    _marks[0] = True


def mark(loss: torch.Tensor) -> None:
    """Record the backward passes through this loss; not in compiled code."""
    if not torch.compiler.is_compiling() and _marks[0] and loss.requires_grad:
        loss.register_hook(_record)


def is_scaled(task: int | None) -> bool:
    """Whether this backward pass has gone through a marked loss."""
    return task in _passes


def _record(_: torch.Tensor) -> None:
    _passes.append(torch._C._current_graph_task_id())
