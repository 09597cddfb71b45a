"""lean: what a training step keeps, in about half the bytes or less, by one call."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from ._local_gradients import LOW_PRECISION
from .diagnostics.memory_report import MemoryReport, memory_report
from .diagnostics.passes import map_tensors
from .nn.cast import cast_parameters
from .nn.convert import convert
from .optim import AdamW
from .recipes import Recipe


class Fidelity(NamedTuple):
    """What is kept in fewer bits, besides the parameters, which are bf16."""

    master_weights: str  # of AdamW: the bits beside a parameter
    state_dtype: torch.dtype | str  # of its moments
    saved: str  # bits of compress_saved


FIDELITIES = {
    "high": Fidelity("remainder16", torch.float32, "int8"),
    "balanced": Fidelity("remainder16", "int8", "int8"),
    "small": Fidelity("remainder8", "int8", "int4"),
}


def lean(
    model: nn.Module,
    lr: float | torch.Tensor = 1e-3,
    *,
    fidelity: str = "balanced",
    recipe: Recipe | str = "bf16",
    batch: Any = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    verbose: bool = True,
    **options: Any,
) -> tuple[nn.Module, AdamW]:
    """Prepare an FP32 model for training steps that keep less; print how much (verbose).

        model, optimizer = mixprec.lean(model, lr=3e-4)

    The weights that are trained stay FP32 numbers: each is a bf16 parameter and the 16 bits that it
    lacks; in "small" 8 of them, so that a weight has 24. Bytes per parameter with its gradient and
    state, and bits of saved activations:

        fidelity      parameter   AdamW's moments   in all   saved for backward
        "high"        2 + 2       FP32              14       8
        "balanced"    2 + 2       8 bits            8.03     8
        "small"       2 + 1       8 bits            7.03     4 where they suffice, else 8

    against 16 bytes of FP32. It is short for `cast_parameters(model, torch.bfloat16)`,
    `convert(model, recipe, saved=..., fuse=True)` and `optim.AdamW(model.parameters(), lr,
    master_weights=..., state_dtype=..., **options)`, in place; norms stay in FP32.
    `convert` says which roundings fusion changes.

    `release_gradients=True` among the options frees each gradient in backward, 2 bytes in all, but
    for those that exist at once: at least those of tied parameters and the largest other one, which
    is what the table has without `batch`.

    The table that is printed is computed from the parameters: it has them, their gradients and the
    optimizer's state. With `batch`, both columns are measured by `memory_report(model, optimizer,
    batch, loss)` instead, and have the activations that a step keeps for backward as well; batch
    and loss are as there. The batch's floating-point tensors are cast to bf16 for the second, as
    yours should be for training. The share below the table is that of these parts. Of the peak of a
    process, which also holds Python, torch, and what a step allocates in between, it saves a
    smaller share: docs/memory.md. ValueError for another fidelity, and those of the functions
    above. Warns if parameters that are trained have 16 bits already: what they were rounded from is
    lost.
    """
    if fidelity not in FIDELITIES:
        offered = ", ".join(f'"{name}"' for name in FIDELITIES)
        raise ValueError(f"lean: fidelity must be one of {offered}, got {fidelity!r}")
    master_weights, state_dtype, saved = FIDELITIES[fidelity]
    options = {"master_weights": master_weights, "state_dtype": state_dtype, **options}
    low = [n for n, p in model.named_parameters() if p.requires_grad and p.dtype in LOW_PRECISION]
    if low:
        warnings.warn(
            f"lean: model must be in FP32 for its weights to keep all bits, and {len(low)} of its "
            f"parameters have 16 bits already ({low[0]}, ...): load it with dtype=torch.float32",
            stacklevel=2,
        )
    # These raise before the model is changed.
    if Recipe.parse(recipe).outliers:
        raise ValueError(f"lean: recipe must have no outliers, which are not chosen, got {recipe}")
    AdamW([nn.Parameter(torch.zeros(1))], lr, **options)
    plain = torch.optim.AdamW(model.parameters())

    def report(label: str, optimizer: torch.optim.Optimizer, batch: Any) -> MemoryReport:
        if batch is None:
            return _computed(label, model, optimizer)
        return memory_report(model, optimizer, batch, loss, label=label)

    before = report("fp32", plain, batch)
    model = convert(cast_parameters(model, torch.bfloat16), recipe, saved=saved, fuse=True)
    optimizer = AdamW(model.parameters(), lr, **options)
    after = report(fidelity, optimizer, map_tensors(_low, batch))
    if verbose:
        kept = "parameters, gradients and optimizer state" if batch is None else "what a step keeps"
        print(f"{before.table(after)}\n{after.total / before.total:.2f} of the bytes of {kept}")
    return model, optimizer


def _computed(label: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> MemoryReport:
    """Parameters, gradients and states, without a step."""
    params = [p for p in model.parameters() if p.requires_grad]
    states: dict[str, int] = {}
    for p in params:
        like = torch.empty_like(p, device="meta")
        state: dict[str, torch.Tensor] = {"exp_avg": like, "exp_avg_sq": like}
        if isinstance(optimizer, AdamW):
            state = {}
            optimizer._policy.prepare(like, state, optimizer._moment_names)
        for key, value in state.items():
            states[key] = states.get(key, 0) + _bytes([value])
    gradients = _released(model) if getattr(optimizer, "_releases", None) else _bytes(params)
    return MemoryReport(label, _bytes(model.parameters()), gradients, states)


def _released(model: nn.Module) -> int:
    """The gradients that exist at once with release_gradients=True: of params with several names,
    and the largest other one."""
    trained = [p for _, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    uses = Counter(map(id, trained))
    tied = {id(p): p for p in trained if uses[id(p)] > 1}
    others = [_bytes([p]) for p in trained if id(p) not in tied]
    return _bytes(tied.values()) + max(others, default=0)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _low(t: torch.Tensor) -> torch.Tensor:
    """A tensor of the batch as the bf16 model takes it."""
    return t.bfloat16() if t.is_floating_point() else t
