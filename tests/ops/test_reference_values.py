"""The references give the bits of the same rules in NumPy."""

from __future__ import annotations

import pytest
from definitions import DEFINITIONS
from emulated.agreement import Agreement, reference
from emulated.values.test_casts import *  # noqa: F403 (the tests, with the fixture below)
from emulated.values.test_fused import *  # noqa: F403
from emulated.values.test_grads import *  # noqa: F403
from emulated.values.test_mx_values import *  # noqa: F403
from emulated.values.test_pack_values import *  # noqa: F403
from emulated.values.test_scale_values import *  # noqa: F403
from emulated.values.test_updates import *  # noqa: F403


@pytest.fixture
def agree(poisoned: None) -> Agreement:
    """NumPy is slow where it goes from element to element: of random bits and of blocks."""
    return Agreement(reference, DEFINITIONS.__getitem__, quick=False, most=1 << 14, count=24)
