"""Fixtures of several files here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from mixprec import grad_report


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a checkpoint, alone in its folder."""
    return tmp_path / "run.pt"


@pytest.fixture(params=["host", "device"])
def flags(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an overflow: read on the host, as on a CPU, and left on the device, as on a GPU."""
    if request.param == "device":
        monkeypatch.setattr(grad_report, "on_host", lambda _: False)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
