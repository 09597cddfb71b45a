"""`python -m mixprec.env`: what mixprec runs on here, op by op. See mixprec.diagnostics.env."""

import sys

from .diagnostics.env import main, report

__all__ = ["main", "report"]

if __name__ == "__main__":
    sys.exit(main())
