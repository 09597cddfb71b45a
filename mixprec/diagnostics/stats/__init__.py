"""What happened to the numbers: amax, scale, overflow, underflow and SQNR of every cast, sampled.

`Monitor` watches a model while it trains; `mixprec.compare(..., sqnr=True)` measures its layers
once, at the end of a run.
"""

from .monitor import Monitor

__all__ = ["Monitor"]
