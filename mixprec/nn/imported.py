"""Classes of other libraries, where these have been imported."""

from __future__ import annotations

import sys
from typing import Any


def imported_class(module: str, name: str) -> Any:
    """The class `name` of `module`; None if that has not been imported, or has no such class."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind if isinstance(kind, type) else None


def adapted_layer() -> Any:
    """The class of peft's layers that adapt another one, their base_layer."""
    return imported_class("peft.tuners.tuners_utils", "BaseTunerLayer")
