"""docs/optimizers.md: its table matches what optimizers allocate and check, and its code runs."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import mixprec
from mixprec.optim import AdamW, _batches

DOC = Path(__file__).resolve().parents[2] / "docs" / "optimizers.md"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NUMEL = 1 << 12  # large enough for what there is once per tensor to be rounded away


def table() -> list[dict[str, str]]:
    text = re.search(r"<!-- bytes -->\n\n(.*?)\n\n<!-- end -->", DOC.read_text(), re.DOTALL)
    assert text is not None
    head, _, *lines = [line.strip("|").split("|") for line in text[1].splitlines()]
    names = [cell.strip() for cell in head]
    return [dict(zip(names, map(str.strip, line), strict=True)) for line in lines]


TABLE = table()


def trained(line: dict[str, str]) -> tuple[torch.nn.Parameter, Any]:
    """A param and its optimizer as in that line of the table, after two steps; grads are kept."""
    written = line["optimizer"].strip("`")
    shape = (16, NUMEL // 16) if written.startswith("Muon") else (NUMEL,)
    param = torch.nn.Parameter(torch.randn(shape).to(DTYPES[line["params"]]))
    optimizer = eval(written, {**vars(mixprec.optim), "torch": torch, "params": [param]})
    for _ in range(2):
        optimizer.zero_grad()
        if line["gradients"] == "fp32 in main_grad":
            param.main_grad = torch.randn(NUMEL)
        else:
            (param.float() * torch.randn(shape)).sum().backward()
            assert param.grad.dtype == DTYPES[line["gradients"]]
        optimizer.step()
    return param, optimizer


def resident(line: dict[str, str]) -> dict[str, float]:
    """Bytes per element that are allocated between two steps."""
    param, optimizer = trained(line)
    grads = [g for g in (param.grad, getattr(param, "main_grad", None)) if g is not None]
    tensors = {"param": [param], "grad": grads, "state": optimizer.state[param].values()}
    sizes = {
        name: round(sum(t.untyped_storage().nbytes() for t in several) / NUMEL, 2)
        for name, several in tensors.items()
    }
    return sizes | {"resident": round(sum(sizes.values()), 2)}


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The gradients that steps read before their updates."""
    seen: list[torch.Tensor] = []
    real = _batches.grad_stats_

    def spy(grads: list[torch.Tensor], *args: Any, **options: Any) -> None:
        seen.extend(grads)
        real(grads, *args, **options)

    monkeypatch.setattr(_batches, "grad_stats_", spy)
    return seen


@pytest.mark.parametrize(
    "line", TABLE, ids=[f"{x['optimizer']} {x['params']} {x['gradients']}" for x in TABLE]
)
def test_the_table_is_what_is_allocated_and_checked(
    line: dict[str, str], checked: list[torch.Tensor]
) -> None:
    got = resident(line)
    got["checked"] = sum(t.element_size() for t in checked) / 2
    assert got == {name: float(line[name]) for name in got}


@pytest.mark.filterwarnings("ignore:GradScaler.unscale_. unscaled gradients are rounded to fp16")
def test_with_a_scaler_gradients_are_checked_once(checked: list[torch.Tensor]) -> None:
    for dtype, unscaled, clip in itertools.product(DTYPES.values(), (False, True), (None, 1.0)):
        checked.clear()
        param = torch.nn.Parameter(torch.randn(64).to(dtype))
        optimizer = AdamW([param], max_grad_norm=clip)
        scaler = mixprec.GradScaler(init_scale=4.0)
        scaler.scale(param.float().sum()).backward()
        if unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert len(checked) == (0 if unscaled and clip is None else 1)
