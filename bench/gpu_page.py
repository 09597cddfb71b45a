"""docs/gpu.md: what ran on each GPU, which kernels have results, training and vision models."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable
from typing import Any

from . import gpu_folder, gpu_plot, gpu_table, readme
from .gpu_folder import TRAINING, VISION, Folder, fact
from .gpu_models import bullets, cell, gigabytes, training, vision

NOTHING = "Nothing: not yet run on a GPU."
OUT_OF_DATE = "**out of date**"
PICTURE = "bench"  # bench-roofline.png and bench-ratio.png, beside the results
LOSSES = "train-gpt-loss.png"
MISSED = 6  # as many names


# The machine


def _span(values: Iterable[float], unit: str) -> str:
    numbers = list(values)
    if not numbers:
        return "not noted"
    low, high = min(numbers), max(numbers)
    return f"{low:.0f} {unit}" if low == high else f"{low:.0f} to {high:.0f} {unit}"


def _noted(folder: Folder, key: str) -> list[float]:
    """Every value that was noted while something ran."""
    watches = [row.get("watched") for row in folder.rows]
    if VISION in folder.files:
        watches += [row.get("watched") for row in folder.files[VISION]["rows"]]
    if TRAINING in folder.files:
        watches += (fact(folder.files[TRAINING], "watched") or {}).values()
    return [value for watch in watches if watch for value in watch.get(key, ())]


def _snapshot(folder: Folder) -> dict[str, str]:
    """What nvidia-smi said of the GPU, of whichever file has it."""
    for content in folder.files.values():
        if found := fact(content, "gpu_before"):
            return dict(found)
    for content in folder.files.values():
        if isinstance(content.get("gpu"), str) and content["gpu"].count("\n") == 1:
            names, values = csv.reader(content["gpu"].splitlines(), skipinitialspace=True)
            return {name.split(" ")[0]: value for name, value in zip(names, values, strict=False)}
    return {}


def _commit(words: object) -> str:
    found = re.fullmatch(r"([0-9a-f]{7,12})[0-9a-f]*(\+?)", str(words))
    return f"{found[1]}{found[2]}" if found else "unknown"


def _state(changed: list[str] | None) -> str:
    if changed is None:
        return "unknown"
    return f"{OUT_OF_DATE}: {', '.join(changed)}" if changed else "today's"


def _bench_state(content: dict[str, Any]) -> str:
    kernels = gpu_folder.measured(content["rows"])
    return _state(sorted({op for (op, _), rows in kernels.items() if rows.old}))


def machine(folder: Folder) -> str:
    before = _snapshot(folder)
    sizes = (fact(content, "gpu_memory") for content in folder.files.values())
    memory = next((size for size in sizes if size), None)
    words = [
        f"driver {before.get('driver_version', 'unknown')}",
        f"memory {gigabytes(memory)}",
        f"SM clock {_span(_noted(folder, 'clocks.sm'), 'MHz')}"
        f" (at most {before.get('clocks.max.sm', 'unknown').removesuffix(' MHz')} MHz)",
        f"power {_span(_noted(folder, 'power.draw'), 'W')}",
        f"temperature {_span(_noted(folder, 'temperature.gpu'), '°C')}",
    ]
    lines: list[tuple[str, ...]] = []
    for name, command in gpu_folder.FILES.items():
        content = folder.files.get(name)
        if content is None:
            lines.append((f"`{name}`", f"missing: `{command}`", "", "", ""))
            continue
        stage = name.startswith("bench-")
        state = _bench_state(content) if stage else _state(gpu_folder.changed(content))
        when, torch = (str(fact(content, key) or "unknown")[:16] for key in ("date", "torch"))
        lines.append((f"`{name}`", when, torch, _commit(fact(content, "commit")), state))
    table = readme.markdown(("file", "date (UTC)", "torch", "commit", "sources"), lines)
    return f"{', '.join(words)}.\n\n{table}"


# Tests and sanitizers


def _count(numbers: tuple[int, int, int]) -> str:
    passed, failed, skipped = numbers
    return f"{passed} passed, {failed} failed, {skipped} skipped"


def _verdict(content: dict[str, Any]) -> str:
    """How a stage or a tool ended."""
    if content.get("running") or content["status"] is None:
        return "**ended while it ran**"
    return "ok" if not content["status"] else f"**exit status {content['status']}**"


def tests(folder: Folder) -> str:
    lines: list[tuple[str, ...]] = []
    failed: list[str] = []
    skipped: dict[str, int] = {}
    for name, words in gpu_folder.TESTS.items():
        content = folder.files.get(name)
        if content is None:
            lines.append((words, f"not run: `{gpu_folder.FILES[name]}`", "", ""))
            continue
        every = content.get("tests") or {}
        failed += [f"`{test}`: {said}" for test, said in gpu_folder.failures(every).items()]
        for said, count in gpu_folder.skips(every).items():
            skipped[said] = skipped.get(said, 0) + count
        counts, time = _count(gpu_folder.counts(every)), f"{content['seconds']:.0f} s"
        lines.append((words, _verdict(content), counts, time))
    table = readme.markdown(("tests", "ended", "", "time"), lines)
    said = bullets(failed + [f"{count} skipped: {words}" for words, count in skipped.items()])
    return f"{table}\n{said}".rstrip()


def sanitizers(folder: Folder) -> str:
    lines: list[tuple[str, ...]] = []
    for name, (backend, tools) in gpu_folder.SANITIZERS.items():
        content = folder.files.get(name)
        if content is None or content.get("skipped"):
            reason = f" ({content['skipped']})" if content is not None else ""
            lines.append((backend, "", f"not run: `{gpu_folder.FILES[name]}`{reason}", "", ""))
            continue
        for tool in tools:
            result = content.get("tools", {}).get(tool)
            if result is None:
                lines.append((backend, tool, "**has not run**", "", ""))
                continue
            counts, errors = gpu_folder.counts(result["tests"]), result.get("errors")
            found = "**no count**" if errors is None else f"**{errors}**" if errors else "0"
            lines.append((backend, tool, _verdict(result), found, _count(counts)))
    return readme.markdown(("kernels", "tool", "ended", "errors found", "tests"), lines)


# Kernels


def kernels(folder: Folder) -> str:
    """Per op and backend: in how many rows it was timed, and whether from today's sources."""
    measured = gpu_folder.measured(folder.rows)
    lines: list[tuple[str, ...]] = []
    for op in dict.fromkeys(op for op, _ in measured):
        cells = []
        for backend in gpu_folder.BACKENDS:
            rows = measured.get((op, backend))
            if rows is None:
                cells.append("no kernel")
            elif rows.current or rows.old:
                count = len(rows.current or rows.old)
                state = "" if rows.current else f", {OUT_OF_DATE}"
                cells.append(f"{count} row{'' if count == 1 else 's'}{state}")
            else:
                reason = f": {cell(rows.reasons[0])[:80]}" if rows.reasons else ""
                cells.append(f"**no result**{reason}")
        lines.append((f"`{op}`", *cells))
    return readme.markdown(("op", *gpu_folder.BACKENDS), lines)


def stages(folder: Folder) -> str:
    """The targets by stage of gpu-bench; every figure is in kernels.md."""
    lines: list[tuple[str, ...]] = []
    for stage, content in folder.bench.items():
        rows = content["rows"]
        judged = [r for r in rows if r["target"] is not None and r["status"] == "ok"]
        missed = [r["name"].removeprefix("cuda/") for r in judged if not r["met"]]
        more = f" and {len(missed) - MISSED} more" if len(missed) > MISSED else ""
        words = ", ".join(missed[:MISSED]) + more
        lines.append((stage, str(len(rows)), gpu_table.summary(rows), words))
    if not lines:
        return "Not run: `make gpu-bench`."
    table = readme.markdown(("stage", "rows", "targets", "missed"), lines)
    remarks = gpu_table.remarks(folder.rows)
    return f"{table}\n{bullets(remarks)}" if remarks else table


# The page


def _pictures(folder: Folder) -> str:
    names = {f"{PICTURE}-roofline.png": "Roofline", f"{PICTURE}-ratio.png": "Ratios to rivals"}
    at = f"../bench/results/{folder.path.name}"
    return "\n".join(f"![{words}, {folder.gpu}]({at}/{name})" for name, words in names.items())


def _bench(folder: Folder) -> str:
    drawn = gpu_plot.drawable([*folder.bench.values()])
    return f"{stages(folder)}\n\n{_pictures(folder)}" if drawn else stages(folder)


def _training(folder: Folder) -> str:
    if not (folder.path / LOSSES).exists():
        return training(folder)
    link = f"../bench/results/{folder.path.name}/{LOSSES}"
    return f"{training(folder)}\n\n![Training loss by precision, {folder.gpu}]({link})"


BLOCKS: dict[str, Callable[[Folder], str]] = {
    "machine": machine,
    "tests": tests,
    "sanitizers": sanitizers,
    "kernels": kernels,
    "bench": _bench,
    "training": _training,
    "vision": vision,
}


def state(folders: list[Folder]) -> str:
    """README: on which GPUs anything has run."""
    if not folders:
        return "**Nothing here has been measured or run on a GPU.**"
    names = ", ".join(dict.fromkeys(folder.gpu for folder in folders))
    return f"Nothing has been run on other GPUs than {names}; [docs/gpu.md](docs/gpu.md) says what."


def render(text: str, folders: list[Folder]) -> str:
    """The page with what stands between its markers as the results of every GPU have it."""
    for name, block in BLOCKS.items():
        parts = [f"{folder.gpu}:\n\n{block(folder)}" for folder in folders]
        text = readme.fill(text, name, "\n\n".join(parts) or NOTHING)
    return text
