"""Valid settings and state of a GradScaler."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

TORCH_STATE = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
# The growth interval that represents static scaling, which torch does not have.
NEVER = 2**31 - 1


def _is_positive(value: float) -> bool:
    return 0 < value <= torch.finfo(torch.float32).max  # the scale is kept in fp32


def _is_count(value: float) -> bool:
    return isinstance(value, int) and 0 <= value < 2**31


_POSITIVE = (_is_positive, "positive and finite in fp32")
_COUNT = (_is_count, "an int, 0 or more")
_COUNT_FROM_1 = (lambda value: _is_count(value) and value > 0, "an int, 1 or more")
_OPTIONAL = ("max_scale", "growth_interval", "max_consecutive_skips", "grow_on_underflow")
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("init_scale", "new_scale", "scale", "min_scale", "max_scale"), _POSITIVE),
    "growth_factor": (lambda value: 1 < value < math.inf, "above 1 and finite"),
    "backoff_factor": (lambda value: 0 < value < 1, "between 0 and 1"),
    **dict.fromkeys(("growth_interval", "hysteresis", "max_consecutive_skips"), _COUNT_FROM_1),
    **dict.fromkeys(("_growth_tracker", "_hysteresis_tracker"), _COUNT),
    **dict.fromkeys(("skipped", "applied_steps", "skipped_in_a_row"), _COUNT),
    "grow_on_underflow": (lambda value: 0 <= value <= 1, "between 0 and 1"),
    "static": (lambda value: isinstance(value, bool), "True or False"),
    "version": (lambda value: value == 1, "1"),
}


def power(scale: float, digits: int = 3) -> str:
    """A power of two as such, 2^16; any other number with so many digits."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:.{digits}g}"


def check_device(device: Any) -> None:
    """ValueError unless it is None or names a device."""
    try:
        if device is not None:
            torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            'GradScaler: device must be None or a device of torch, such as "cuda", got '
            f"{device!r}; the scale is init_scale="
        ) from error


def check(**settings: Any) -> None:
    """Raise ValueError for the first setting or state entry that is not valid."""
    for name, value in settings.items():
        if name not in _RULES or (value is None and name in _OPTIONAL):
            continue
        is_valid, meaning = _RULES[name]
        if not isinstance(value, (int, float)) or not is_valid(value):
            raise ValueError(f"GradScaler: {name} must be {meaning}, got {value!r}")
    largest, smallest = settings.get("max_scale"), settings.get("min_scale")
    if largest is not None and smallest is not None and largest < smallest:
        raise ValueError(
            f"GradScaler: max_scale must be at least min_scale {smallest}, got {largest}"
        )
