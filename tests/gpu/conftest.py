"""Tests that need a GPU: `make gpu-test`. Elsewhere they are skipped, and say so.

MIXPREC_TEST_DEVICE=cpu is a dry run: the same tests with the CPU kernels in the GPU's place, so
that what is wrong with a test itself shows without a GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from emulated.agreement import thin
from on_gpu import FAKE_DEVICE

import mixprec

os.environ.setdefault("MIXPREC_STRICT", "1")  # a kernel that disagrees must not be replaced
DEVICE = torch.device(os.environ.get("MIXPREC_TEST_DEVICE", "cuda"))
BACKENDS = ("cuda", "triton") if DEVICE.type == "cuda" else ("cpp", "reference")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "large: tens of GiB of GPU memory, one test at a time")
    config.addinivalue_line("markers", "slow: such as torch.compile, which takes long to load")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if FAKE_DEVICE:
        thin(config, items)
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        for item in items:
            if "tests/gpu/" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason="no GPU here: make gpu-test on one"))


def pytest_runtest_logfinish(nodeid: str) -> None:
    """After an illegal access the GPU no longer answers this process: of several that run tests, it
    ends here, so that xdist reports this test and goes on in another one."""
    if "PYTEST_XDIST_WORKER" not in os.environ or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"{nodeid} lost the GPU: {error}", file=sys.stderr)
        os._exit(1)


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture(params=BACKENDS)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test on each kind of kernels."""
    with mixprec.use_backend(request.param):
        yield request.param


@pytest.fixture
def only_cuda() -> None:
    if DEVICE.type != "cuda":
        pytest.skip("a dry run on the CPU has no streams, graphs or host syncs")
