"""The programs of examples/, which are found by path, with a small data set for them; a table of
GEMM choices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mixprec.ops._dispatch import gemm_table

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def examples() -> Iterator[pytest.MonkeyPatch]:
    """Makes them importable; patches of it last for a file of tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield patch


@pytest.fixture(scope="module")
def few_glyphs(examples: pytest.MonkeyPatch) -> Any:
    """Six characters, learned in a few steps, in place of the data sets."""
    import image_data

    examples.setattr(image_data, "CHARACTERS", "0147XS")
    images = image_data.glyph_images(train=300, held_out=120)
    examples.setattr(image_data, "load", lambda: images)
    return images


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where mixprec looks for measured choices of gemm: no file yet."""
    path = tmp_path / "folder" / "table.json"
    monkeypatch.setenv("MIXPREC_TUNED", str(path))
    monkeypatch.setattr(gemm_table, "SHIPPED", tmp_path / "none.json")
    gemm_table.table.cache_clear()
    yield path
    monkeypatch.undo()
    gemm_table.table.cache_clear()
