"""The studies of plans, with fewer runs and steps than their results have."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("scipy", reason="scipy is not installed (pip install 'mixprec[plan]')")


@pytest.fixture
def short(examples: pytest.MonkeyPatch) -> Any:
    import plan_tasks

    examples.setattr(plan_tasks, "BEFORE", 100)
    examples.setattr(plan_tasks, "STEPS", 20)
    return plan_tasks


def test_predicted_in_the_order_of_what_was_measured(short: Any) -> None:
    import plan_study

    found = plan_study.study("mlp", 16, 8, 2)
    rows = found["rows"]
    assert plan_study.spearman(rows, "predicted")[0] > 0.8
    assert plan_study.spearman(rows, "predicted")[0] > plan_study.spearman(rows, "low")[0] + 0.1
    spread = max(row["measured"] for row in rows) - min(row["measured"] for row in rows)
    assert all(max(runs) - min(runs) < spread / 4 for runs in found["noise"])


def test_what_the_plan_chooses_of_all(short: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import plan_choice

    monkeypatch.setattr(plan_choice, "FORMATS", ("nvfp4-1x16", "bf16"))
    found = plan_choice.regret("regression")
    assert len(found["rows"]) == 2**5
    assert max(found["regret"].values()) < 0.3
    assert min(found["regret"].values()) >= 0.0
