"""A library is compiled again when a file that it includes changes, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest
from emulated.shim import runner


def test_a_change_of_what_is_included_compiles_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "BUILD", tmp_path / "build")
    source, csrc = tmp_path / "source.cpp", tmp_path / "csrc"
    (csrc / "math").mkdir(parents=True)
    texts = {"math/one.h": "", "math/two.h": "", "other.h": "", "../source.cpp": ""}
    texts |= {"math/one.h": '#include "two.h"', "../source.cpp": '#include "math/one.h"'}

    def compiled() -> Path:
        return runner.compile_(["-c", source], ".o", csrc)

    for name, text in texts.items():
        (csrc / name).write_text(text)
    first = compiled()
    (csrc / "other.h").write_text("int other;")
    assert compiled() == first
    changed = {first}
    for name in ("math/one.h", "math/two.h", "../source.cpp"):
        (csrc / name).write_text(texts[name] + f"\n#define CHANGED_{len(changed)}\n")
        changed.add(compiled())
    assert len(changed) == 4
    for name, text in texts.items():
        (csrc / name).write_text(text)
    assert compiled() == first  # as it was before: not compiled once more
    (csrc / "math" / "two.h").write_text("#error two")
    with pytest.raises(RuntimeError, match="#error two"):
        compiled()
