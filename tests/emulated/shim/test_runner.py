"""The bytes that the kernels move are those that docs/kernels.md shows; and a library is compiled
again when a file that it includes changes, and only then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from emulated.shim import count_bytes, runner

COMMITTED = json.loads(count_bytes.RESULT.read_text())["rows"]


def test_a_copy_of_known_size() -> None:
    """dequantize reads a byte and writes four, each once; amax reads x and writes one number."""
    x = torch.ones(count_bytes.ROWS, count_bytes.COLS)
    args = [x.to(count_bytes.E4M3), torch.tensor(1.0), torch.float32]
    found = count_bytes.count([("dequantize", args), ("amax", [x])])
    assert found == {"launches": 3, "loaded": 5, "stored": 4, "read": 5, "written": 4}


def test_the_committed_counts_are_those_of_the_kernels() -> None:
    again = "run python tests/emulated/shim/count_bytes.py and python -m mixprec.bench report"
    for counted, committed in zip(count_bytes.rows(), COMMITTED, strict=True):
        assert counted == committed, again


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
