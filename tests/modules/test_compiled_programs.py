"""Compiled models with graph breaks compute what they compute uncompiled, in every region: Dynamo
compiles no frame of mixprec's modes by itself."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from compiled_programs import FEATURES, compare
from torch import nn
from torch._dynamo import convert_frame

import mixprec

PACKAGE = str(Path(mixprec.__file__).parent)


def run(seed: int) -> bool:
    """Whether there was something to compare."""
    feature = [*FEATURES][seed % len(FEATURES)]
    fuse, backend = (seed // 6) % 2 == 0, ("eager", "aot_eager")[(seed // 12) % 2]
    different = compare(seed, fuse, feature, backend)
    assert not different, (seed, fuse, feature, backend, different)
    return different is not None


@pytest.mark.parametrize("seed", range(12))
def test_compiled_programs(seed: int) -> None:
    assert run(seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(1, 26))
def test_three_hundred_compiled_programs(part: int) -> None:
    """torch.compile raises an error for some: two calls of one layer in 16 bits in a graph."""
    assert sum(run(seed) for seed in range(12 * part, 12 * part + 12)) > 4


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            print(end="")
            x = torch.softmax(self.inner(x).mT, -1) * (2.0 if x.is_cuda else 0.5)
            q = x[None, None]
            x = nn.functional.scaled_dot_product_attention(q, q, q)[0, 0]
        return x


def test_no_frame_of_a_mode_is_compiled() -> None:
    """Only forward passes, and functions that they call."""
    compiled: list[CodeType] = []
    handle = convert_frame.register_bytecode_hook(lambda code, _: compiled.append(code))
    x = torch.randn(16, 16, requires_grad=True)
    with handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for fuse in (False, True):
            for region in FEATURES.values():
                torch._dynamo.reset()
                model = mixprec.convert(Broken(), "fp8", fuse=fuse)

                def step(model: Any = model) -> None:
                    torch._dynamo.graph_break()
                    for _ in range(1):
                        print(end="")
                        model(x).sum().backward()

                with region():
                    torch.compile(step, backend="eager")()
    own = {code.co_qualname for code in compiled if code.co_filename.startswith(PACKAGE)}
    names = {name.rpartition(".")[2] for name in own}
    assert compiled
    assert names <= {"forward", "run", "__call__", "unfused"}, own


WITHOUT = """
import torch
frames = torch._C._dynamo.eval_frame
call = frames.set_code_exec_strategy
del frames.set_code_exec_strategy
import mixprec
region = mixprec.autocast()
frames.set_code_exec_strategy = call  # Dynamo's own
def run(h):
    for _ in range(1):
        print(end="")
    other = h.T
    return torch.softmax(h, -1) @ other.float()
x = torch.randn(8, 8, dtype=torch.bfloat16)
with region:
    assert torch.equal(run(x), torch.compile(run, backend="eager")(x))
"""


@pytest.mark.slow
def test_a_torch_whose_dynamo_cannot_be_told() -> None:
    command = [sys.executable, "-c", WITHOUT]
    done = subprocess.run(command, cwd=tempfile.gettempdir(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
