"""docs/explorer.html: the tables in which it looks numbers up."""

from __future__ import annotations

import json
import re
from pathlib import Path

import independent as ind
import numpy as np
import pytest

import mixprec
from mixprec.formats import BLOCK, FORMATS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "explorer.html").read_text()
TABLES = json.loads(re.findall(r'<script id="tables"[^>]*>(.*?)</script>', PAGE, re.S)[0])


@pytest.mark.parametrize("fmt", [*FORMATS, *BLOCK], ids=str)
def test_every_number_of_a_format_is_in_its_table(fmt: mixprec.Format) -> None:
    spec = getattr(ind, fmt.name.upper())
    table = TABLES[fmt.name]
    found: list[float] = []
    starts = [*(run[0] for run in table["runs"]), table["last"] + 1]
    for (_, first, step), code, end in zip(table["runs"], starts, starts[1:], strict=False):
        start = 0.0 if first is None else 2.0**first
        found += [start + i * 2.0**step for i in range(min(end, starts[-1]) - code)]
    every = ind.decode_table(spec)[: 1 << (fmt.bits - 1)].astype(np.float64)
    assert found == every[: table["last"] + 1].tolist()
    others = every[table["last"] + 1 :]
    assert (table["inf"] is not None) == fmt.has_inf == bool(np.isinf(others[:1]).any())
    assert table["nan"] is None if not len(others) else bool(np.isnan(every[table["nan"]]))


def test_the_page_needs_no_network() -> None:
    assert set(re.findall(r"https?://[^\"]+", PAGE)) <= {
        "http://www.w3.org/1999/xhtml",
        "http://www.w3.org/2000/svg",
    }
    assert not re.search(r"<(link|iframe|img)|\bsrc=|fetch\(|@import", PAGE)
