"""The most memory that a training process takes, and the time of a step, for each way to train.

    python examples/peak_memory.py --model gpt --out bench/results/cpu/peak-gpt.json
    python examples/peak_memory.py --model phi3 --out bench/results/cpu/peak-phi3.json

Each way of memory_ways.py runs in fresh interpreters, one after the other, and its peak is the
maximum resident set size that `/usr/bin/time -v` would show, imports included. Linux. With
--caching-allocator each process calls mixprec.memory.use_caching_allocator first, FP32's too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

# Not torch: a child starts as a copy of its parent's pages, and its peak is at least as high.
STEP = Path(__file__).resolve().with_name("peak_step.py")
NAMES = {"gpt": "GPT of examples/", "phi3": "Phi-3 of transformers"}
SIZES = {"layers": 4, "width": 512, "context": 256, "batch": 8}
VOCABULARY = {"gpt": 256, "phi3": 12000}
WAYS = "import json, memory_ways; print(json.dumps(list(memory_ways.WAYS['{}'])))"
ENVIRONMENT = (
    "import json; from mixprec.bench.environment import environment;"
    "print(json.dumps(environment(quick=False)))"
)


def peak_of(command: list[str]) -> tuple[int, str]:
    """Run a command in a process of its own: the most bytes that it had resident, its output."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        output = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    return usage.ru_maxrss * 1024, output


def add(row: dict[str, Any], way: str, settings: dict[str, Any]) -> None:
    """One more process of this way."""
    peak, output = peak_of([sys.executable, str(STEP), way, json.dumps(settings)])
    found = json.loads(output.splitlines()[-1])
    if "refused" in found:
        row["refused"] = found["refused"]
        return
    row["parameters"], row["losses"] = found["parameters"], found["losses"]
    row.setdefault("peaks", []).append(peak)
    row.setdefault("baselines", []).append(found["baseline"])
    # Where something is compiled, the first step does it.
    seconds = found["seconds"]
    row.setdefault("seconds", []).append(statistics.median(seconds[1:] or seconds))


def printed(program: str) -> Any:
    """The JSON that a program prints, which may import torch."""
    command = [sys.executable, "-c", program]
    return json.loads(subprocess.check_output(command, cwd=STEP.parent))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=NAMES, default="gpt", help="phi3 needs transformers")
    parser.add_argument("--out", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--ways", nargs="*", help="these instead of all")
    parser.add_argument("--steps", type=int, default=6, help="of each process (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="processes a way (%(default)s)")
    parser.add_argument("--caching-allocator", action="store_true", help="in every process")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size, help="(%(default)s)")
    options = parser.parse_args(argv)
    settings = {
        name: getattr(options, name) for name in ("model", "steps", "caching_allocator", *SIZES)
    }
    settings["vocabulary"] = VOCABULARY[options.model]
    ways = options.ways or printed(WAYS.format(options.model))
    rows: dict[str, dict[str, Any]] = {way: {} for way in ways}
    content = {
        "what": f"{NAMES[options.model]}, {options.layers} blocks of width {options.width}, "
        f"{options.batch * options.context:,} tokens a step"
        f"{', caching allocator' if options.caching_allocator else ''}",
        "command": f"python examples/peak_memory.py --model {options.model}"
        f"{' --caching-allocator' if options.caching_allocator else ''}",
        "environment": printed(ENVIRONMENT),
        "settings": settings,
        "rows": rows,
    }
    for _ in range(options.repeats):  # the ways in turn, so that their times compare
        for way, row in rows.items():
            add(row, way, settings)
            what = row.get("refused") or f"{row['peaks'][-1] / 1e6:,.0f} MB"
            print(f"{way}: {what}", flush=True)
            options.out.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
