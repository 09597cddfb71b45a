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
    assert header[1] == "train loss"
    assert [fp32[1], fp16[1], fp16[2]] == ["2.0000", "3.0000", "+50.00%"]
    assert found.difference(found["fp16"]) == pytest.approx(0.5)


def test_with_validation_no_training_loss_stands_in_for_a_missing_one() -> None:
    header, fp32, fp16 = report(fp32=1.5).table()
    assert header[1] == "loss"
    assert [fp32[1], fp16[1], fp16[2]] == ["1.5000", "-", "-"]


def test_eighty_columns_and_a_note_for_what_is_not_the_rule() -> None:
    sizes = dict.fromkeys(("parameter_bytes", "gradient_bytes", "optimizer_bytes"), 29_900_000_000)
    done = {"losses": [0.1], "seconds": [1e-5], "units": [10], "saved_bytes": 31_620_000, **sizes}
    rows = [Row("fp32", "complete", **done), Row("fp8-delayed", "complete", 1.25, **done)]
    found = Report("samples", "bits/byte", rows=[*rows, Row("fp16", "KeyboardInterrupt")])
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[3].split() == [
        "fp8-delayed", "1.2500", "-", "1,000,000", *["29.9", "GB"] * 3, "31.6", "MB",
    ]  # fmt: skip
    assert lines[5:] == ["fp16: KeyboardInterrupt, 0 of 1 steps"]
