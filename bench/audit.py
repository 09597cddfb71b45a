"""What audit finds and what it costs, as examples/audit_errors.py and audit_cost.py measured it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from . import pages
from .table import duration, markdown

_SHARES = ("1", "2", "4", "16")  # the size of an error, as a multiple of the op's own
_CASES = {"audit": "audit", "sqnr": "sqnr=True"}


def errors(content: dict[str, Any]) -> str:
    """How many of the errors put into steps were found, by kind."""
    rows, clean = content["places"], content["clean"]
    kinds = list(dict.fromkeys(row["error"] for row in rows))
    body = [_found(kind, [row for row in rows if row["error"] == kind]) for kind in sorted(kinds)]
    body.append(_found("all", rows))
    header = ("error", "places", *(f"{factor}x" for factor in _SHARES))
    models = len({row["model"] for row in rows})
    return (
        f"{markdown(header, body)}\n\n{models} models of transformers, in "
        f"{len({row['recipe'] for row in rows})} precisions. Of {clean['pairs']} pairs without an "
        f"error {len(clean['alarms'])} were said to diverge. "
        f"{pages.machine(content['environment'])}"
    )


def _found(name: str, rows: list[dict[str, Any]]) -> tuple[str, ...]:
    shares = (sum(row["found"][factor] for row in rows) / len(rows) for factor in _SHARES)
    return name, str(len(rows)), *(f"{share:.1%}" for share in shares)


def cost(content: dict[str, Any]) -> str:
    """Times and peaks of a step, without audit and with it."""
    body = []
    for way, cases in content["rows"].items():
        seconds, peak = _medians(cases["plain"])
        cells = [way, duration(seconds), f"{peak / 1e6:,.0f} MB"]
        for case in _CASES:
            there = _medians(cases[case])
            cells += [f"{there[0] / seconds:.2f}x", f"{there[1] / peak:.2f}x"]
        body.append(tuple(cells))
    names = (name for name in _CASES.values())
    columns = [cell for name in names for cell in (f"{name}: time", f"{name}: peak")]
    return (
        f"{markdown(('', 'a step', 'peak', *columns), body)}\n\nMedians of "
        f"{len(content['rows']['fp32']['plain'])} processes, whose peak has the imports. "
        f"{pages.machine(content['environment'])}"
    )


def _medians(runs: Iterable[dict[str, Any]]) -> tuple[float, float]:
    runs = list(runs)
    seconds = statistics.median(one for run in runs for one in run["seconds"])
    return seconds, statistics.median(run["peak"] for run in runs)
