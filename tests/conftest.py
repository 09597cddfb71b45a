"""Shared fixtures (seeds, the two CPU backends, poisoned memory), and which files are slow."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo
from hypothesis import settings

import mixprec

# derandomize: the same examples in every run, so a failure here is a failure everywhere.
settings.register_profile("mixprec", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("mixprec")

# Files that start programs, ranks or inductor. Single tests are marked with @pytest.mark.slow.
SLOW_FILES = (
    "tests/integrations/test_*.py",
    "tests/modules/test_fp8_inductor.py",
    "tests/ops/test_pack_panels.py",
    "tests/training/test_distributed*.py",
    "tests/tooling/test_bench*.py",
    "tests/tooling/test_commands.py",
    "tests/tooling/test_docs_*.py",
    "tests/tooling/test_figures.py",
    "tests/tooling/test_train_*.py",
    "tests/tooling/test_tune*.py",
)

ROOT = Path(__file__).parents[1]
GPU_TESTS_RUN = torch.cuda.is_available() or "MIXPREC_TEST_DEVICE" in os.environ


def pytest_report_header() -> str | None:
    if GPU_TESTS_RUN:
        return None
    return "tests/gpu: not collected, no GPU here (MIXPREC_TEST_DEVICE=cpu for a dry run)"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """tests/gpu needs a GPU; None leaves the decision to others."""
    return True if collection_path == ROOT / "tests" / "gpu" and not GPU_TESTS_RUN else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = item.path.relative_to(ROOT).as_posix() if item.path.is_relative_to(ROOT) else ""
        if any(fnmatch(path, pattern) for pattern in SLOW_FILES):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def torch_state() -> dict[str, object]:
    """What a program can set for all of torch."""
    modes = torch.overrides._get_current_function_mode_stack()
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "function modes": [type(mode).__name__ for mode in modes],
        "autocast": [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
        "autocast dtypes": [torch.get_autocast_dtype(device) for device in ("cpu", "cuda")],
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "process group": torch.distributed.is_initialized(),
        "backend": mixprec._context.context.backend,
    }


@pytest.fixture(autouse=True)
def _leaves_torch_as_it_was() -> Iterator[None]:
    before = torch_state()
    yield
    assert torch_state() == before


@pytest.fixture(params=["cpp", "reference"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once on the compiled kernels and once on the plain-torch reference."""
    with mixprec.use_backend(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Nothing that torch.compile keeps is left to another test."""
    yield
    torch._dynamo.reset()


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Every tensor allocated without a value is filled with NaN: an element not written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """At least two threads, so that the parallel paths run also where one is the default."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(2, before))
    yield
    torch.set_num_threads(before)
