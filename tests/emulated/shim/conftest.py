"""For the tests of kernels on the CPU: one order of blocks and threads in every run."""

from __future__ import annotations

import pytest
from emulated.shim import runner


@pytest.fixture(autouse=True)
def _order() -> None:
    runner.seed(1)
