"""Generated blocks of README.md and docs/: between two markers, never typed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any


def machine(where: dict[str, Any]) -> str:
    """Where the figures of a block were taken."""
    isa = f" ({where['isa']})" if where.get("isa") else ""
    parts = [where["processor"] + isa, f"{where['threads']} threads", f"torch {where['torch']}"]
    if where.get("keeps_memory"):
        parts.append("freed memory kept")
    if where.get("commit"):
        parts.append(f"commit {where['commit']}")
    return ", ".join(parts) + "."


def fill(text: str, block: Callable[[str], str | None]) -> str:
    """`text` with what stands between <!-- name --> and <!-- end --> replaced by block(name); None
    leaves it as it is."""

    def filled(match: re.Match[str]) -> str:
        found = block(match[1])
        return match[0] if found is None else f"<!-- {match[1]} -->\n\n{found}\n\n<!-- end -->"

    return re.sub(r"<!-- ([^>]+?) -->\n.*?<!-- end -->", filled, text, flags=re.DOTALL)
