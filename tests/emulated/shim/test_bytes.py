"""The bytes that the kernels move are those that docs/kernels.md shows."""

from __future__ import annotations

import json

import torch
from emulated.shim import count_bytes

COMMITTED = json.loads(count_bytes.RESULT.read_text())["rows"]


def test_a_copy_of_known_size() -> None:
    """dequantize reads a byte and writes four, each once; amax reads x and writes one number."""
    x = torch.ones(count_bytes.ROWS, count_bytes.COLS)
    args = [x.to(count_bytes.E4M3), torch.tensor(1.0), torch.float32]
    found = count_bytes.count([("dequantize", args), ("amax", [x])])
    assert found == {"launches": 3, "loaded": 5, "stored": 4, "read": 5, "written": 4}


def test_the_committed_counts_are_those_of_the_kernels() -> None:
    again = "run python tests/emulated/shim/count_bytes.py and python -m mixprec.bench report"
    for counted, committed in zip(count_bytes.rows(), COMMITTED, strict=True):
        assert counted == committed, again
