"""The programs of examples/: --help without the packages they need; the notebooks of docs/."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROGRAMS = [
    path.stem for path in sorted(EXAMPLES.glob("*.py")) if ".parse_args(" in path.read_text()
]
OPTIONAL = ("accelerate", "lightning", "matplotlib", "peft", "scipy")
OPTIONAL += ("transformers",)


@pytest.fixture
def nothing_optional(examples: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if none of the optional packages were installed."""
    adapters = [name for name in sys.modules if name.startswith("mixprec.integrations.")]
    loaded = [name for name in sys.modules if name.partition(".")[0] in OPTIONAL]
    for name in adapters:
        monkeypatch.delitem(sys.modules, name)
    for name in (*loaded, *OPTIONAL):
        monkeypatch.setitem(sys.modules, name, None)


def run(program: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit status, or the message."""
    monkeypatch.setattr(sys, "argv", [f"{program}.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(EXAMPLES / f"{program}.py"), run_name="__main__")
    return stopped.value.code


@pytest.mark.usefixtures("nothing_optional")
@pytest.mark.parametrize("program", PROGRAMS)
def test_help(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(program, "--help", monkeypatch=monkeypatch) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"usage: {program}.py")
    assert err == ""


# docs/notebooks: the sources run, and the notebooks that are committed are made of them


SOURCES = sorted((Path(__file__).resolve().parents[2] / "docs" / "notebooks").glob("*.py"))
# What the text around the cells speaks of.
PRINTED = {
    "fp8_on_your_model": (
        r"head +product +fp8",
        r"(?m)^head +y +fp8",
        "step 99: loss",
    ),
    "why_did_it_diverge": (
        "fp16: nan to nan, 60 of 60 steps skipped",
        r"2\.down: 0\.\d+% of the inputs overflow in fp16",
        r"2\.down, y in forward: in the second step the cast of its input has Inf or NaN",
        r"mended: .*, 0 steps skipped",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_runs_and_says_what_its_text_says(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(source), run_name="__main__")
    printed = capsys.readouterr().out
    for pattern in PRINTED[source.stem]:
        assert re.search(pattern, printed), pattern


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_committed_notebook_is_that_of_the_source(source: Path) -> None:
    """`make notebooks` writes them."""
    cells = json.loads(source.with_suffix(".ipynb").read_text())["cells"]
    parts = re.split(r"^# %%(?: \[markdown\])?\n", source.read_text(), flags=re.M)[1:]
    shown = ["".join(cell["source"]) for cell in cells]
    assert [
        re.sub(r"^# ?", "", part, flags=re.M).strip()
        if cell["cell_type"] == "markdown"
        else part.strip()
        for part, cell in zip(parts, cells, strict=True)
    ] == shown
    printed = "".join(
        "".join(out.get("text", "")) for cell in cells for out in cell.get("outputs", ())
    )
    for pattern in PRINTED[source.stem]:
        assert re.search(pattern, printed), pattern
