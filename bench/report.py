"""The measured tables of README.md and of docs/, generated from bench/results/.

Whatever page holds the marker of a block gets it, up to <!-- end -->: those of OF_BENCH, OF_A_FILE
and OF_THE_REST, the latter with what they are of: "peak gpt", "build pack.cu".
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mixprec.diagnostics.memory_report import MemoryReport
from mixprec.formats import BLOCK, FORMATS

from . import device, front, pages, results, table
from .cases import gpt, models
from .cases.registry import best_baseline, quantity
from .studies import (
    accuracy,
    four_bits,
    peak,
    predicted_step,
    same_bits,
    several_ranks,
    step_counts,
)
from .studies import models as families

Block = Callable[[dict[str, Any]], str]  # the content of a result file -> the block
NOTHING = "Nothing has been measured on a GPU yet."
_BUILD_HEADER = ("kernel", "instances", "registers", "shared memory", "spilled")


def bench(content: dict[str, Any]) -> str:
    """The table of a run on the CPU, where it ran, and what became of the targets."""
    rows = content["rows"]
    shown = table.markdown(*table.full(table.HEADER, [one for r in rows for one in table.lines(r)]))
    remarks = "".join(f"- {line}\n" for line in table.remarks(rows))
    where = pages.machine(content["environment"])
    return f"{shown}\n\n{remarks and remarks + chr(10)}{table.summary(rows)}. {where}"


def _ways(content: dict[str, Any], columns: dict[str, str]) -> str:
    """The time of each way to train, and how many times as fast as torch's best it is. columns:
    titles by the start of the cases' names; "" without such cases."""
    ways: dict[str, dict[str, str]] = {}
    rivals: set[str] = set()
    for row in content["rows"]:
        case, _, way = row["name"].rpartition("/")
        if row["status"] == "ok" and case in columns:
            best = best_baseline(row["median"])
            assert best is not None
            rivals.add(best)
            ours, torchs = row["median"]["ours"], row["median"][best]
            cell = f"{quantity(1e3 * ours, 'ms')} ({quantity(torchs / ours, 'x')})"
            ways.setdefault(way, {})[case] = cell
    if not ways:
        return ""
    found = [case for case in columns if any(case in cells for cells in ways.values())]
    body = [(way, *(cells.get(case, "") for case in found)) for way, cells in ways.items()]
    shown = table.markdown(("step", *(columns[case] for case in found)), body)
    where = pages.machine(content["environment"])
    return f"{shown}\n\nCompared with {', '.join(sorted(rivals))}. {where}"


def training_steps(content: dict[str, Any]) -> str:
    """Of the GPT of examples/."""
    return _ways(content, {f"training/gpt/{size}": f"GPT {size}" for size in gpt.SIZES})


def model_steps(root: Path) -> str:
    """Of other people's models, with each torch that they were measured with."""
    contents = results.load_all_processors(root)
    contents += [results.load(p) for p in sorted((root / results.CPU).glob("models-*.json"))]
    columns = {f"training/{name}": name for name in models.MODELS}
    return "\n\n".join(filter(None, (_ways(content, columns) for content in contents)))


def lean(content: dict[str, Any]) -> str:
    """What a step keeps in each way to train, by examples/gpt_memory.py."""
    # The peak is that of a pass without a step: studies.peak has that of training.
    reports = [MemoryReport(**{**one, "peak": None}) for one in content["reports"]]
    header, *lines = reports[0].cells(*reports[1:])
    whole = reports[0].total
    shares = [f"{one.total / whole:.2f}" for one in reports]
    shown = table.markdown(tuple(header), [*map(tuple, lines), ("share of the total", *shares)])
    return f"{content['what']}:\n\n{shown}\n\n{pages.machine(content['environment'])}"


def demo(root: Path) -> str:
    """The demo's own table, cell by cell, and the differences that several seeds show."""
    content = results.read_json(root / results.CPU / "demo.json")
    seeds = results.read_json(root / results.CPU / "accuracy-gpt.json")
    header, *body = content["table"]
    unigram = content["environment"]["unigram_bits_per_byte"]
    return (
        f"{table.markdown(tuple(header), [tuple(line) for line in body])}\n\n"
        f"{'. '.join([*content.get('notes', ()), ''])}Counting bytes alone (the unigram entropy) "
        f"takes {unigram:.2f} bits per byte. {pages.machine(content['environment'])}\n\n"
        f"{accuracy.sentence(seeds, [line[0] for line in body])}"
    )


def stats(root: Path, of: str) -> str:
    """A table that examples/gpt_stats.py printed: "monitor"."""
    content = results.read_json(root / results.CPU / "stats.json")
    where = pages.machine(content["environment"])
    return f"```\n{content[of]}\n```\n\nOf {content['what'][of]}. {where}"


def outcome(row: dict[str, Any]) -> str:
    """What became of make test with one pair of Python and torch."""
    if row["status"] == "not run":
        return f"not run: {row['reason']}"
    counts = [f"{row[kind]:,} {kind}" for kind in ("failed", "passed", "skipped") if row[kind]]
    return ", ".join(counts) or "did not start"


def versions(content: dict[str, Any]) -> str:
    """A line per pair of Python and torch, by .ci/versions.py, and the processors."""
    rows = content["rows"]
    body = []
    for row in rows:
        asked = row["pair"].split("-")
        names = (row.get("python", asked[0]), row.get("torch", asked[1]))
        took = f"{row['seconds']} s" if row.get("seconds") else ""
        day = row.get("date", "")[:10]
        body.append((*names, outcome(row), took, day, row.get("commit") or ""))
    processors = sorted({row["processor"] for row in rows if "processor" in row})
    header = ("Python", "torch", "`make test`", "time", "date", "commit")
    return f"{table.markdown(header, body)}\n\n{'; '.join(processors) or 'Nothing ran'}."


def gpu_results(root: Path) -> dict[str, list[dict[str, Any]]]:
    """The result files of make gpu-bench, by GPU. ResultError for a dry run: it has no figures."""
    found: dict[str, list[dict[str, Any]]] = {}
    paths = (root / results.RESULTS).glob("*/bench-*.json")
    for path in sorted(p for p in paths if p.parent != root / results.CPU):
        content = results.load(path)
        where = content["environment"]
        if where.get("dry_run") is not False or where["gpu_name"] == device.FAKE_NAME:
            raise results.ResultError(f"{path}: is a dry run without a GPU, and no result")
        found.setdefault(where["gpu_name"], []).append(content)
    return found


def gpu(root: Path) -> str:
    parts = []
    for name, contents in gpu_results(root).items():
        # A case of gpu-first may be measured again, for longer.
        rows = list({row["name"]: row for content in contents for row in content["rows"]}.values())
        peak = device.peak(name)
        # A line per product would be hundreds: their families stand for them.
        body = [one for r in rows if not r.get("flops") for one in table.lines(r, peak)]
        parts.append(f"{name}:\n\n{table.markdown(*table.full(table.HEADER, body))}")
        if products := table.families(rows):
            parts.append(table.markdown(table.FAMILY_HEADER, products))
        where = contents[0]["environment"]
        commit = f", commit {where['commit']}" if where["commit"] else ""
        parts.append(f"{table.summary(rows)}. torch {where['torch']}{commit}.")
    return "\n\n".join(parts) or NOTHING


def steps(root: Path) -> str:
    """The training steps that bench.studies.profile_step has measured, by GPU."""
    parts = []
    header = ("step", "time", "tokens/s", "MFU", "host, forward", "host, backward", "memory")
    for path in sorted((root / results.RESULTS).glob("*/profile-*.json")):
        content = results.read_json(path)
        where, size = content["environment"], content["size"]
        if where["dry_run"]:
            raise results.ResultError(f"{path}: is a dry run without a GPU, and no result")
        body = []
        for row in content["rows"]:
            if row["status"] != "ok":
                body.append((row["way"], row["reason"], *[""] * 5))
                continue
            queued = row["host"]["seconds"]
            times = [statistics.median(row["step"])]
            times += [statistics.median(queued[p]) for p in ("forward", "backward") if p in queued]
            step, *hosts = (quantity(1e3 * seconds, "ms") for seconds in times)
            speed, memory = f"{row['tokens_per_second']:,.0f}", f"{row['peak_bytes'] / 1e9:.1f} GB"
            mfu = f"{row['mfu']:.0%}" if row["mfu"] else ""
            body.append((row["way"], step, speed, mfu, *(hosts or ("", "")), memory))
        title = f"{where['gpu_name']}, {size['layers']} blocks of width {size['width']}, "
        title += f"{size['batch']} x {size['context']} tokens, commit {where['commit']}"
        parts.append(f"{title}:\n\n{table.markdown(header, body)}")
    return "\n\n".join(parts) or "No step has been profiled on a GPU yet."


def _span(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def build(root: Path, source: str) -> str:
    """What the compiler made of the kernels of one file, over all GPU generations."""
    report = results.read_json(root / results.RESULTS / "cuda_build.json")
    body: list[tuple[str, ...]] = []
    for kernel in report["kernels"]:
        if kernel["source"] == source:
            shared, spilled = f"{kernel['shared']} B", f"{kernel['spilled']} B"
            numbers = (str(kernel["instances"]), _span(*kernel["registers"]))
            body.append((kernel["name"], *numbers, shared, spilled))
    if not body:
        raise results.ResultError(f"report: cuda_build.json has no kernel of {source}")
    return table.markdown(_BUILD_HEADER, body)


def memory(root: Path) -> str:
    files = (root / results.CPU / f"peak-{model}.json" for model in peak.NAMES)
    return peak.summary(map(results.read_json, files))


def format_tables(root: Path) -> str:
    """For docs/explorer.html: of each format, [first code, log2 of the first number, log2 of the
    distance] of every run of equally spaced positive numbers, and the largest code of a number."""
    tables = {}
    for f in (*FORMATS, *BLOCK):
        mantissa, least, top = (int(math.log2(x)) for x in (1 / f.eps, f.smallest_normal, f.max))
        runs: list[list[int | None]] = [[0, None, least - mantissa]]
        for i, exponent in enumerate(range(least, top + 1), 1):
            runs.append([i << mantissa, exponent, exponent - mantissa])
        last = (len(runs) - 1 << mantissa) + int((f.max / 2.0**top - 1) / f.eps)
        nan = None if f in BLOCK else (1 << f.bits - 1) - 1
        tables[f.name] = {
            **{"bits": f.bits, "mantissa": mantissa, "last": last, "saturates": f.saturates},
            **{"inf": last + 1 if f.has_inf else None, "nan": nan, "runs": runs},
        }
    return f'<script id="tables" type="application/json">{json.dumps(tables)}</script>'


def counts(root: Path) -> str:
    """Of a step on the fake device."""
    return step_counts.block(results.read_json(root / results.RESULTS / "step_counts.json"))


def ranks(root: Path) -> str:
    """What training on several ranks was compared with."""
    path = root / several_ranks.OUT
    return several_ranks.block(results.read_json(path)) if path.exists() else "Nothing was run yet."


# Of the results of make bench on each processor; of a file of the block's own name, "peak gpt" of
# peak-gpt.json; of others.
OF_BENCH: dict[str, Block] = {
    "bench": bench,
    "training steps": training_steps,
}
OF_A_FILE: dict[str, Block] = {
    "host": bench,
    "lean": lean,
    "versions": versions,
    "model-table": families.block,
    "same-bits": same_bits.block,
    "peak": peak.block,
    "accuracy": accuracy.block,
}
OF_THE_REST: dict[str, Callable[..., str]] = {
    "model steps": model_steps,
    "demo": demo,
    "gpu": gpu,
    "gpu steps": steps,
    "gpu predicted": predicted_step.table_of,
    "memory": memory,
    "headline": front.headline,
    "processors": front.processors,
    "build": build,
    "step counts": counts,
    "format tables": format_tables,
    "several ranks": ranks,
    "stats": stats,
    "four-bits": four_bits.block,
}


def block(root: Path, name: str) -> str | None:
    """What stands in the block of this name; None for a block of another program."""
    if name in OF_BENCH:
        return "\n\n".join(map(OF_BENCH[name], results.load_all_processors(root)))
    if name in OF_THE_REST:
        return OF_THE_REST[name](root)
    kind, *of = name.split(" ", 1)
    if kind in OF_A_FILE:
        file = root / results.CPU / f"{name.replace(' ', '-')}.json"
        return OF_A_FILE[kind](results.read_json(file))
    return OF_THE_REST[kind](root, *of) if of and kind in OF_THE_REST else None


def render(root: Path) -> dict[Path, str]:
    """README.md and the pages of docs/ as bench/results/ has them today."""
    found = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    found += (root / "docs").glob("explorer.html")
    return {page: pages.fill(page.read_text(), partial(block, root)) for page in found}


def write(root: Path) -> list[Path]:
    """Bring the pages up to date; which of them that changed."""
    changed = []
    for path, text in render(root).items():
        if text != path.read_text():
            path.write_text(text)
            changed.append(path)
    return changed
