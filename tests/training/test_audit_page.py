"""The page of an audit: that it needs no network, and what a browser makes of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import mixprec

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
COLUMNS = ["where", "phase", "op", "precision", "set by", "FLOP"]
# Attributes whose values a browser loads.
LOADED = {"src", "srcset", "href", "xlink:href", "data", "poster", "action", "background"}
ASKS = ("@import", "url(", "fetch(", "XMLHttpRequest", "WebSocket", "EventSource", "import(")
ERRORS = """<script>
const failed = (text) => { document.documentElement.dataset.failed = text; };
addEventListener("error", (event) => failed(event.message));
addEventListener("unhandledrejection", (event) => failed(String(event.reason)));
console.error = (...values) => failed(values.join(" "));
</script>"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Of a model with two precisions, and with code outside of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 32), nn.Linear(32, 8))
    mixprec.convert(model, "bf16", overrides={"3": None})
    x = torch.randn(8, 16)
    with mixprec.audit(model) as audit:
        model(x).square().mean().backward()
        (x @ x.t()).sum()
    audit.save_html(tmp_path / "page.html")
    return tmp_path / "page.html"


class Document(HTMLParser):
    """tags: each with its attributes; rows: the cells of the rows of the table of products that are
    not hidden."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self._in_ops = self._in_cell = self._is_hidden = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag == "table":
            self._in_ops = found.get("id") == "ops"
        elif tag == "tr" and self._in_ops:
            self._is_hidden = "hidden" in found
            if not self._is_hidden:
                self.rows.append([])
        self._in_cell = tag == "td" and self._in_ops and not self._is_hidden
        if self._in_cell:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = self._in_cell and tag != "td"

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[-1][-1] += data

    @property
    def shown(self) -> list[list[str]]:
        return [row for row in self.rows if row]  # without the head


def test_it_needs_no_network(page: Path) -> None:
    text = page.read_text()
    document = Document(text)
    loaded = [
        value for _, found in document.tags for name, value in found.items() if name in LOADED
    ]
    assert loaded == []
    assert not {"link", "iframe", "img", "object", "embed"} & {tag for tag, _ in document.tags}
    assert not [word for word in ASKS if word in text]
    assert re.findall(r"https?://\S+", text) == []


def browse(page: Path, *flags: str) -> str:
    """Open the page in a browser without a window; returns what it prints."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    profile = f"--user-data-dir={page.parent / 'profile'}"
    ran = subprocess.run(
        [
            *(found, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--enable-logging=stderr", profile, *flags, page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert not re.search(r"CONSOLE.*(Uncaught|Error|Refused)", ran.stderr), ran.stderr
    return ran.stdout


def after(page: Path, script: str) -> list[list[str]]:
    """The rows that are shown after a script has run at the end of the page."""
    text = page.read_text().replace("<head>", "<head>" + ERRORS, 1)
    changed = page.with_name("changed.html")
    changed.write_text(text.replace("</body>", f"<script>{script}</script></body>"))
    shown = browse(changed, "--dump-dom")
    assert "data-failed" not in shown.partition("<head>")[0], shown[:300]
    return Document(shown).shown


def click(column: str, times: int = 1) -> str:
    return f'document.querySelectorAll("#ops th button")[{COLUMNS.index(column)}].click();' * times


def enter(words: str) -> str:
    field = 'document.getElementById("filter")'
    return f'{field}.value = "{words}"; {field}.dispatchEvent(new Event("input"));'


@pytest.mark.slow
def test_a_browser_sorts_and_filters(page: Path) -> None:
    rows = Document(page.read_text()).shown
    assert len(rows) >= 8
    assert after(page, "") == rows
    column = COLUMNS.index("where")
    by_name = [row[column] for row in after(page, click("where"))]
    assert by_name == sorted(by_name, key=str.lower)
    assert sorted(by_name) == sorted(row[column] for row in rows)
    unit = {"": 1, "k": 1e3, "M": 1e6}
    most, least = (
        [
            float(number) * unit[prefix]
            for number, _, prefix in (row[5].partition(" ") for row in after(page, script))
        ]
        for script in (click("FLOP"), click("FLOP", 2))
    )
    assert most == sorted(most, reverse=True) != least == sorted(least)
    some = after(page, enter("BF16 forward"))
    assert some == [row for row in rows if "bf16" in row[3] and row[1] == "forward"] != []
    assert after(page, enter("BF16 forward") + enter("")) == rows
    assert after(page, enter("no such words")) == []
    both = after(page, enter("backward") + click("FLOP"))
    assert {row[1] for row in both} == {"backward"}
