"""Nested states that have to be equal bit for bit."""

from __future__ import annotations

from typing import Any

import torch


def assert_same_bits(got: Any, want: Any, where: str = "") -> None:
    if isinstance(want, dict):
        assert got.keys() == want.keys(), where
        for key in want:
            assert_same_bits(got[key], want[key], f"{where}.{key}")
    elif isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype, where
        assert torch.equal(got, want), where
    else:
        assert got == want, where
