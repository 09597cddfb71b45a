"""What tests of tensors on a GPU share: which device it is, and what it is quick enough for."""

from __future__ import annotations

import torch
from emulated.agreement import Agreement, assert_bits

from mixprec.bench.device import FAKE_NAME
from mixprec.ops._dispatch.op import OPS

__all__ = ["FAKE_DEVICE", "agreement_on", "assert_bits"]

# tests/emulated/device: a GPU in everything but speed, and without what inductor generates.
FAKE_DEVICE = torch.cuda.is_available() and torch.cuda.get_device_name() == FAKE_NAME


def agreement_on(device: torch.device) -> Agreement:
    """Of the kernels on the device, those of the backend in force, with the kernels of the CPU."""
    return Agreement(
        OPS.__getitem__,
        lambda op: OPS[op].handle("cpp"),
        device,
        most=2**15 if FAKE_DEVICE else 2**21,
        count=60 if FAKE_DEVICE else 2000,
    )
