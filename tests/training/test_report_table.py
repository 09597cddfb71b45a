"""The table of compare(): which loss it shows, and how it writes scales."""

from __future__ import annotations

import pytest

from mixprec.diagnostics.report import Report, Row


def report(**validation: float) -> Report:
    """Two recipes of 20 steps each; the losses of the last two are 1 and 3, or 2 and 4."""
    rows = [
        Row(name, "complete", validation.get(name), [9.0] * 18 + last, loss_scale=scale)
        for name, last, scale in (("fp32", [1.0, 3.0], None), ("fp16", [2.0, 4.0], 65536.0))
    ]
    return Report(rows=rows)


def test_without_validation_the_end_of_training_is_compared() -> None:
    found = report()
    header, fp32, fp16 = found.table()
    assert header[1] == "training loss"
    assert [fp32[1], fp16[1], fp16[2]] == ["2.0000", "3.0000", "+50.00%"]
    assert found.difference(found["fp16"]) == pytest.approx(0.5)


def test_with_validation_no_training_loss_stands_in_for_a_missing_one() -> None:
    header, fp32, fp16 = report(fp32=1.5).table()
    assert header[1] == "loss"
    assert [fp32[1], fp16[1], fp16[2]] == ["1.5000", "-", "-"]


@pytest.mark.parametrize(("scale", "text"), [(65536.0, "2^16"), (0.25, "2^-2"), (3.0, "3")])
def test_a_power_of_two_is_written_as_one(scale: float, text: str) -> None:
    assert text in Report(rows=[Row("fp16", loss_scale=scale)]).table()[1]
