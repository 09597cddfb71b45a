"""`python -m mixprec.env`: versions, machine, what each op runs on. See mixprec.diagnostics.env."""

import sys

from .diagnostics.env import build, describe, machine, main, report, self_test, variants, versions

__all__ = ["build", "describe", "machine", "main", "report", "self_test", "variants", "versions"]

if __name__ == "__main__":
    sys.exit(main())
