"""How many files of Python pass a tensor on between the user and the kernel."""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import mixprec

PACKAGE = str(Path(mixprec.__file__).parent)
M, K, N = 48, 64, 96
ELEMENTS = M * K  # of the tensor that is followed, and of its casts: of nothing else


def holds(value: Any, depth: int = 0) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == ELEMENTS
    if dataclasses.is_dataclass(value):
        value = tuple(vars(value).values())
    return (
        depth < 3 and isinstance(value, (tuple, list)) and any(holds(v, depth + 1) for v in value)
    )


def files(call: Callable[[], object], *, entered: bool = False) -> list[str]:
    """The files in which a function receives the tensor; or any function runs (entered)."""
    found = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if (
            event == "call"
            and path.startswith(PACKAGE)
            and (entered or any(map(holds, frame.f_locals.values())))
        ):
            found.add(path.removeprefix(PACKAGE))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sorted(found)


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "mxfp8"])
def test_a_layer(recipe: str) -> None:
    layer, x = mixprec.nn.Linear(K, N, recipe=recipe), torch.randn(M, K, requires_grad=True)
    layer(x).sum().backward()
    found = files(lambda: layer(x))
    assert "/functional/_in_one_call.py" in found
    assert len(found) <= 5, found
    assert len(found := files(lambda: layer(x), entered=True)) <= 8, found


def test_a_step() -> None:
    param = torch.nn.Parameter(torch.randn(M, K).bfloat16())
    scaler, optimizer = mixprec.GradScaler(), mixprec.optim.AdamW([param])
    for _ in range(2):
        scaler.scale(param.sum()).backward()
        found = files(lambda: scaler.step(optimizer))
        scaler.update()
    assert "/ops/_dispatch/op.py" in found
    assert len(found) <= 5, found
    gc.collect()  # delayed layers of other tests, which a step updates
    found = files(lambda: scaler.step(optimizer), entered=True)
    assert len(found) <= 10, found


def test_convert() -> None:
    models = [torch.nn.Sequential(torch.nn.Linear(K, N), torch.nn.GELU()) for _ in range(2)]
    for model in models:  # the first imports
        found = files(lambda model=model: mixprec.convert(model, "fp8"), entered=True)
    assert len(found) <= 14, found
