"""Runs tests in several processes, replaces those that end or hang, and names the culprits.

The processes share the list of tests themselves (worker.py). That takes neither pytest-xdist nor
pytest-timeout, and a kernel that hangs can only be ended together with its process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mixprec.bench.gpu.supervisor import Child

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

DETAILS = 40  # tracebacks that are kept, one per test function and reason
TAILS = 8  # ends of the output of processes that are kept
GOODBYE = 60  # seconds that a process has for its end


class Worker(Child):
    """One of the pytest processes, and the test it is in."""

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, env: dict[str, str]
    ) -> None:
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {
            **env,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # what else is installed is not asked for
            "MIXPREC_GPU_TESTS": str(folder),
        }
        output, events = folder / f"{name}.txt", folder / f"{name}.jsonl"
        super().__init__(command, output=output, events=events, env=env)
        self.test: dict[str, Any] | None = None
        self.started = False  # it came to a test
        self.done: float | None = None  # when it found no test left


class Pool:
    """selection: which tests, as pytest's arguments; limit, test_limit: seconds for all of them and
    for one; prefix: a command that runs a command. `folder` is its own."""

    def __init__(
        self,
        selection: Sequence[str],
        folder: Path,
        *,
        workers: int,
        limit: float,
        test_limit: float,
        prefix: Sequence[str] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-p", "worker"]
        options += ["-p", "no:cacheprovider", "-q", "-rN"]
        # The stack of a test that hangs, written before its process is killed.
        options += ["-o", f"faulthandler_timeout={0.9 * test_limit:.1f}"]
        self.command = [*prefix, sys.executable, "-m", "pytest", *options, *selection]
        self.folder, self.workers, self.env = folder, workers, env or {}
        self.limit, self.test_limit = limit, test_limit
        self.alive: list[Worker] = []
        self.processes = self.stillborn = 0
        self.begun = self.seen = 0.0
        self.ids: list[str] = []
        self.outcomes: dict[int, str] = {}
        self.took: dict[int, float] = {}
        self.details: dict[tuple[str, str], tuple[int, str]] = {}
        self.notes: set[str] = set()
        self.culprits: list[str] = []
        self.tails: list[str] = []

    def begin(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.begun = time.time()
        for _ in range(self.workers):
            self.alive.append(self._start())

    def _start(self) -> Worker:
        self.processes += 1
        return Worker(f"worker-{self.processes}", self.command, self.folder, self.env)

    def step(self) -> bool:
        """See to the processes; whether there are any."""
        self.seen = time.time()
        over = self.seen - self.begun > self.limit
        self.alive = [w for worker in self.alive if (w := self._see_to(worker, over)) is not None]
        return bool(self.alive)

    def stop(self) -> None:
        for worker in self.alive:
            worker.end()

    def _see_to(self, worker: Worker, over: bool) -> Worker | None:
        """The worker, the one that takes its place, or None if there is nothing left to do."""
        ended = worker.ended()  # before its news: no more come after it
        self._take_in(worker)
        now = time.time()
        most = self.test_limit * (worker.test["timeout_factor"] if worker.test is not None else 1)
        hangs = worker.test is not None and now - worker.test["at"] > most
        stays = worker.done is not None and now - worker.done > GOODBYE
        if not (ended or hangs or stays or over):
            return worker
        how = _how(worker.end())
        self._take_in(worker)
        if worker.test is not None:
            i = worker.test["start"]
            if over and not ended:
                self.outcomes[i] = f"not finished after {now - worker.test['at']:.0f} s"
            else:
                what = f"it took more than {most:.0f} s" if hangs else how
                self.outcomes[i] = f"failure: its process was ended: {what}"
                self._blame(i, worker)
        elif not worker.started and worker.done is None:
            self.tails.append(worker.tail())  # it came to no test, nor would another
            self.stillborn += 1
            return None
        return None if over or worker.done is not None else self._start()

    def _take_in(self, worker: Worker) -> None:
        for event in worker.news():
            if "collected" in event:
                self.ids = event["collected"]
            elif "start" in event:
                worker.test, worker.started = event, True
            elif "end" in event:
                i = event["end"]
                self.outcomes[i], self.took[i] = event["outcome"], event["seconds"]
                self.notes.update(event.get("notes", ()))
                if "detail" in event and len(self.details) < DETAILS:
                    key = (self.ids[i].split("[")[0], event["outcome"][:60])
                    self.details.setdefault(key, (i, event["detail"]))
                if "broken" in event:
                    self._blame(i, worker)
                worker.test = None
            else:
                worker.done = event["done"]

    def _blame(self, i: int, worker: Worker) -> None:
        """What this kind of test did to its process is made known to the others."""
        assert worker.test is not None
        self.culprits.append(self.ids[i])
        with (self.folder / "broken.txt").open("a") as file:
            file.write(worker.test["kind"] + "\n")
        if len(self.tails) < TAILS:
            self.tails.append(f"{self.ids[i]}\n{worker.tail()}")

    def result(self) -> dict[str, Any]:
        """What is known. status: 0 all is well, 1 a test or a process failed, 2 there are no tests,
        124 some have not run."""
        tests = {test: self.outcomes.get(i, "not run") for i, test in enumerate(self.ids)}
        status = 2 if not tests else 1 if self.stillborn else 0
        for outcome in tests.values():
            if outcome == "not run" or outcome.startswith("not finished"):
                status = 124
            elif outcome.startswith(("failure", "error", "not run")) and status == 0:
                status = 1
        slowest = sorted(self.took, key=lambda i: -self.took[i])[:15]
        return {
            "status": status,
            "tests": tests,
            "culprits": sorted(self.culprits),
            "seconds": round(self.seen - self.begun, 1),
            "workers": self.workers,
            "processes": self.processes,
            "processes_without_a_test": self.stillborn,
            "test_seconds": round(sum(self.took.values()), 1),
            "slowest": {self.ids[i]: round(self.took[i], 2) for i in slowest},
            "details": {self.ids[i]: text for i, text in sorted(self.details.values())},
            "left_out": sorted(self.notes),
            "tails": self.tails,
        }


def _how(status: int | None) -> str:
    """How a process ended by itself."""
    if status is not None and status < 0:
        return signal.Signals(-status).name
    return f"exit status {status}"


def run(pools: Sequence[Pool], report: Callable[[], object]) -> None:
    """All pools at once; `report` is called every few seconds."""
    said = time.monotonic()
    try:
        for pool in pools:
            pool.begin()
        while sum(pool.step() for pool in pools):
            time.sleep(0.05)
            if time.monotonic() - said > 5:
                said = time.monotonic()
                report()
    finally:
        for pool in pools:
            pool.stop()
