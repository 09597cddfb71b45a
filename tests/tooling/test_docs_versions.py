"""The versions that README and pyproject.toml promise are those that make versions tested."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from mixprec.bench import results

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / ".ci"))  # of pythons.py, beside it
VERSIONS = runpy.run_path(str(ROOT / ".ci" / "versions.py"))
ROWS = results.read_json(ROOT / results.CPU / "versions.json")["rows"]


def test_every_pair_is_listed_and_none_failed() -> None:
    assert tuple(row["pair"] for row in ROWS) == VERSIONS["PAIRS"]
    for row in ROWS:
        if row["status"] == "not run":
            assert row["reason"]
        else:
            assert row["status"] == "passed", row
            assert row["failed"] == 0, row
            assert row["passed"] > 0, row
            asked = row["pair"].split("-")
            assert row["python"].startswith(f"{asked[0]}."), row
            assert row["torch"].startswith(f"{asked[1]}."), row


def test_pyproject_promises_what_was_tested() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    # All but those that could not be had where the others were tested.
    had = [row["pair"] for row in ROWS if row.get("reason", "not asked for") == "not asked for"]
    classified = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    assert classified == [pair.split("-")[0] for pair in had]
    python, torch = VERSIONS["PAIRS"][0].split("-")
    assert f'requires-python = ">={python}"' in text
    assert f'dependencies = ["torch>={torch}"]' in text


OUTPUTS = (
    ("== 1 failed, 12 passed, 3 skipped, 1 error in 61.20s (0:01:01) ==", (12, 2, 3, None)),
    ("12 passed, 3 skipped in 1.20s\nmake test: 7 s", (12, 0, 3, 7)),
    ("error: command 'g++' failed with exit code 1", (0, 0, 0, None)),
)


@pytest.mark.parametrize(("text", "counts"), OUTPUTS)
def test_counts_are_read_from_the_last_line(
    text: str, counts: tuple[int, int, int, int | None]
) -> None:
    assert tuple(VERSIONS["counts"](text + "\n").values()) == counts
