"""The ops by name: reference and Triton launcher of each, with arguments in the schema's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mixprec.ops.dequantize_mx
import mixprec.ops.quantize_mx  # noqa: F401 (defines the ops)
from mixprec.ops._dispatch.op import OPS

TRITON = [name for name, op in OPS.items() if op.triton is not None]


def reference(name: str) -> Callable[..., Any]:
    return OPS[name].handle("reference")


def launcher(name: str) -> Callable[..., Any]:
    return OPS[name].launcher
