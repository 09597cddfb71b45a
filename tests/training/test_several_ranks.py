"""Pairs of a way to distribute a model, a recipe and an optimizer: the training of one process."""

from __future__ import annotations

import pytest

from mixprec.bench.studies import several_ranks
from mixprec.bench.studies.several_ranks import Cell

EXACT = ("ddp", "zero1", "fsdp", "pp", "pp-fsdp")


def limit(cell: Cell) -> float:
    """Moments in 8 bits are rounded by where an element is; products of parts are added up in
    another order, in 16 bits, which casts to FP8 enlarge."""
    if cell.optimizer == "AdamW, int8" or cell.way not in (*EXACT, "hsdp"):
        return 0.25
    return 1e-12 if cell.way in EXACT else 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("recipe", several_ranks.RECIPES)
def test_pairs_are_one_process(recipe: str) -> None:
    cells = [cell for cell in several_ranks.pairwise() if cell.recipe == recipe]
    for cell, row in zip(cells, several_ranks.measured(cells), strict=True):
        if (cell.way, cell.optimizer) == ("zero1", "Muon"):
            assert "parameter groups" in row["raised"], "torch wants those that it was given"
            continue
        assert "raised" not in row, row
        assert row["ranks differ"] == []
        assert row["loaded"] <= (0.01 if cell.optimizer == "AdamW, int8" else 0)
        assert max(row[event] for event in ("overflow", "clipping", "restarted")) <= limit(cell), (
            row
        )
