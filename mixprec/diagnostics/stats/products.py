"""The SQNRs that the products of a layer should reach."""

from __future__ import annotations

PRODUCTS = ("y", "grad_input", "grad_weight")
Sqnr = dict[str, float | None]

# The SQNR in dB that an FP8 product should reach: the thresholds of torchao's tests.
BARS = {"y": 18.0, "grad_weight": 17.0}
REMEDIES = ("fp8-rowwise", "bf16")  # in this order


def below_bar(sqnr: Sqnr) -> dict[str, float]:
    """The products below their threshold, or with Inf or NaN where FP32 has none."""
    found = {name: sqnr.get(name) for name in BARS}
    return {n: value for n, value in found.items() if value is not None and not value >= BARS[n]}
