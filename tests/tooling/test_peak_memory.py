"""The peaks of processes in docs/memory.md and docs/choose.md, and their program."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import mixprec
from mixprec.bench import results
from mixprec.bench.studies import peak, peak_step

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = {
    model: results.read_json(ROOT / results.CPU / f"peak-{model}.json") for model in peak.NAMES
}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KB on Linux alone")


def test_the_peak_is_that_of_the_process() -> None:
    """200 MB that it writes and frees show, and memory of its parent does not."""
    program = (
        f"import runpy; n = runpy.run_path({peak_step.__file__!r})['most_resident']; before = n();"
        "b = bytearray(b'1') * 200_000_000; del b; print(n() - before)"
    )
    output = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert int(output) == pytest.approx(200e6, rel=0.1)  # pages of its own come and go


def test_a_way_that_cannot_run_says_why() -> None:
    row: dict[str, object] = {}
    peak.add(row, "no such way", {"model": "gpt", "steps": 1, "layers": 1, "context": 32})
    assert row == {"refused": "KeyError: 'no such way'"}


def test_the_program(tmp_path: Path) -> None:
    ways = ("FP32", "checkpointing, lean balanced")
    sizes = (
        "--layers=2",
        "--width=64",
        "--context=32",
        "--batch=1",
        "--steps=2",
        "--repeats=1",
        "--caching-allocator",
    )
    out = tmp_path / "peak.json"
    assert peak.main(["--out", str(out), *sizes, "--ways", *ways]) == 0
    content = results.read_json(out)
    assert tuple(content["rows"]) == ways
    for way, row in content["rows"].items():
        assert row["losses"][1] < row["losses"][0], way
        assert 0.9 * row["baselines"][0] < row["peaks"][0] < row["baselines"][0] + 100e6, way
    assert peak.block(content).count("\n| ") == 3 + 1


# The committed results


@pytest.mark.parametrize("model", peak.NAMES)
def test_what_the_page_says_of_the_peaks(model: str) -> None:
    rows = COMMITTED[model]["rows"]
    found = {way: one["peak"] for way, one in peak.measured(COMMITTED[model]).items()}
    checkpointing = found["checkpointing"]
    if model == "gpt":
        assert checkpointing < found["lean balanced"]
    else:
        assert found["lean balanced"] < checkpointing
    assert rows["checkpointing"]["losses"] == pytest.approx(rows["FP32"]["losses"], rel=1e-6)
    with_logits = {way: peak for way, peak in found.items() if "fuse_loss" not in way}
    both = {way for way in with_logits if way.startswith("checkpointing, lean")}
    assert set(sorted(with_logits, key=with_logits.__getitem__)[: len(both)]) == both
    assert checkpointing < min(found[f"{name} `AdamW8bit`"] for name in ("torchao", "bitsandbytes"))


def test_what_the_page_says_of_the_allocator() -> None:
    """The cache lowers the peak of every way, and of lean below that of checkpointing."""
    before = peak.measured(COMMITTED["gpt"])
    found = peak.measured(results.read_json(ROOT / results.CPU / "peak-gpt-cached.json"))
    for way, one in found.items():
        assert one["peak"] < before[way]["peak"], way
    assert found["lean balanced"]["peak"] < found["checkpointing"]["peak"]


def test_a_third_is_of_what_a_step_keeps() -> None:
    reports = results.read_json(ROOT / results.CPU / "lean.json")["reports"]
    kept = {one["label"]: mixprec.MemoryReport(**one).total for one in reports}
    assert kept["balanced"] / kept["fp32"] == pytest.approx(1 / 3, abs=0.05)


def test_the_sentence_of_the_page() -> None:
    """The same ways of each model, in the same order."""
    text = peak.summary(COMMITTED[model] for model in peak.NAMES)
    _, *lists = re.split(r"parameters\): ", text)
    for model, listed in zip(peak.NAMES, lists, strict=True):
        found = peak.measured(COMMITTED[model])
        want = [f"{found[way]['peak'] / 1e6:,.0f}" for way in peak.CHOSEN]
        assert re.findall(r"\b\d[\d,]*\d\b", listed)[:5] == want
