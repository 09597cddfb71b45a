"""What a person reads at the end: what failed, in one line each, then a line per stage."""

from __future__ import annotations

from typing import Any

LINES, WIDTH = 60, 190


def failed(outcome: str) -> bool:
    return not outcome.startswith(("passed", "skipped"))


def tests_of(result: dict[str, Any]) -> dict[str, str]:
    """The tests of a stage; those under a tool with its name before them."""
    tools = result.get("tools", {})
    by_tool = {f"{t} {id}": said for t, r in tools.items() for id, said in r["tests"].items()}
    return {**result.get("tests", {}), **by_tool}


def line(stage: str, seconds: float, result: dict[str, Any]) -> str:
    """One line of the table."""
    outcomes = list(tests_of(result).values())
    passed = sum(outcome == "passed" for outcome in outcomes)
    skipped = sum(outcome.startswith("skipped") for outcome in outcomes)
    not_run = sum(outcome.startswith("not ") for outcome in outcomes)
    text = f"{passed} passed, {len(outcomes) - passed - skipped - not_run} failed"
    text += f", {skipped} skipped" + (f", {not_run} not run" if not_run else "")
    for tool, of_tool in result.get("tools", {}).items():
        count = of_tool["errors"]
        text += f"; {tool}: {'no count' if count is None else f'{count} errors'}"
    status = result["status"]
    verdict = {0: "ok", 124: "OUT OF TIME"}.get(status, f"FAILED ({status})")
    if not outcomes:
        said = [result.get("skipped"), result.get("message"), *result.get("tails", ())]
        text = next((t.strip().splitlines()[-1] for t in said if t and t.strip()), "")
    return f"{stage:16} {seconds:6.1f} s  {verdict:12} {text}"[:WIDTH]


def failures(stage: str, result: dict[str, Any]) -> list[str]:
    """A line per test function and reason, with the first of its tests and how many there are."""
    groups: dict[tuple[str, str], list[str]] = {}
    for test, outcome in tests_of(result).items():
        if failed(outcome):
            groups.setdefault((test.split("[")[0], outcome[:50]), []).append(test)
    lines = []
    for tests in groups.values():
        more = f" (and {len(tests) - 1} more like it)" if len(tests) > 1 else ""
        lines.append(f"{stage}: {tests[0]}{more}: {tests_of(result)[tests[0]]}"[:WIDTH])
    return lines


def summary(table: list[str], lines: list[str]) -> str:
    """At most LINES lines, failures first."""
    room = LINES - len(table) - 1
    if len(lines) > room:
        lines = [*lines[: room - 1], f"and {len(lines) - room + 1} more, in the JSON files"]
    return "\n".join([*lines, *table])
