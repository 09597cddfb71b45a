"""What is said without being asked for: the line of convert, and warnings that name a remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import for_each
from torch import nn

import mixprec

LINE = "convert: 1 of 1 layers set to bf16: 100% of the weights"
TWICE = """
import logging, sys, torch, mixprec
exec(sys.argv[1])
for _ in range(2):
    mixprec.convert(torch.nn.Sequential(torch.nn.Linear(4, 4)), "bf16")
"""


@for_each(
    "setup, rank, said",
    [
        ("", "0", f"mixprec: {LINE}\n"),
        ("", "1", ""),
        ("logging.getLogger('mixprec').setLevel('WARNING')", "0", ""),
        ("logging.basicConfig(level=logging.ERROR)", "0", ""),
        ("logging.basicConfig(level=logging.INFO)", "1", f"INFO:mixprec:{LINE}\n" * 2),
    ],
)
def test_convert_says_what_it_did(setup: str, rank: str, said: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", TWICE, setup]
    environment = os.environ | {"RANK": rank}
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert run.stderr == said


@pytest.mark.parametrize("width", [4, 1])  # of the cell: 13% and 4% of the weights
def test_what_cannot_be_converted_is_named(width: int, recwarn: pytest.WarningsRecorder) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ModuleDict({"rnn": nn.LSTMCell(32 // 4, width)}))
    mixprec.convert(model, "bf16")
    found = [str(one.message) for one in recwarn]
    if width == 1:
        assert not found
    else:
        (text,) = found
        assert "LSTMCell 15.8% (1.rnn: there is no such layer in mixprec.nn)" in text


@for_each("torchs", [torch.optim.AdamW, torch.optim.SGD, torch.optim.NAdam])
def test_torchs_optimizers_have_no_masters(torchs: type[torch.optim.Optimizer]) -> None:
    """Said at the first step only; the FP32 values that nobody will take are freed."""
    model = mixprec.cast_parameters(nn.Linear(4, 4), torch.bfloat16)
    optimizer = torchs(model.parameters(), lr=2e-5)
    model(torch.ones(1, 4).bfloat16()).sum().backward()
    name = torchs.__name__
    ours = f"mixprec.optim.{name} keeps FP32 masters"
    if name == "NAdam":
        ours = r"mixprec.optim.Masters\(torch.optim.NAdam, params, ...\) keeps FP32 masters"
    with pytest.warns(UserWarning, match=f"torch.optim.{name} updates 2 param.* bfloat16.*{ours}"):
        optimizer.step()
    optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(mixprec.optim.fp32_state_dict(model)[name], p.float())


def test_optimizers_with_masters_are_silent() -> None:
    def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(1, 4).to(model.weight.dtype)).sum().backward()
        optimizer.step()

    for make in (mixprec.optim.AdamW, lambda p: mixprec.optim.Masters(torch.optim.NAdam, p)):
        model = mixprec.cast_parameters(nn.Linear(4, 4), torch.bfloat16)
        stepped(model, make(model.parameters()))
    model = mixprec.cast_parameters(nn.Linear(4, 4), torch.bfloat16, keep_masters=False)
    stepped(model, torch.optim.SGD(model.parameters()))
    model = nn.Linear(4, 4)
    stepped(model, torch.optim.SGD(model.parameters()))


def test_lean_wants_fp32() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).bfloat16()
    with pytest.warns(UserWarning, match=r"4 of its parameters have 16 bits already \(0.weight"):
        mixprec.lean(model, verbose=False)
