"""Result files: written whole or not at all, checked when read, compared case by case."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mixprec._checkpoint_file import replace_file

from .cases.registry import COPY

SCHEMA = "mixprec.bench/1"
RESULTS = Path("bench") / "results"  # in the repository
CPU = RESULTS / "cpu"
# What must agree for two files to be comparable: times of another machine say nothing.
SAME = ("processor", "threads", "isa", "gpu")


def processor_file(environment: dict[str, Any]) -> Path:
    """The file of a whole run of the cases on this kind of processor, in the repository."""
    words = re.sub(r"\((r|tm)\)", "", f"{environment['processor']} {environment['isa']}".lower())
    return CPU / f"bench-{'-'.join(re.findall(r'[a-z0-9]+', words))}.json"


def load_all_processors(root: Path) -> list[dict[str, Any]]:
    return [load(path) for path in sorted((root / CPU).glob("bench-*.json"))]


class ResultError(Exception):
    """A result file that cannot be read, is damaged, or does not fit the other one."""


def save(path: Path, environment: dict[str, Any], rows: list[dict[str, Any]], **more: Any) -> None:
    """Write a result file, a row per case. OSError if that fails."""
    write_json(path, {"schema": SCHEMA, **more, "environment": environment, "rows": rows})


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1) + "\n"
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_json(path: Path) -> Any:
    """ResultError, naming the file, if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ResultError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ResultError(f"{path}: cannot be read ({error})") from None
    except json.JSONDecodeError as error:
        raise ResultError(f"{path}: is damaged, not JSON ({error})") from None


def load(path: Path) -> dict[str, Any]:
    """The content of a file of `save`. ResultError, naming the file, if it is not a whole one."""
    content = read_json(path)
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise ResultError(f"{path}: is no result of mixprec.bench ({SCHEMA}), found {found!r}")
    try:
        for row in content["rows"]:
            row["name"], row["status"], row["reason"], bool(row["met"])
            if row["target"] is not None:
                float(row["target"]["value"])
            if row["status"] == "ok":
                float(row["median"]["ours"])
                if row["figure"] is not None:
                    float(row["figure"])
        dict(content["environment"])
    except (KeyError, TypeError, ValueError) as error:
        raise ResultError(f"{path}: is damaged ({type(error).__name__}: {error})") from None
    return content


@dataclass(frozen=True)
class Change:
    """How one case changed: new time / old time, each relative to `against` where there is one.

    A baseline that was timed in turns with ours takes out how busy the machine was.
    """

    name: str
    ratio: float
    against: str | None
    broken: str | None = None  # why the new file has no time where the old one has


def compare(old: dict[str, Any], new: dict[str, Any], *, any_machine: bool = False) -> list[Change]:
    """The changes of all cases that `old` timed and `new` contains, in new's order.

    ResultError if they come from different machines or settings (unless any_machine), or share
    no case.
    """
    if not any_machine:
        for key in SAME:
            before, after = old["environment"].get(key), new["environment"].get(key)
            if before != after:
                raise ResultError(
                    f"the files do not match: {key} is {before!r} in OLD and {after!r} in NEW "
                    "(--any-machine compares them all the same)"
                )
    timed = {row["name"]: row for row in old["rows"] if row["status"] == "ok"}
    changes = []
    for row in new["rows"]:
        if row["name"] not in timed:
            continue
        if row["status"] != "ok":
            changes.append(Change(row["name"], 1.0, None, f"{row['status']}: {row['reason']}"))
            continue
        before, after = timed[row["name"]]["median"], row["median"]
        shared = [name for name in after if name != "ours" and name in before]
        against = min(shared, key=lambda name: (name == COPY, after[name]), default=None)
        ratio = after["ours"] / before["ours"]
        if against is not None:
            ratio *= before[against] / after[against]
        changes.append(Change(row["name"], ratio, against))
    if not changes:
        raise ResultError("the files do not match: no case of OLD was measured again in NEW")
    return changes
