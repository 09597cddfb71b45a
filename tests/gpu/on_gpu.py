"""Whether the GPU is the fake one of tests/emulated/device: a GPU in everything but speed, and
without what inductor generates."""

from __future__ import annotations

import torch

from mixprec.bench.device import FAKE_NAME

FAKE_DEVICE = torch.cuda.is_available() and torch.cuda.get_device_name() == FAKE_NAME
