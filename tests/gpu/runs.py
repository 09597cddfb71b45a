"""What each stage of make gpu-test runs, in which time, and what it says in its file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pool
import sanitize
from pool import HERE, Pool

from mixprec.bench.gpu import device

DRY_RUN = os.environ.get("MIXPREC_TEST_DEVICE", "cuda") != "cuda"
CUDA, TRITON = ("cpp", "reference") if DRY_RUN else ("cuda", "triton")
MOST_WORKERS, GIB_PER_WORKER = 16, 4  # of GPU memory: a context, torch's pool, a test's tensors


def default_workers() -> int:
    """One per core, if the GPU has the memory."""
    workers = min(MOST_WORKERS, len(os.sched_getaffinity(0)))
    free = (device.snapshot() or {}).get("memory.free", "")  # MiB
    if free.isdigit():
        workers = min(workers, int(free) // 1024 // GIB_PER_WORKER)
    return max(1, workers)


@dataclass(frozen=True)
class Context:
    """What a stage may use, and how it says what is known so far."""

    limit: float
    workers: int
    scratch: Path
    only: str | None
    timeout_factor: float  # times the limits below, for a device that is slow
    report: Callable[[dict[str, Any]], None]

    def pool(self, selection: list[str], **options: Any) -> Pool:
        """Of tests in this folder; as many processes as cores, so each has one thread."""
        only = ["-k", self.only] if self.only else []
        env = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        settings = {"folder": self.scratch, "workers": self.workers, "limit": self.limit}
        settings["env"] = env | options.pop("env", {})
        options["test_limit"] *= self.timeout_factor
        return Pool([*only, *selection], **{**settings, **options})

    def run(self, tests: Pool) -> dict[str, Any]:
        pool.run([tests], lambda: self.report(tests.result()))
        return tests.result()


SELF_TESTS = str(HERE / "test_values.py::test_self_test")
ALL_TESTS = [
    str(HERE / f"test_{name}.py") for name in ("device", "values", "products", "running", "layers")
]


def stage_env(context: Context) -> dict[str, Any]:
    command = [sys.executable, "-m", "mixprec.env", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=context.limit)
    except subprocess.TimeoutExpired:
        return {"status": 124, "message": f"stopped after {context.limit:.0f} s"}
    try:
        report = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        return {"status": done.returncode or 2, "message": (done.stdout + done.stderr)[-4000:]}
    wrong = [
        f"{op} on {device}: {found}"
        for device, tests in report["self_test"].items()
        for op, found in tests.items()
        if found
    ]
    return {"status": done.returncode, "message": "; ".join(wrong), "report": report}


def stage_self(context: Context) -> dict[str, Any]:
    return context.run(context.pool([SELF_TESTS], test_limit=60))


def stage_of(*backends: str, test_limit: float, context: Context) -> dict[str, Any]:
    selection = ["--backends", ",".join(backends), "-m", "not large", *ALL_TESTS]
    return context.run(context.pool(selection, test_limit=test_limit))


def stage_large(context: Context) -> dict[str, Any]:
    return context.run(context.pool(["-m", "large", str(HERE)], workers=1, test_limit=100))


def stage_sanitize(tools: tuple[str, ...], backend: str, context: Context) -> dict[str, Any]:
    """All tools at once: each is slow on the CPU, and the kernels are small. Of other tests than
    the self-tests, those that --only names."""
    program = sanitize.find()
    if program is None:
        return {"status": 0, "skipped": "compute-sanitizer is not installed", "tools": {}}
    known = sanitize.known_options(program)
    logs = {tool: context.scratch / tool / "log" for tool in tools}
    pools = {
        tool: context.pool(
            [
                "--backends",
                backend,
                "-m",
                "not large",
                *(ALL_TESTS if context.only else [SELF_TESTS]),
            ],
            folder=log.parent,
            workers=max(1, context.workers // 4),
            test_limit=200,
            prefix=sanitize.command(program, tool, log, known),
            env=sanitize.ENV,
        )
        for tool, log in logs.items()
    }

    def result() -> dict[str, Any]:
        found = {t: {**p.result(), **sanitize.findings(logs[t])} for t, p in pools.items()}
        for of_tool in found.values():
            of_tool["status"] = of_tool["status"] or int(of_tool["errors"] != 0)
        return {"status": max(r["status"] for r in found.values()), "tools": found}

    start = time.monotonic()
    pool.run(list(pools.values()), lambda: context.report(result()))
    return {**result(), "program": program, "seconds": time.monotonic() - start}


# In the order of what is learnt soonest; the most seconds that each may take.
STAGES: dict[str, tuple[float, Callable[..., dict[str, Any]]]] = {
    "env": (100, stage_env),
    "self": (150, stage_self),
    "cuda": (300, partial(stage_of, CUDA, "vendor", "none", test_limit=50)),
    "triton": (420, partial(stage_of, TRITON, test_limit=120)),  # up to 120 compilations in a test
    "large": (200, stage_large),
    "sanitize": (400, partial(stage_sanitize, sanitize.TOOLS, CUDA)),
    "sanitize-triton": (300, partial(stage_sanitize, ("memcheck",), TRITON)),
}

FILES = {name: f"gpu-test-{name}.json" for name in STAGES} | {
    name: f"gpu-{name}.json" for name in STAGES if name.startswith(("env", "sanitize"))
}
