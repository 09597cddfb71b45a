"""One of the pytest processes of a pool, seen from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class Process:
    """One pytest process, and the test it is in."""

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, env: dict[str, str]
    ) -> None:
        self.events, self.output = folder / f"{name}.jsonl", folder / f"{name}.txt"
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {
            **os.environ,
            **env,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # what else is installed is not asked for
            "MIXPREC_GPU_TESTS": str(folder),
            "MIXPREC_GPU_EVENTS": str(self.events),
        }
        with self.output.open("wb") as file:
            # A group to end together, in the session of whoever ends this program.
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=env, preexec_fn=os.setpgrp
            )
        self.test: dict[str, Any] | None = None
        self.started = False  # it came to a test
        self.done: float | None = None  # when it found no test left
        self._read = 0

    def news(self) -> list[dict[str, Any]]:
        """The lines that it has written since the last call."""
        if not self.events.exists():
            return []
        with self.events.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def end(self) -> str:
        """End it and all that it started; says how it ended."""
        status = self.process.poll()
        if status is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)  # the driver may have to stop a kernel first
        if status is not None and status < 0:
            return signal.Signals(-status).name
        return f"exit status {status}"

    def tail(self) -> str:
        return self.output.read_text(errors="replace")[-4000:]
