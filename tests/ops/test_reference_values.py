"""The references of casts and scales give the bits of the same rules in NumPy: all others are
compared with kernels, which were written apart from them, in test_values.py alone."""

from __future__ import annotations

import pytest
from definitions import DEFINITIONS
from emulated.agreement import Agreement, reference
from emulated.values.test_casts import *  # noqa: F403 (the tests, with the fixture below)
from emulated.values.test_mx_values import *  # noqa: F403


@pytest.fixture
def agree(poisoned: None) -> Agreement:
    """NumPy is slow where it goes from element to element: of random bits and of blocks."""
    return Agreement(reference, DEFINITIONS.__getitem__, quick=False, most=1 << 14, count=24)
