"""Module paths of earlier versions lead to the same modules."""

from __future__ import annotations

import importlib

import mixprec
from mixprec._aliases import ALIASES


def test_old_paths_give_the_modules_of_the_new_ones() -> None:
    for old, new in ALIASES.items():
        module = importlib.import_module(f"mixprec.{new}")
        assert importlib.import_module(f"mixprec.{old}") is module, old
        for name in getattr(module, "__all__", ()):
            assert hasattr(module, name), (new, name)
    assert importlib.import_module("mixprec.stats.monitor").Monitor is mixprec.stats.Monitor
    assert callable(mixprec.compare), "the function, not the module of that name"
    assert callable(mixprec.convert)
