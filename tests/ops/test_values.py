"""The C++ kernels give the bits of the references, over dtypes, shapes and layouts."""

from __future__ import annotations

import pytest
from emulated.agreement import Agreement
from emulated.values.test_casts import *  # noqa: F403 (the tests, with the fixture below)
from emulated.values.test_fused import *  # noqa: F403
from emulated.values.test_grads import *  # noqa: F403
from emulated.values.test_mx_values import *  # noqa: F403
from emulated.values.test_pack_values import *  # noqa: F403
from emulated.values.test_scale_values import *  # noqa: F403
from emulated.values.test_updates import *  # noqa: F403

from mixprec.ops._dispatch.op import OPS


@pytest.fixture
def agree(poisoned: None, two_threads: None) -> Agreement:
    return Agreement(lambda op: OPS[op].handle("cpp"), most=1 << 23, count=60)
