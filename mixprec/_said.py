"""Lines for whoever runs a program, said once, where logging is set up as it comes."""

from __future__ import annotations

import logging
import os
import sys

import torch.distributed as dist

logger = logging.getLogger("mixprec")
_said: set[str] = set()


def say(line: str) -> None:
    """Log `line` at level INFO. Where that level is not shown, print it to stderr: once, on rank 0,
    and not if the logger "mixprec" has a level of its own or only errors are shown."""
    enabled = logger.isEnabledFor(logging.INFO)
    if enabled and logger.hasHandlers():
        logger.info("%s", line)
    elif not enabled and (logger.level or not logger.isEnabledFor(logging.WARNING)):
        return
    elif line not in _said:
        _said.add(line)
        if _rank() == 0:
            print(f"mixprec: {line}", file=sys.stderr)


def _rank() -> int:
    """Of this process; launchers set RANK before torch.distributed is initialized."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", 0))
