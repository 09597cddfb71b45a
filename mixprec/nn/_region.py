"""The recipe of the current `autocast` region."""

from __future__ import annotations

from ..recipes import Recipe

_NONE = object()
_current: Recipe | object | None = _NONE  # None: switched off


def recipe_here(own: Recipe) -> Recipe | None:
    """The current recipe of a module with recipe `own`; None: compute as torch's module."""
    if _current is _NONE:
        return own
    return _current  # type: ignore[return-value]


def swap(recipe: Recipe | object | None) -> object:
    """Set the current recipe; return the previous one, to be restored later."""
    global _current
    before, _current = _current, recipe
    return before
