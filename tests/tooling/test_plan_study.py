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

    found = plan_study.study("mlp", 16, 8)
    rows = found["rows"]
    assert plan_study.spearman(rows, "predicted")[0] > 0.8
    assert plan_study.spearman(rows, "predicted")[0] > plan_study.spearman(rows, "low")[0] + 0.1
    spread = max(row["measured"] for row in rows) - min(row["measured"] for row in rows)
    assert all(abs(row["orders"][0] - row["orders"][1]) < spread / 3 for row in rows)


def test_what_the_plan_chooses_of_all(short: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import plan_regret

    monkeypatch.setattr(plan_regret, "FORMATS", ("nvfp4-1x16", "bf16"))
    found = plan_regret.regret("regression")
    assert len(found["rows"]) == 2**5
    assert max(map(abs, found["regret"].values())) < 0.3


def test_better_than_rules(short: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import plan_choice

    monkeypatch.setattr(plan_choice, "SEEDS", 1)
    (losses,), (kept,) = plan_choice.rules("mlp").values()
    plan = losses.pop("plan")
    assert losses.pop("time") < 1
    assert losses.keys() >= {"SNIP", "first and last in bf16"}
    assert plan < 1.2 * min(losses.values())
    assert kept["grown"] <= kept["limit"]


def test_outliers_save_most_where_there_are_some(short: Any) -> None:
    import outliers_study

    found = outliers_study.grown(short.Task("mlp"), 0)
    for name in outliers_study.FORMATS:
        assert found[name]["20%"] < found[name]["5%"] < 0.8 * found[name]["none"]
        assert found[name]["5%"] < found[name]["5% at random"]
