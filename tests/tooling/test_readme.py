"""README.md and docs/: tables are those of the committed results, code runs, links resolve."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from mixprec.bench import report

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


def test_tables_are_the_committed_results() -> None:
    """Those of README.md and of docs/."""
    for page, text in report.render(ROOT).items():
        assert text == page.read_text(), f"{page.name}: run python -m mixprec.bench report"


def run_blocks(page: Path, folder: Path, checks: str = "") -> str:
    """The output of the Python blocks of a page, run as one program."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks, page
    program = folder / f"{page.stem}.py"
    program.write_text("\n".join(blocks) + checks)
    command = [sys.executable, str(program)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_code_runs_as_it_stands(tmp_path: Path) -> None:
    run_blocks(README, tmp_path, "\nassert loss.isfinite() and scaler.skipped.item() == 0\n")
    checks = "\nassert error < 0.5 and w.grad is not None\nassert scaler.skipped.item() == 0\n"
    output = run_blocks(ROOT / "docs" / "tour.md", tmp_path, checks)
    assert "fp8: x e4m3/tensor, w e4m3/tensor, g e5m2/tensor" in output
    assert "fp8-delayed" in output
    assert "the whole model: " in output  # the report of freeze
    assert "recipe" in output  # the table of compare


def test_links_lead_somewhere() -> None:
    for page in (README, *sorted((ROOT / "docs").glob("*.md"))):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
