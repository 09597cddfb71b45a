"""Every op on the GPU gives the bits that the CPU kernels give, over layouts and dtypes."""

from __future__ import annotations

import pytest
import torch
from emulated.agreement import Agreement
from emulated.values.test_casts import *  # noqa: F403 (the tests, with the fixture below)
from emulated.values.test_fused import *  # noqa: F403
from emulated.values.test_grads import *  # noqa: F403
from emulated.values.test_mx_values import *  # noqa: F403
from emulated.values.test_pack_values import *  # noqa: F403
from emulated.values.test_scale_values import *  # noqa: F403
from emulated.values.test_updates import *  # noqa: F403
from on_gpu import FAKE_DEVICE

from mixprec.ops._dispatch.op import OPS


@pytest.fixture
def agree(kernels: str, device: torch.device) -> Agreement:
    """Of the kernels on the device, those of the backend in force, with the kernels of the CPU."""
    return Agreement(
        OPS.__getitem__,
        lambda op: OPS[op].handle("cpp"),
        device,
        most=2**15 if FAKE_DEVICE else 2**21,
        count=60 if FAKE_DEVICE else 2000,
    )


@pytest.mark.parametrize("op", OPS)
def test_self_test(op: str, kernels: str, device: torch.device) -> None:
    reason = OPS[op].why_not(kernels, device.type)
    if reason is not None:
        pytest.skip(f"{op} on {kernels}: {reason}")
    found = OPS[op].difference(OPS[op].choose(device.type), device.type)
    assert found is None, found
