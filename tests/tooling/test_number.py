"""`python -m mixprec formats`: the table of a number."""

from __future__ import annotations

import math

import independent as ind
import numpy as np
import pytest

from mixprec.__main__ import main
from mixprec.diagnostics.number import casts, plain
from mixprec.formats import FORMATS, Format


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
