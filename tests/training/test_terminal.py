"""What compare and plan show of how far they are."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

import mixprec
from mixprec.diagnostics import writers


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Task(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def task() -> Task:
    return Task(nn.Linear(8, 8), nn.Linear(8, 8))


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_a_line_on_a_terminal_alone(
    kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "_SECONDS", 0.0)
    monkeypatch.setattr("sys.stderr", kind())
    data, calls = [torch.randn(4, 8) for _ in range(3)], []

    def said() -> list[str]:
        """Since the last time; no line stays."""
        found = writers.sys.stderr.getvalue()
        monkeypatch.setattr("sys.stderr", kind())
        assert found.count("\n") == found.count("mixprec: convert"), "those of convert alone"
        *lines, last = found.split("\r\x1b[K")
        assert not last
        return [line for line in lines if line and "convert" not in line]

    mixprec.plan(task(), data, budget={"time": 0.5}, formats=("fp8", "bf16"))
    found = said()
    mixprec.compare(task, data, ["fp32", "bf16"], loss_name="nats")
    found += said()
    if kind is io.StringIO:
        assert found == []
        return
    total = found[0].split()[3]
    assert found[0] == f"plan: 1 of {total} passes"
    assert f"plan: {total} of {total} passes" in found
    assert [line.partition(", nats ")[0] for line in found if line.startswith("compare")] == [
        f"compare: {recipe}, step {step} of 3" for recipe in ("fp32", "bf16") for step in (1, 2, 3)
    ]
    mixprec.compare(task, data, "fp32", progress=lambda *args: calls.append(args))
    assert said() == []
    assert len(calls) == 3
