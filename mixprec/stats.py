"""mixprec.diagnostics.stats under its short name."""

import sys

from .diagnostics import stats
from .diagnostics.stats import *  # noqa: F403  (for type checkers)

sys.modules[__name__] = stats
