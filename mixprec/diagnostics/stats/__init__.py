"""Statistics of the casts of a model: amax, scale, overflow, underflow and SQNR, sampled.

`Monitor` watches a model while it trains; `mixprec.compare(..., sqnr=True)` measures its layers
once, at the end of a run. `histogram` counts the magnitudes of one tensor.
"""

from .measure import Histogram, histogram
from .monitor import Monitor

__all__ = ["Histogram", "Monitor", "histogram"]
