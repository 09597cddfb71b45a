"""The comparison before a CUDA kernel is first used, with the kernels on the shim: results begin at
16-byte boundaries, as those of a GPU do."""

from __future__ import annotations

import pytest
from emulated.shim import runner

from mixprec.ops._dispatch.op import OPS


@pytest.mark.parametrize("op", runner.OPS)
def test_examples(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    monkeypatch.setattr(runner, "SHIFTS", (0,))
    found = OPS[op].difference(runner.OPS[op], "cpu")
    assert found is None, found
