"""Processes that may hang or crash, seen from outside: a limit for each, and their output kept.

A child runs in a process group of its own, so that whatever it started ends with it: a kernel that
hangs can only be ended together with its process. What it has to say it writes as it goes, and that
outlives it: results into a file of its own, events as JSON lines into the file MIXPREC_EVENTS.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

POLL = 0.2  # seconds


class Child:
    """One process. Its output goes to `output`; None: to where this process writes."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        output: Path | None = None,
        events: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.output, self.events = output, events
        env = {**os.environ, **(env or {}), **({"MIXPREC_EVENTS": str(events)} if events else {})}
        with contextlib.ExitStack() as stack:
            file = None if output is None else stack.enter_context(output.open("wb"))
            # A group to end together, in the session of whoever ends this program.
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=None if file is None else subprocess.STDOUT,
                env=env,
                preexec_fn=os.setpgrp,
            )
        self._read = 0

    def ended(self) -> bool:
        return self.process.poll() is not None

    def news(self) -> list[dict[str, Any]]:
        """The events since the last call."""
        if self.events is None or not self.events.exists():
            return []
        with self.events.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def end(self) -> int | None:
        """End it and all that it started; its status before that, None if it was still running."""
        status = self.process.poll()
        if status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)  # the driver may have to stop a kernel first
        return status

    def tail(self) -> str:
        return "" if self.output is None else self.output.read_text(errors="replace")[-4000:]


def run(
    command: Sequence[str], *, limit: float, progress: Path | None = None, silent: float = 1e9
) -> int:
    """Run a child to its end and return its status; end it after `limit` seconds, or when the file
    `progress` has not changed for `silent` seconds (its status is then -SIGKILL)."""
    child = Child(command)
    start = changed = time.monotonic()
    seen = None
    try:
        while not child.ended():
            time.sleep(POLL)
            now = time.monotonic()
            stamp = progress.stat().st_mtime_ns if progress and progress.exists() else None
            if stamp != seen:
                seen, changed = stamp, now
            if now - changed > silent or now - start > limit:
                break
    finally:
        status = child.end()
    return -signal.SIGKILL if status is None else status
