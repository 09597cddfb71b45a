"""The compatibility table of docs/integrations.md, from what the tests of this folder report.

With MIXPREC_INTEGRATIONS_TABLE=PAGE the run writes its results into PAGE, between the markers. A
row is one test: the package is in the name of its file, what was run in its docstring.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

HERE = Path(__file__).parent
START, END = "<!-- compatibility -->", "<!-- end -->"

_outcomes: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)


def package_of(path: Path) -> str:
    name = path.stem.removeprefix("test_")
    of_transformers = name.startswith("transformers") or name.endswith(("_families", "_models"))
    return "transformers" if of_transformers else name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            name = item.originalname.removeprefix("test_").replace("_", " ")
            doc = (getattr(item, "obj", None).__doc__ or name).strip().splitlines()[0]
            item.user_properties.append(("integration", (package_of(item.path), doc)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    row = dict(report.user_properties).get("integration")
    if row is not None and (report.when == "call" or report.outcome != "passed"):
        _outcomes[tuple(row)][report.outcome] += 1


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that is skipped, where its package is not installed, or cannot be imported."""
    path = HERE / Path(report.nodeid).name
    if report.outcome != "passed" and path.name.startswith("test_") and path.exists():
        _outcomes[package_of(path), "all tests"][report.outcome] += 1


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def table() -> str:
    lines = ["| package | version | what was run | outcome |", "|---|---|---|---|"]
    for (package, what), outcomes in sorted(_outcomes.items(), key=lambda row: row[0][0]):
        counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        lines.append(f"| {package} | {installed(package)} | {what} | {counts} |")
    return "\n".join([*lines, "", f"With torch {version('torch')}."])


def pytest_sessionfinish(session: pytest.Session) -> None:
    page = os.environ.get("MIXPREC_INTEGRATIONS_TABLE")
    if page is None or hasattr(session.config, "workerinput"):
        return
    text = Path(page).read_text()
    before, rest = text.split(START, 1)
    _, after = rest.split(END, 1)
    Path(page).write_text(f"{before}{START}\n\n{table()}\n\n{END}{after}")
