"""What a person reads at the end: what failed, in one line each, then a line per stage."""

from __future__ import annotations

from typing import Any

LINES, WIDTH = 60, 190


def failed(outcome: str) -> bool:
    return not outcome.startswith(("passed", "skipped"))


def tests_of(result: dict[str, Any]) -> dict[str, str]:
    """The tests of a stage; those under a tool with its name before them."""
    tools = result.get("tools", {})
    by_tool = {f"{t} {id}": words for t, r in tools.items() for id, words in r["tests"].items()}
    return {**result.get("tests", {}), **by_tool}


def row(stage: str, seconds: float, result: dict[str, Any]) -> str:
    """One line of the table."""
    outcomes = list(tests_of(result).values())
    passed = sum(words == "passed" for words in outcomes)
    skipped = sum(words.startswith("skipped") for words in outcomes)
    not_run = sum(words.startswith("not ") for words in outcomes)
    words = f"{passed} passed, {len(outcomes) - passed - skipped - not_run} failed"
    words += f", {skipped} skipped" + (f", {not_run} not run" if not_run else "")
    for tool, of_tool in result.get("tools", {}).items():
        count = of_tool["errors"]
        words += f"; {tool}: {'no count' if count is None else f'{count} errors'}"
    status = result["status"]
    verdict = {0: "ok", 124: "OUT OF TIME"}.get(status, f"FAILED ({status})")
    if not outcomes:
        said = [result.get("skipped"), result.get("words"), *result.get("tails", ())]
        words = next((text.strip().splitlines()[-1] for text in said if text and text.strip()), "")
    return f"{stage:16} {seconds:6.1f} s  {verdict:12} {words}"[:WIDTH]


def failures(stage: str, result: dict[str, Any]) -> list[str]:
    """A line per test function and reason, with the first of its tests and how many there are."""
    groups: dict[tuple[str, str], list[str]] = {}
    for test, words in tests_of(result).items():
        if failed(words):
            groups.setdefault((test.split("[")[0], words[:50]), []).append(test)
    lines = []
    for tests in groups.values():
        more = f" (and {len(tests) - 1} more like it)" if len(tests) > 1 else ""
        lines.append(f"{stage}: {tests[0]}{more}: {tests_of(result)[tests[0]]}"[:WIDTH])
    return lines


def summary(rows: list[str], lines: list[str]) -> str:
    """At most LINES lines, failures first."""
    room = LINES - len(rows) - 1
    if len(lines) > room:
        lines = [*lines[: room - 1], f"and {len(lines) - room + 1} more, in the JSON files"]
    return "\n".join([*lines, *rows])
