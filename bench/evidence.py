"""Whether bench/results/ shows that the GPU kernels work: python -m mixprec.bench evidence.

It does when one GPU's folder holds tests that all passed, sanitizers that ran and found nothing,
and a result for every kernel of every op, all of them of today's sources, and when README and docs
are generated from it. What is missing is printed, one line each.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from . import gpu_folder, report, results, sources
from .gpu_folder import TRAINING, VISION, Folder

WORDS = 200  # characters of a message


def _sources(name: str, content: dict[str, Any]) -> list[str]:
    changed = gpu_folder.changed(content)
    if changed is None:
        return [f"{name}: does not say which sources it ran"]
    return [f"{name}: out of date, {op} has changed since" for op in changed]


def _ended(content: dict[str, Any]) -> str | None:
    """How a stage of gpu-test, or a tool in it, ended otherwise than well."""
    if content.get("skipped"):
        return str(content["skipped"])
    if content.get("running") or content["status"] is None:
        return "was ended while it ran"
    if content["status"]:
        words = f": {content['words'][:WORDS]}" if content.get("words") else ""
        return f"ended with exit status {content['status']}{words}"
    return None


def _stage(folder: Folder, name: str) -> list[str]:
    """What is wrong with one file of gpu-test, its tests and tools left aside."""
    content = folder.files.get(name)
    if content is None:
        return [f"{name}: is not there ({gpu_folder.FILES[name]})"]
    ended = _ended(content)
    return ([f"{name}: {ended}"] if ended else []) + _sources(name, content)


def _outcomes(name: str, tests: dict[str, str]) -> list[str]:
    failed = gpu_folder.failures(tests)
    found = [f"{name}: {test}: {words[:WORDS]}" for test, words in failed.items()]
    return found if any(gpu_folder.counts(tests)[:2]) else [f"{name}: no test has passed"]


def _tests(folder: Folder) -> list[str]:
    found = _stage(folder, gpu_folder.ENVIRONMENT)
    for name in gpu_folder.TESTS:
        found += _stage(folder, name)
        if name in folder.files:
            found += _outcomes(name, folder.files[name].get("tests") or {})
    return found


def _sanitizers(folder: Folder) -> list[str]:
    found = []
    for name, (backend, tools) in gpu_folder.SANITIZERS.items():
        found += _stage(folder, name)
        content = folder.files.get(name)
        if content is None or content.get("skipped"):
            continue
        for tool in tools:
            result = content.get("tools", {}).get(tool)
            words = f"{name}: {tool}"
            if result is None:
                found.append(f"{words}: has not run")
                continue
            if result.get("errors") is None:
                found.append(f"{words}: came to no count of errors")
            elif result["errors"]:
                found.append(f"{words}: is not clean, {result['errors']} errors")
            found += _outcomes(words, result["tests"])
            found += [f"{words}: has not run {op}" for op in _not_run(result["tests"], backend)]
    return found


def _not_run(tests: dict[str, str], backend: str) -> list[str]:
    """The ops with a kernel on `backend` that no test has run: their names are in the tests'."""
    passed = [set(re.findall(r"\w+", t)) for t, w in tests.items() if w == gpu_folder.PASSED]
    ops = (op for op, of in gpu_folder.measured([]) if of == backend)
    return [op for op in ops if not any({op, backend} <= words for words in passed)]


def _kernels(folder: Folder) -> list[str]:
    files = [name for name in gpu_folder.FILES if name.startswith("bench-")]
    found = [
        f"{name}: is not there ({gpu_folder.FILES[name]})"
        for name in files
        if name not in folder.files
    ]
    if len(found) == len(files):
        return found
    for (op, backend), rows in gpu_folder.measured(folder.rows).items():
        if rows.current:
            continue
        words = f"{op} on {backend}: "
        if rows.old:
            words += f"out of date, its sources have changed since {rows.old[0]} was measured"
        else:
            words += "no result" + (f" ({rows.reasons[0][:WORDS]})" if rows.reasons else "")
        found.append(words)
    return found


def _values(folder: Folder) -> list[str]:
    """Rows, and variants in them, whose values were wrong or that failed."""
    found = []
    for row in folder.rows:
        states = {"": row, **row.get("variants", {})}
        for backend, state in states.items():
            if state["status"] in ("wrong", "failed"):
                words = f"{row['name']}{' on ' if backend else ''}{backend}"
                found.append(f"{words}: {state['status']} ({state['reason'][:WORDS]})")
    return found


def problems(folder: Folder) -> list[str]:
    """What one GPU's folder lacks, one sentence each; empty if it is the evidence."""
    return [*_tests(folder), *_sanitizers(folder), *_kernels(folder), *_values(folder)]


def remarks(folder: Folder) -> list[str]:
    """What is not needed for the evidence, but good to have: training and vision models."""
    found = []
    for name in (TRAINING, VISION):
        if name not in folder.files:
            found.append(f"{name}: is not there ({gpu_folder.FILES[name]})")
        else:
            found += _sources(name, folder.files[name])
    training, vision = (folder.files.get(name, {}) for name in (TRAINING, VISION))
    said = gpu_folder.fact(training, "problems") or []
    found += [f"{TRAINING}: {words}" for words in said]
    for row in vision.get("rows", ()):
        if row["status"] != "ok":
            what = f"{row['model']} in {row['precision']}"
            found.append(f"{VISION}: {what}: {row['status']} ({row['reason'][:WORDS]})")
    return found


def missing(root: Path) -> list[str]:
    """What the evidence lacks, of the GPU that lacks the least; empty if it is complete."""
    if sources.root() is None:
        return ["mixprec's own sources are not at hand: run this in a clone"]
    try:
        folders = gpu_folder.load(root)
        pages = report.out_of_date(root)
    except results.ResultError as error:
        return [str(error)]
    if not folders:
        commands = ", ".join(dict.fromkeys(gpu_folder.FILES.values()))
        return [f"bench/results/ holds no result of a GPU; on one, run {commands}"]
    name, least = min(((f.gpu, problems(f)) for f in folders), key=lambda pair: len(pair[1]))
    stale = [f"{page}: run python -m mixprec.bench report" for page in pages]
    return [f"{name}: {words}" for words in least] + stale


def main(root: Path) -> int:
    """Print what is missing; 0 if nothing is, else 1."""
    lines = missing(root)
    for line in lines:
        print(f"missing: {line}")
    if lines:
        return 1
    for folder in gpu_folder.load(root):
        print(f"{folder.gpu}: {'incomplete' if problems(folder) else 'complete'}")
        for line in remarks(folder):
            print(f"  not needed: {line}")
    return 0
