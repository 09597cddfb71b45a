"""README.md and docs/: tables are those of the committed results, links resolve."""

from __future__ import annotations

import html
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import mixprec
from mixprec.bench import front, report, results

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
KINDS = ("linear", "attention", "activation", "norm", "loss", "other")


def test_tables_are_the_committed_results() -> None:
    for page, text in report.render(ROOT).items():
        assert text == page.read_text(), f"{page.name}: run python -m mixprec.bench report"


def test_pictures_show_the_committed_results() -> None:
    """Of README.md: an SVG has the numbers that it was drawn from."""
    found = front.figures(ROOT)
    for name in front.PICTURES.values():
        text = html.unescape((ROOT / name).read_text())
        (shown,) = re.findall(r"<dc:description>(.*?)</dc:description>", text, re.S)
        assert json.loads(shown) == found, f"{name}: run python -m mixprec.bench report --pictures"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_page_and_public_name_has_its_place_on_the_site() -> None:
    index = (DOCS / "index.md").read_text()
    listed = re.findall(r"^(api/\w+)$", (DOCS / "api.md").read_text(), re.M)
    assert {*listed} == {f"api/{path.stem}" for path in (DOCS / "api").glob("*.md")}
    api = "".join((DOCS / f"{page}.md").read_text() for page in listed)
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert pages == {line for line in index.splitlines() if re.fullmatch(r"\w+", line)}
    names = {*re.findall(r":: (\w+)$", api, re.M), *re.findall(r":: mixprec\.(\w+)$", api, re.M)}
    assert {*mixprec.__all__} - names == {"BF16", "E4M3", "E5M2", "FP16"}  # named in a sentence


def saved_by_the_gpt() -> list[str]:
    """The table of docs/memory.md in MB. `python tests/tooling/test_docs_pages.py` prints it."""
    from gpt_model import GPT, GPTConfig

    tokens = torch.zeros(8, 256, dtype=torch.long)
    lines = [f"| | {' | '.join(KINDS)} | all |", "|---" * (len(KINDS) + 2) + "|"]
    for recipe in ("fp32", "bf16", "fp8"):
        for saved in (None, "int8", "int4"):
            model = GPT(GPTConfig(layers=4, width=512, heads=8, context=256))
            if recipe != "fp32":
                mixprec.cast_parameters(mixprec.convert(model, recipe), torch.bfloat16)
            with mixprec.compress_saved(saved or {"": None}, model=model, seed=0):
                optimizer = torch.optim.SGD(model.parameters())
                found = mixprec.memory_report(model, optimizer, (tokens, tokens))
            sizes = [*(found.saved.get(kind, 0) for kind in KINDS), found.saved_total]
            cells = " | ".join(f"{size / 1e6:.1f}" for size in sizes)
            lines.append(f"| {recipe}{f', {saved}' if saved else ''} | {cells} |")
    return lines


def test_the_table_is_what_the_gpt_saves(examples: pytest.MonkeyPatch) -> None:
    page = (DOCS / "memory.md").read_text()
    inside = re.search(r"<!-- saved -->\n(.*?)\n<!-- end -->", page, re.S)
    assert inside is not None
    table = saved_by_the_gpt()
    assert inside[1].splitlines() == table
    total = {line.split(" | ")[0]: float(line.split(" | ")[-1].rstrip(" |")) for line in table[2:]}
    assert total["| bf16, int8"] <= 0.65 * total["| bf16"]
    assert total["| bf16, int4"] <= 0.48 * total["| bf16"]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "examples"))
    print("\n".join(saved_by_the_gpt()))


# The versions that README and pyproject.toml promise are those that make versions tested


sys.path.append(str(ROOT / ".ci"))  # of pythons.py, beside it
VERSIONS = runpy.run_path(str(ROOT / ".ci" / "versions.py"))
ROWS = results.read_json(ROOT / results.CPU / "versions.json")["rows"]


def test_pyproject_promises_what_was_tested() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    # All but those that could not be had where the others were tested.
    had = [row["pair"] for row in ROWS if row.get("reason", "not asked for") == "not asked for"]
    classified = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    assert classified == [pair.split("-")[0] for pair in had]
    python, torch = VERSIONS["PAIRS"][0].split("-")
    assert f'requires-python = ">={python}"' in text
    assert f'dependencies = ["torch>={torch}"]' in text
