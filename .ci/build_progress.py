"""What is said while files are compiled: a count, in place of ninja's long commands.

pip shows nothing of a build that goes well, unless it is called with -v. So the count is also
written to the terminal, if there is one and CI is not set.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import BinaryIO

STEP = re.compile(rb"\[(\d+)/(\d+)\] ")  # with this ninja begins a command that has ended


def terminal() -> BinaryIO | None:
    """The terminal that the program was started from."""
    if os.environ.get("CI"):
        return None
    try:
        return open("/dev/tty", "wb", buffering=0)
    except OSError:
        return None


class Reporter:
    """Writes lines to stdout and to the terminal. If it cannot, the build goes on."""

    def __init__(self, stdout: BinaryIO, terminal: BinaryIO | None) -> None:
        self.stdout = stdout
        self.terminal = stdout if stdout.isatty() else terminal

    @staticmethod
    def _write(file: BinaryIO | None, words: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):
            if file is not None:
                file.write(words)

    def say(self, text: str, first: str = "\r", last: str = "\n") -> None:
        """A line of stdout. On the terminal `first` and `last` say what it is written over; two
        spaces, because pip turns its wheel in the first column."""
        if self.terminal is not self.stdout:
            self._write(self.stdout, f"{text}\n".encode())
        self._write(self.terminal, f"{first}  {text}{last}".encode())

    def follow(self, lines: Iterable[bytes]) -> int:
        """Count ninja's commands and return how many there were; pass on all other lines."""
        done = 0
        for line in lines:
            step = STEP.match(line)
            if step is None:
                self._write(self.stdout, line)
            else:
                done, of = int(step[1]), int(step[2])
                self.say(f"mixprec: {done} of {of} files compiled", last="\r")
        return done


@contextlib.contextmanager
def shown(plan: str, name: str) -> Iterator[None]:
    """Say `plan`, count what ninja compiles inside, and say at the end whether `name` is built."""
    os.environ["NINJA_STATUS"] = "[%f/%t] "
    sys.stdout.flush()
    read, write = os.pipe()
    with os.fdopen(os.dup(1), "wb", buffering=0) as stdout:
        reporter = Reporter(stdout, terminal())
        os.dup2(write, 1)  # torch starts ninja with this file
        os.close(write)
        compiled = 0

        def follow() -> None:
            nonlocal compiled
            with open(read, "rb") as lines:
                compiled = reporter.follow(lines)

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        start = time.monotonic()
        reporter.say(f"mixprec: {plan}", first="\n")  # pip's line on the terminal has no end yet
        result = "is not built"
        try:
            yield
            result = "is built"
        finally:
            sys.stdout.flush()
            os.dup2(stdout.fileno(), 1)
            # A process that outlives the build, such as the server of a compiler cache, may keep
            # the pipe open: it is not waited for.
            follower.join(timeout=10)
            seconds = time.monotonic() - start
            reporter.say(f"mixprec: {name} {result}: {compiled} compiled in {seconds:.0f} s")
