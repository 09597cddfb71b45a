"""Whether the GPU is the fake one of tests/emulated/device: a GPU in everything but speed, and
without what inductor generates."""

from __future__ import annotations

import pytest
import torch

from mixprec.bench.device import FAKE_NAME
from mixprec.ops._reference.block_formats import BLOCK_FORMATS
from mixprec.recipes import GEMMS, ROLES, Recipe

FAKE_DEVICE = torch.cuda.is_available() and torch.cuda.get_device_name() == FAKE_NAME


def has_kernels(recipe: str) -> bool:
    """Whether a GPU leaves none of its casts to torch."""
    parsed = Recipe.parse(recipe)
    casts = {str(parsed.product(name)._texts[role]) for name in GEMMS for role in ROLES}
    return casts <= {"None", *BLOCK_FORMATS}


def needs_kernels(recipe: str) -> None:
    """Skip others on the fake GPU, which runs not all ops of torch without a wait."""
    if FAKE_DEVICE and not has_kernels(recipe):
        pytest.skip(f"{recipe}: casts without a kernel, which a GPU runs by ops of torch")
