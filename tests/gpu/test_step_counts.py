"""What a training step asks of a GPU, counted on the fake one."""

from __future__ import annotations

from pathlib import Path

import pytest
from on_gpu import FAKE_DEVICE

from mixprec.bench.studies import step_counts

pytestmark = pytest.mark.skipif(not FAKE_DEVICE, reason="only the fake device counts launches")


def test_a_block_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """In units of an activation [tokens, width] of 16 bits: 2 norms, each with an addition, GELU of
    4, and q and k rotated in place; their gradients."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "examples")
    found = step_counts.measured("bf16, fuse")
    unit = 2 * step_counts.BATCH * step_counts.CONTEXT * step_counts.WIDTH
    ops = found["of a block"]
    for part, op, units in (
        ("forward", "norm_quantize", 2 * 4), ("forward", "act_quantize", 2 * 4),
        ("forward", "rotary_", 4), ("backward", "norm_backward", 2 * 4),
        ("backward", "act_backward", 3 * 4), ("backward", "rotary", 6),
    ):  # fmt: skip
        assert ops[part][op] == pytest.approx(units * unit, rel=2e-3), (part, op)
    assert found["bytes"]["block"]["forward"] == sum(ops["forward"].values())
    assert sum(found["bytes"]["block"][part] for part in ("forward", "backward")) < 46.1 * unit
    block = found["launches"]["block"]
    assert (block["forward"], block["step"]) == (12, 0)
    assert block["backward"] <= 20
