"""What a training step asks of a GPU, counted on the fake one."""

from __future__ import annotations

from pathlib import Path

import pytest
from on_gpu import FAKE_DEVICE

from mixprec.bench.studies import step_counts

pytestmark = pytest.mark.skipif(not FAKE_DEVICE, reason="only the fake device counts launches")


def test_a_block_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """In units of an activation [tokens, width] of 16 bits: 2 norms, 2 additions, GELU of 4 and
    rotary of 3, with q and k read and written, and v copied; their gradients."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "examples")
    found = step_counts.measured("bf16, fuse")
    unit = 2 * step_counts.BATCH * step_counts.CONTEXT * step_counts.WIDTH
    ops = found["of a block"]
    for part, op, units in (
        ("forward", "norm_quantize", 2 * 2), ("forward", "add", 2 * 3),
        ("forward", "act_quantize", 2 * 4), ("forward", "rotary", 6),
        ("backward", "norm_backward", 2 * 3), ("backward", "add", 2 * 3),
        ("backward", "act_backward", 3 * 4), ("backward", "rotary", 6),
    ):  # fmt: skip
        assert ops[part][op] == pytest.approx(units * unit, rel=2e-3), (part, op)
    assert found["bytes"]["block"]["forward"] == sum(ops["forward"].values())
    assert sum(found["bytes"]["block"][part] for part in ("forward", "backward")) < 54.1 * unit
    block = found["launches"]["block"]
    assert (block["forward"], block["step"]) == (14, 0)
    assert block["backward"] <= 20
