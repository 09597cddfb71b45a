"""The programs of examples/: --help without the packages they need, and what to install."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROGRAMS = [
    path.stem for path in sorted(EXAMPLES.glob("*.py")) if ".parse_args(" in path.read_text()
]
OPTIONAL = ("accelerate", "lightning", "matplotlib", "peft", "rich", "scipy")
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


@pytest.mark.usefixtures("nothing_optional")
@pytest.mark.parametrize(
    ("program", "install"),
    [
        ("gpt_memory --out=x.json --plot=x.png", "'mixprec[examples]'"),
        ("train_accelerate", "accelerate"),
        ("train_fabric", "lightning"),
        ("train_lightning", "lightning"),
        ("train_peft", "peft"),
        ("train_transformers", "transformers accelerate"),
    ],
)
def test_what_to_install(program: str, install: str, monkeypatch: pytest.MonkeyPatch) -> None:
    message = str(run(*program.split(), monkeypatch=monkeypatch))
    assert message.startswith("error: ")
    assert message.endswith(f": pip install {install}")
    assert "\n" not in message


def test_every_program_is_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("train_*.py")} < set(PROGRAMS)
