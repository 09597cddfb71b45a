"""docs/explorer.html: the tables in which it looks numbers up, and the histograms that it reads."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import independent as ind
import numpy as np
import pytest
import torch

import mixprec
from mixprec.__main__ import main
from mixprec.diagnostics.number import casts, plain
from mixprec.formats import BLOCK, FORMATS, Format

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


def test_a_saved_histogram(tmp_path: Path) -> None:
    x = torch.tensor([[0.0, torch.inf, torch.nan, 1.0, 1.1]])
    mixprec.stats.histogram(x).save(tmp_path / "h.json")
    saved = json.loads((tmp_path / "h.json").read_text())
    assert {saved[name] for name in ("zeros", "inf", "nan")} == {1}
    assert (saved["format"], saved["version"], saved["numel"]) == ("mixprec histogram", 1, 5)
    assert saved["counts"] == {"2032": 1, "2033": 1}


# python -m mixprec formats: the table of a number


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats", "-1e9", "--block", "2e9"]) == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert rows[3] == "fp16 1 11111 0000000000 -inf -inf -65504"
    assert rows[5] == "e4m3 1 1111 110 -448 100 % -448 -416"
    assert rows[10] == "mxfp4, e2m1 1 10 0 -1.0737418e+09 7.4 % 2^29"


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_neighbours_and_bits_of_codes(fmt: Format) -> None:
    spec = ind.BY_DTYPE[fmt.dtype]
    values = ind.decode_table(spec)
    finite = np.unique(values[np.isfinite(values)])
    for code in range(0, 1 << spec.bits, 1 if spec.bits == 8 else 997):
        row = plain(float(values[code]), fmt)
        if not math.isfinite(values[code]):
            continue
        assert int(row.bits.replace(" ", ""), 2) == code
        at = int(np.searchsorted(finite, values[code]))
        assert row.below == (finite[at - 1] if at else -(fmt.max if fmt.saturates else math.inf))
        beyond = fmt.max if fmt.saturates else math.inf
        assert row.above == (finite[at + 1] if at + 1 < len(finite) else beyond)


def test_blocks_and_what_is_no_number() -> None:
    found = {row.format: row for row in casts(0.1, block=1.7, tensor=40.0)}
    assert found["mxfp8, e4m3"][1:3] == ("0 1011 101", 0.1015625)
    assert found["nvfp4, e2m1"].scale == "20 x 0.014881"
    assert found["nvfp4, e2m1"].value == pytest.approx(0.1488095)
    assert all(math.isnan(row.value) for row in casts(math.nan))
    in_blocks = casts(1.0, block=math.nan)[4:]
    assert all(math.isnan(row.value) for row in in_blocks)
    assert all(math.isnan(row.value) for row in casts(1.0, block=1e300)[4:])  # Inf in FP32
    assert [row.above for row in casts(math.inf)[:3]] == [math.inf] * 3
