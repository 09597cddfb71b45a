"""What sums lose in the short accumulator, and the page that shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mixprec.bench import accumulator

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_promotion_is_what_keeps_long_sums() -> None:
    for data, without in (("randn", 1e-3), ("uniform [0, 1]", 3e-2)):
        assert accumulator.relative_error(data, 4096, True) > without
        assert accumulator.relative_error(data, 4096, False) < without / 7


def test_the_page_shows_what_the_model_gives() -> None:
    page = (DOCS / "numerics.md").read_text()
    found = re.search(r"<!-- accumulator -->\n\n(.*?)\n\n<!-- end -->", page, re.S)
    assert found is not None
    rows = found[1].splitlines()[2:]
    assert [int(row.split("|")[1]) for row in rows] == list(accumulator.SIZES)
    errors = accumulator.measure(accumulator.SIZES[:2])
    for i, row in enumerate(rows[:2]):
        cells = [cell.strip() for cell in row.split("|")[2:-1]]
        ways = [(data, way) for data in accumulator.DATA for way in accumulator.WAYS]
        assert cells == [f"{errors[data][way][i]:.1e}" for data, way in ways]
    assert (DOCS / "accumulator.png").stat().st_size > 10_000


def test_the_command_writes_table_and_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accumulator, "SIZES", (128, 256))
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "numerics.md"
    page.write_text("before\n<!-- accumulator -->\n<!-- end -->\nafter\n")
    made_up = {d: {way: [1e-3, 2e-3] for way in accumulator.WAYS} for d in accumulator.DATA}
    monkeypatch.setattr(accumulator, "measure", lambda: made_up)
    assert accumulator.write(tmp_path) in page.read_text()
    assert (tmp_path / "docs" / "accumulator.png").read_bytes().startswith(b"\x89PNG")
