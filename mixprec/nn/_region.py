"""Which recipe holds in the region of the program that is running: what `autocast` sets."""

from __future__ import annotations

from ..recipes import Recipe

_NONE = object()
_current: Recipe | object | None = _NONE  # None: switched off


def recipe_here(own: Recipe) -> Recipe | None:
    """The recipe that a module with recipe `own` computes with now; None: as torch's module."""
    if _current is _NONE:
        return own
    return _current  # type: ignore[return-value]


def swap(recipe: Recipe | object | None) -> object:
    """Set what holds from now on; returns what held before, to be set again."""
    global _current
    before, _current = _current, recipe
    return before
