"""torch.compile before anything has run eagerly, as the first lines of a training script do."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import pytest
import torch

import mixprec
from mixprec.ops._dispatch.op import OPS

PROGRAM = """
import os, torch, torch._dynamo, mixprec
layers = ((torch.nn.Linear, (64, 32), (16, 64)), (torch.nn.Conv2d, (16, 8, 3), (2, 16, 6, 6)))
for recipe in ("bf16", "fp8", "fp8-delayed", "fp8-block"):
    for make, sizes, shape in layers:
        if os.fork():  # of a process that has imported everything, and called nothing
            assert os.wait()[1] == 0, (recipe, make)
            continue
        layer = mixprec.convert(make(*sizes), recipe)
        x = torch.randn(shape, requires_grad=True)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        y = compiled(x)
        y.sum().backward()
        with torch.compiler.set_stance("fail_on_recompile"):
            assert layer(x).shape == y.shape and compiled(x).shape == y.shape
        os._exit(0)
"""


@pytest.mark.slow
def test_the_first_call_of_a_process() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tempfile.gettempdir(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_choice_is_not_written_down_while_it_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where it is made at the first call."""
    for op in OPS.values():
        monkeypatch.setattr(op, "_chosen", {})
    layer, x = mixprec.nn.Linear(64, 32), torch.randn(16, 64, requires_grad=True)
    torch.compile(layer, backend="aot_eager", fullgraph=True)(x).sum().backward()
    assert not any(op._chosen for op in OPS.values())
