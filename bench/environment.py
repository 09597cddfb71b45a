"""Where and when the figures were taken."""

from __future__ import annotations

import os
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mixprec.env import machine, versions


def environment(*, quick: bool) -> dict[str, Any]:
    """What a figure needs beside it: processor, threads, ISA, versions, commit, date.

    Asked before a run: load is how many programs were running then, None where it is unknown.
    keeps_memory: whether the C library was told to keep what is freed, as make bench does.
    """
    return {
        **machine(),
        **versions(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "quick": quick,
        "keeps_memory": "MALLOC_TRIM_THRESHOLD_" in os.environ,
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def commit() -> str | None:
    """The commit of the source that this file comes from, "+" if it was changed; None outside.

    MIXPREC_COMMIT says it where the source is a copy without its history.
    """
    if given := os.environ.get("MIXPREC_COMMIT"):
        return given
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        run = subprocess.run(
            ["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True
        )
        return run.stdout.strip()

    try:
        top = Path(git("rev-parse", "--show-toplevel"))
        if not (top / "bench" / "environment.py").exists():  # installed inside another repository
            return None
        dirty = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return None
