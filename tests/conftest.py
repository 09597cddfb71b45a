"""Shared fixtures: seeds, the two CPU backends, poisoned memory."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings

import mixprec

# derandomize: the same examples in every run, so a failure here is a failure everywhere.
settings.register_profile("mixprec", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("mixprec")


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(params=["cpp", "reference"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once on the compiled kernels and once on the plain-torch reference."""
    with mixprec.use_backend(request.param):
        yield request.param


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing that torch.compile keeps comes from another test, or is left to one."""
    torch._dynamo.reset()
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
