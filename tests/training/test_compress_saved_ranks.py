"""compress_saved on two ranks, under DDP and FSDP2, with and without activation checkpointing."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_models import BF16, loss_of, make_model, whole, wrapped
from ranks import on_ranks
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec.memory.compress_saved import recorded
from mixprec.memory.packed import Saved

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*backward hooks.*")]


def gradients(kind: str, bits: Any, recompute: bool) -> tuple[list[torch.Tensor], int]:
    """Those of one step, and how many tensors were compressed."""
    model: Any = make_model(64, 128, 96, 1)
    if bits and kind == "convert":
        mixprec.convert(model, "bf16", saved=bits)
    wrap, dtype = ("ddp", torch.float32) if kind == "ddp" else ("fsdp", BF16)
    model = wrapped(wrap, model, dtype)
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)
    found: list[Saved] = []
    torch.manual_seed(3)
    with (
        recorded(lambda _, t: found.append(t) if isinstance(t, Saved) else None),
        mixprec.compress_saved(bits) if bits and kind != "convert" else nullcontext(),
    ):
        y = checkpoint(model, x * 1, use_reentrant=False) if recompute else model(x * 1)
    loss_of(y, 0.0).backward()
    return whole(p.grad for p in model.parameters()), len(found)


def all_kinds() -> dict[tuple[str, bool], Any]:
    result = {}
    for kind, recompute in itertools.product(("ddp", "fsdp", "convert"), (False, True)):
        plain, _ = gradients(kind, None, False)
        (first, count), (again, _) = (gradients(kind, "int8", recompute) for _ in range(2))
        result[kind, recompute] = first, again, plain, count
    return result


def test_gradients_are_close_and_the_same_each_time() -> None:
    ranks = on_ranks(2, all_kinds)
    for name, (first, again, plain, count) in ranks[0].items():
        assert all(map(torch.equal, first, again)), name
        assert all(map(torch.equal, first, ranks[1][name][0])), name  # reduced over the ranks
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(first, plain, strict=True)]
        assert max(errors) < 0.1, name
        # Inside a checkpoint nothing is saved but its input, as it is. A model of convert(saved=)
        # is inside of the checkpoint itself.
        assert (count == 0) == (name in (("ddp", True), ("fsdp", True))), name
        assert (max(errors) > 0) == (count > 0), name
