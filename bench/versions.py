"""The table of docs/install.md: make test with pairs of Python and torch, of .ci/versions.py."""

from __future__ import annotations

from typing import Any

from .table import markdown


def outcome(row: dict[str, Any]) -> str:
    """What became of make test with one pair."""
    if row["status"] == "not run":
        return f"not run: {row['reason']}"
    counts = [f"{row[kind]:,} {kind}" for kind in ("failed", "passed", "skipped") if row[kind]]
    return ", ".join(counts) or "did not start"


def block(content: dict[str, Any]) -> str:
    """A line per pair, and the processors."""
    rows = content["rows"]
    body = []
    for row in rows:
        asked = row["pair"].split("-")
        names = (row.get("python", asked[0]), row.get("torch", asked[1]))
        took = f"{row['seconds']} s" if row.get("seconds") else ""
        day = row.get("date", "")[:10]
        body.append((*names, outcome(row), took, day, row.get("commit") or ""))
    processors = sorted({row["processor"] for row in rows if "processor" in row})
    header = ("Python", "torch", "`make test`", "time", "date", "commit")
    ran_on = "; ".join(processors) or "Nothing ran"
    return f"{markdown(header, body)}\n\n{ran_on}."
