"""examples/train_policy.py: both log-probabilities of a policy are the same, or their spread is
shown."""

from __future__ import annotations

import importlib

import pytest


def test_ratios(examples: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    program = importlib.import_module("train_policy")
    assert program.main(["--steps=2"]) == 0
    printed = capsys.readouterr().out
    assert "|ratio - 1| at most 0\n" in printed
    plain, invariant = printed.partition("exactly 0")[2].split()[:2]
    assert float(plain[:-1]) < 100 == float(invariant[:-1])
