"""What one GPU left in its folder of bench/results/, and which of it is of today's sources."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from mixprec.ops._dispatch import library

from . import gpu_stages, results, sources

BACKENDS = ("cuda", "triton")
ENVIRONMENT = "gpu-env.json"
TESTS = {
    "gpu-test-self.json": "self-tests",
    "gpu-test-cuda.json": "CUDA kernels",
    "gpu-test-triton.json": "Triton kernels",
    "gpu-test-large.json": "more than 2^31 elements",
}
# The kernels that run under which tools of compute-sanitizer.
SANITIZERS = {
    "gpu-sanitize.json": ("cuda", ("memcheck", "racecheck", "synccheck", "initcheck")),
    "gpu-sanitize-triton.json": ("triton", ("memcheck",)),
}
TRAINING, VISION = "train-gpt-results.json", "vision.json"
STAND_IN = "a GPU on the CPU"  # of tests/emulated/cuda_on_cpu/device, as torch names it
PASSED, SKIPPED = "passed", "skipped"
# Every file, in the order in which the commands that write them are run.
FILES = {
    **dict.fromkeys((ENVIRONMENT, *TESTS, *SANITIZERS), "make gpu-test"),
    **dict.fromkeys((f"bench-{stage}.json" for stage in gpu_stages.STAGES), "make gpu-bench"),
    TRAINING: "make gpu-train",
    VISION: "make gpu-vision",
}


def fact(content: dict[str, Any], name: str) -> Any:
    """What a file says of the machine it was written on, in its environment or beside it."""
    value = content.get("environment", {}).get(name)
    return content.get(name) if value is None else value


@dataclass
class Folder:
    """The results of one GPU, by file name."""

    path: Path
    files: dict[str, dict[str, Any]]

    @property
    def gpu(self) -> str:
        names = (fact(content, "gpu_name") for content in self.files.values())
        return next((name for name in names if name), self.path.name)

    @property
    def bench(self) -> dict[str, dict[str, Any]]:
        """The files of gpu-bench, by stage."""
        names = {stage: f"bench-{stage}.json" for stage in gpu_stages.STAGES}
        return {stage: self.files[name] for stage, name in names.items() if name in self.files}

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for content in self.bench.values() for row in content["rows"]]


def _load(path: Path) -> dict[str, Any]:
    """ResultError for a file that is damaged, or a rehearsal: its figures mean nothing."""
    if path.name.startswith("bench-"):
        content = results.load(path)
    else:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            dict(content.get("environment", {}))
            if path.name in (TRAINING, VISION):
                list(content["rows"])
            else:
                content["status"]
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise results.ResultError(f"{path}: is damaged ({reason})") from None
    if fact(content, "rehearsal") is not False or fact(content, "gpu_name") == STAND_IN:
        raise results.ResultError(f"{path}: is a rehearsal without a GPU, and no result")
    return content


def load(root: Path) -> list[Folder]:
    """Every GPU's folder in bench/results/. ResultError if a file is damaged or a rehearsal."""
    found = []
    for path in sorted(p for p in (root / "bench" / "results").glob("*") if p.is_dir()):
        files = {name: _load(path / name) for name in FILES if (path / name).exists()}
        if files:
            found.append(Folder(path, files))
    return found


# Sources


@dataclass
class Measured:
    """The rows in which one kernel was timed, of today's sources or of others; why in no other."""

    current: list[str] = field(default_factory=list)
    old: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def measured(rows: list[dict[str, Any]]) -> dict[tuple[str, str], Measured]:
    """By op and backend, for every kernel that there is."""
    found = {
        (op, backend): Measured()
        for op in library.OPS
        for backend in BACKENDS
        if sources.files(op, backend)
    }
    digest = cache(sources.digest)  # many rows are of the same kernels
    for row in rows:
        if row.get("host"):  # about Python's time, not the kernel's
            continue
        for backend, variant in row.get("variants", {}).items():
            ops = tuple(row["ops"])
            for op in ops:
                if (kernel := found.get((op, backend))) is None:
                    continue
                if variant["status"] != "ok":
                    kernel.reasons.append(f"{variant['status']}: {variant['reason']}")
                elif variant["sources"] == digest(ops, backend):
                    kernel.current.append(row["name"])
                else:
                    kernel.old.append(row["name"])
    return found


def changed(content: dict[str, Any]) -> list[str] | None:
    """The ops whose kernels are of other sources than those that a file of results notes, by op;
    None where it notes none."""
    noted = {op: digest for op, digest in (fact(content, "sources") or {}).items() if digest}
    if not noted:
        return None
    kernels = {op: sources.digest((op,), sources.CHOSEN) for op in library.OPS if op in noted}
    return [op for op, digest in kernels.items() if noted[op] != digest]


# Outcomes of tests


def failures(tests: dict[str, str]) -> dict[str, str]:
    """Those that failed, and those that were not run to their end."""
    fine = (PASSED, SKIPPED)
    return {name: words for name, words in tests.items() if not words.startswith(fine)}


def skips(tests: dict[str, str]) -> dict[str, int]:
    """How many tests were skipped, by reason."""
    found: dict[str, int] = {}
    for words in tests.values():
        if words.startswith(SKIPPED):
            reason = words.removeprefix(f"{SKIPPED}: ")
            found[reason] = found.get(reason, 0) + 1
    return found


def counts(tests: dict[str, str]) -> tuple[int, int, int]:
    """Passed, failed, skipped."""
    passed = sum(words == PASSED for words in tests.values())
    failed = len(failures(tests))
    return passed, failed, len(tests) - passed - failed
