"""mixprec.nn.filters under its short name."""

import sys

from .nn import filters
from .nn.filters import worthwhile as worthwhile  # for type checkers

sys.modules[__name__] = filters
