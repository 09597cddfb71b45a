"""README.md: its tables are those of the committed results, and its code runs as it stands."""

from __future__ import annotations

import re
import shutil
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


def test_a_changed_figure_would_be_seen(tmp_path: Path) -> None:
    for folder in ("docs", "bench/results"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    edited = tmp_path / "README.md"
    table = re.search(r"<!-- demo -->.*?<!-- end -->", README.read_text(), re.DOTALL)
    assert table is not None
    figure = re.search(r"\d\.\d{4}", table[0])
    assert figure is not None
    edited.write_text(README.read_text().replace(figure[0], "9.9999", 1))
    assert report.write(tmp_path) == [edited]
    assert edited.read_text() == README.read_text()


def test_the_tour_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 5
    checks = "\nassert error < 0.5 and w.grad is not None\nassert scaler.skipped.item() == 0\n"
    program = tmp_path / "tour.py"
    program.write_text("\n".join(blocks) + checks)
    command = [sys.executable, str(program)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "fp8: x e4m3/tensor, w e4m3/tensor, g e5m2/tensor" in run.stdout
    assert "fp8-delayed" in run.stdout
    assert "the whole model: " in run.stdout  # the report of freeze
    assert "recipe" in run.stdout
    for command in ("make demo", "make test"):
        assert command in README.read_text()[:1500]


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README.read_text()):
        assert (ROOT / target).exists(), target
