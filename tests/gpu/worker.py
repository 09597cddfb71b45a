"""A pytest plugin for one of several processes that share a list of tests (see pool.py).

Each process takes the next test that none has taken, and writes down line by line what it starts
and how that ends. The lines outlive the process: a kernel that hangs ends it, so does a crash, and
so does an illegal access to memory, after which CUDA refuses all further work of the process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(os.environ["MIXPREC_GPU_TESTS"])
EVENTS = Path(os.environ["MIXPREC_EVENTS"])  # read by mixprec.bench.gpu.supervisor
BROKEN = FOLDER / "broken.txt"  # the kinds of tests that ended a process, written by the pool
SLOW = 3  # times the limit of other tests
ENOUGH = 3  # such tests of one kind; the rest of the kind is left out

_reports: list[pytest.TestReport] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backends", help="of the tests to run, with commas; none: those without")


def backend(item: pytest.Item) -> str:
    """The kernels that a test was made for."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    return str(params.get("kernels") or params.get("variant") or "none")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--backends")
    if wanted is not None:
        left_out = [item for item in items if backend(item) not in wanted.split(",")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def tell(**event: Any) -> None:
    with EVENTS.open("a") as file:
        file.write(json.dumps(event) + "\n")


def taken(index: int) -> bool:
    """Take the test, unless another process has."""
    try:
        os.close(os.open(FOLDER / f"taken-{index}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return True
    return False


def reason(report: pytest.TestReport) -> str:
    """What was wrong, in one line."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")[:300]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(lines[:4])[:300] or "no reason was given"


def outcome() -> dict[str, str]:
    """Of the test that just ended: passed, or what was wrong, with the traceback's end."""
    for report in _reports:
        if report.failed:
            kind = "failure" if report.when == "call" else "error"
            return {"outcome": f"{kind}: {reason(report)}", "detail": report.longreprtext[-3000:]}
    for report in _reports:
        if report.skipped:
            return {"outcome": f"skipped: {reason(report)}"}
    return {"outcome": "passed"}


def cuda_is_broken() -> str | None:
    """Why CUDA does no more work in this process; None if all that was asked of it is done."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except Exception as error:
        return str(error).strip().splitlines()[0][:300]
    return None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _reports.append(report)


def run(item: pytest.Item) -> dict[str, Any]:
    _reports.clear()
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
    result: dict[str, Any] = outcome()
    notes = {line for r in _reports for line in r.capstdout.splitlines() if "left out: " in line}
    if notes:
        result["notes"] = sorted(notes)
    broken = cuda_is_broken()
    if broken is not None:
        result["broken"] = broken
        if result["outcome"] == "passed":
            result["outcome"] = f"failure: CUDA fails after it: {broken}"
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    if session.testsfailed:
        raise session.Interrupted(f"{session.testsfailed} errors while tests were collected")
    tell(collected=[item.nodeid.removeprefix("tests/gpu/") for item in session.items])
    parent = os.getppid()
    for i, item in enumerate(session.items):
        if os.getppid() != parent:
            os._exit(4)  # nobody is there to read of it
        if taken(i):
            continue
        kind = f"{item.nodeid.split('[')[0]} {backend(item)}"
        start = time.time()
        slow = item.get_closest_marker("slow") is not None
        tell(start=i, at=start, kind=kind, timeout_factor=SLOW if slow else 1)
        if BROKEN.exists() and BROKEN.read_text().splitlines().count(kind) >= ENOUGH:
            result = {"outcome": f"not run: {ENOUGH} tests of its kind ended their process"}
        else:
            result = run(item)
        tell(end=i, seconds=time.time() - start, **result)
        if "broken" in result:
            os._exit(3)  # an orderly end would call CUDA again
    tell(done=time.time())
    return True
