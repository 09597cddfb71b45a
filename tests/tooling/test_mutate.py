"""make mutate: which wrong variants it makes of lines, and that it tells those that tests see."""

from __future__ import annotations

import importlib.util
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutate", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mutate = load(ROOT / ".ci" / "mutate.py")


# A line, and what its variants have.
PYTHON = (
    ("return a + b * 2", "a - b * 2", "a + b / 2", "a + b * 3", "b + b * 2"),
    ("return a < 1 or not b", "a <= 1 or not b", "a < 0 or not b", "a < 1 and not b"),
    ("return max(a, b)", "min(a, b)", "max(b, a)"),
    ("return a is not None", "a is  None"),
    ('return ("int8" if a == "fp8" else True)', '("fp8" if a', "if not (a ==", "else False)"),
    ("return torch.float32 if a else torch.bfloat16", "torch.bfloat16 if a"),
)
CPP = (
    ("x = a < b ? 0 : 1.5f;", "a <= b", "? 1 :", "3.0f"),
    ("if (!ready(a, n)) return;", "ready(n, a)", "if (ready(", "(false)", "!(!ready"),
    ("fill(out, std::max(a, b), Dtype::f16);", "std::min(a, b)", "Dtype::bf16"),
    ("out[i] += scale * p[i];", "out[i] -= scale", "scale / p[i]"),
)


@pytest.mark.parametrize("line", [*PYTHON, *CPP], ids=lambda line: line[0])
def test_variants(line: tuple[str, ...]) -> None:
    draw = random.Random(0)
    if line in PYTHON:
        text = f"def f(a, b):\n    {line[0]}"
        edits = [edit for _, edit in mutate.of_python(text, draw)]
    else:
        text = f"#include <a+1>\nDtype::bf16;\n  {line[0]}"
        edits = [*mutate.of_tokens(text, False, draw)]
    found = [text[:start] + new + text[end:] for start, end, new, _ in edits]
    for variant in line[1:]:
        assert any(variant in one.rpartition("\n")[2] for one in found), (variant, found)


def test_annotations_imports_strings_and_errors_stay() -> None:
    text = (
        '"""1 + 1"""\nfrom .a import b, c\ndef f(a: int | None = None) -> int | None:  # 1 + 1\n'
        '    raise ValueError(f"{a + 1}", 1)\n'
    )
    assert list(mutate.of_python(text, random.Random(0))) == []


@pytest.mark.slow
def test_a_run_tells_the_variants_that_no_test_sees(tmp_path: Path) -> None:
    """In a repository of a package of one function, of which a test sees one of two lines."""
    files = {
        "mixprec/__init__.py": "",
        "mixprec/sums.py": "def add(a, b, log):\n    return a\n",
        "tests/test_sums.py": "from mixprec.sums import add\n\n\n"
        "def test_add():\n    assert add(2, 3, []) == 5\n",
        "bench/a.txt": "", "triton_kernels/a.txt": "", "pyproject.toml": "",
        ".gitignore": "/build/\n__pycache__/\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "mutate.py", tmp_path / ".ci")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    changed = "def add(a, b, log):\n    log.append(a)\n    return a + b\n"
    (tmp_path / "mixprec" / "sums.py").write_text(changed)
    command = [
        sys.executable,
        tmp_path / ".ci" / "mutate.py",
        "HEAD",
        "",
        "1",
        "1",
        "mixprec",
        "tests",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "killed: mixprec/sums.py:3: operator" in done.stdout
    assert (
        "survived: mixprec/sums.py:2: statement\n      log.append(a)\n      pass\n" in done.stdout
    )
    assert (tmp_path / "mixprec" / "sums.py").read_text() == changed
