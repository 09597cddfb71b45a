"""make gpu-test: the GPU tests in stages, each leaving one JSON file that says what happened.

    python tests/gpu/stages.py [--out FOLDER] [--stages env,test,sanitize] [--limit SECONDS]

Every file holds the machine, the GPU with its driver and clocks, the commit, and pass or fail per
test, nothing typed by hand. A table comes last. Exit status 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

from mixprec.bench import gpu

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
QUERY = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw"


def gpu_facts() -> str | None:
    """What nvidia-smi says of the GPU right now."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def run(command: list[str], limit: float, **environment: str) -> tuple[int, str, float]:
    """Exit status (124: out of time), output and seconds."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=limit,
            env={**os.environ, **environment},
        )
        status, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode(errors="replace") if late.stdout else ""
        status, output = 124, output + f"\nstopped after {limit:.0f} s"
    return status, output, time.monotonic() - start


def pytest_command(report: Path, *words: str) -> list[str]:
    options = ["-q", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    return [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *words]


def outcomes(report: Path) -> dict[str, str]:
    """passed, or what was wrong in one line, per test."""
    if not report.exists():
        return {}
    results = {}
    for case in xml.parse(report).iter("testcase"):
        words = "passed"
        for kind in ("failure", "error", "skipped"):
            if (found := case.find(kind)) is not None:
                words = f"{kind}: {(found.get('message') or '').splitlines()[0][:300]}"
        results[f"{case.get('classname')}::{case.get('name')}"] = words
    return results


def stage_env(limit: float, scratch: Path) -> dict[str, Any]:
    status, output, _ = run([sys.executable, "-m", "mixprec.env", "--json"], limit)
    report = json.loads(output[output.index("{") :]) if status in (0, 1) else output[-4000:]
    return {"status": status, "report": report}


def stage_test(limit: float, scratch: Path) -> dict[str, Any]:
    report = scratch / "test.xml"
    status, output, _ = run(pytest_command(report, str(HERE)), limit)
    return {"status": status, "tests": outcomes(report), "tail": output[-6000:]}


def stage_sanitize(limit: float, scratch: Path) -> dict[str, Any]:
    """Every op's self-test under each tool of compute-sanitizer, without torch's memory pool."""
    if shutil.which("compute-sanitizer") is None:
        return {"status": 0, "skipped": "compute-sanitizer is not installed"}
    results: dict[str, Any] = {}
    for i, tool in enumerate(TOOLS):
        report = scratch / f"{tool}.xml"
        words = [str(HERE / "test_values.py"), "-k", "test_self_test", "-p", "no:cacheprovider"]
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
        status, output, seconds = run(
            [*command, *pytest_command(report, *words)],
            limit / (len(TOOLS) - i),
            PYTORCH_NO_CUDA_MEMORY_CACHING="1",
        )
        limit -= seconds
        results[tool] = {"status": status, "seconds": seconds, "tests": outcomes(report)}
        if status:
            results[tool]["tail"] = output[-6000:]
    return {"status": max(r["status"] for r in results.values()), "tools": results}


STAGES = {"env": stage_env, "test": stage_test, "sanitize": stage_sanitize}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="default: bench/results/ and the GPU's name")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for all stages")
    args = parser.parse_args()
    stages = args.stages.split(",")
    if unknown := [name for name in stages if name not in STAGES]:
        parser.error(f"stages must be among {', '.join(STAGES)}, got {', '.join(unknown)}")
    if args.out is None:
        name = gpu.name()  # none in a rehearsal
        args.out = ROOT / ("bench/results/" + gpu.folder_name(name) if name else "build/rehearsal")
    args.out.mkdir(parents=True, exist_ok=True)
    commit = run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], 10)[1].strip()
    lines, failed, left = [], False, args.limit
    for name in stages:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            result = STAGES[name](left, Path(scratch))
        seconds = time.monotonic() - start
        left = max(30.0, left - seconds)
        facts = {"stage": name, "commit": commit, "seconds": seconds, "gpu": gpu_facts()}
        (args.out / f"gpu-{name}.json").write_text(json.dumps({**facts, **result}, indent=1) + "\n")
        failed |= result["status"] != 0
        tests = list(result.get("tests", {}).values())
        passed = sum(words == "passed" for words in tests)
        bad = sum(words.startswith(("failure", "error")) for words in tests)
        counts = f"{passed} passed, {bad} failed, {len(tests) - passed - bad} skipped"
        verdict = "ok" if result["status"] == 0 else f"FAILED (exit status {result['status']})"
        words = counts if tests else result.get("skipped", "")
        lines.append(f"{name:10} {seconds:7.1f} s  {verdict:28} {words}")
        for test, outcome in result.get("tests", {}).items():
            if outcome.startswith(("failure", "error")):
                print(f"{test}: {outcome}")
    print("\n".join(lines))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
