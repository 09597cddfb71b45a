"""make gpu-test: the GPU tests in stages, each leaving one JSON file that says what happened.

    python tests/gpu/stages.py [--out FOLDER] [--stages env,self,cuda,…] [--limit SECONDS]
                               [--only EXPRESSION] [--workers N]

Every file holds the machine, the GPU with its driver and clocks, the commit, and pass or fail per
test, nothing typed by hand; it is rewritten every few seconds, so that what is known survives
whatever ends the run. What failed and a table come last. Exit status 1 if anything failed.

    env              what is built and loaded, and what each op uses (python -m mixprec.env)
    self             every op's small self-test, on the CUDA and on the Triton kernels
    cuda             all tests of our CUDA kernels and the vendor's, and of what chooses by itself
    triton           the same tests on the Triton kernels: most of it is their compilation
    large            tensors of more than 2^31 elements, one test at a time
    sanitize         the CUDA kernels' self-tests under each tool of compute-sanitizer
    sanitize-triton  the Triton kernels' self-tests under memcheck
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from process import ROOT
from runs import FILES, QUERY, REHEARSAL, STAGES, Context, default_workers, nvidia_smi
from summary import failures, row, summary

from mixprec._atomic import replace_file
from mixprec.bench import gpu, sources
from mixprec.bench.environment import environment
from mixprec.ops._dispatch import library


def run_stage(name: str, limit: float, args: argparse.Namespace) -> tuple[float, dict[str, Any]]:
    """Seconds, and what the stage found; the file in args.out says the same."""
    start = time.monotonic()
    where = environment(quick=False)
    facts = {"stage": name, "commit": where["commit"], "rehearsal": REHEARSAL}
    facts["gpu"] = nvidia_smi(QUERY)
    kernels = {op: sources.digest((op,), sources.CHOSEN) for op in library.OPS}
    facts["environment"] = where | {"gpu_name": gpu.name(), "sources": kernels}

    def write(result: dict[str, Any], running: bool = True) -> None:
        seconds = round(time.monotonic() - start, 1)
        text = json.dumps({**facts, "running": running, **result, "seconds": seconds}, indent=1)
        replace_file(args.out / FILES[name], lambda path: path.write_text(text + "\n"))

    write({"status": None})
    with tempfile.TemporaryDirectory() as scratch:
        budget, stage = STAGES[name]
        seconds = min(limit, budget * args.patience)
        context = Context(seconds, args.workers, Path(scratch), args.only, args.patience, write)
        try:
            result = stage(context=context)
        except Exception:
            result = {"status": 3, "words": traceback.format_exc()[-4000:]}
    write({**result, "gpu_after": nvidia_smi(QUERY)}, running=False)
    return time.monotonic() - start, result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="default: bench/results/ and the GPU's name")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for all stages")
    parser.add_argument("--only", help="tests whose names fit, as pytest's -k")
    parser.add_argument("--patience", type=float, default=1.0, help="times each stage's own limits")
    parser.add_argument("--workers", type=int, default=default_workers(), help="processes at once")
    args = parser.parse_args()
    stages = args.stages.split(",")
    if unknown := [name for name in stages if name not in STAGES]:
        parser.error(f"stages must be among {', '.join(STAGES)}, got {', '.join(unknown)}")
    found = gpu.name()  # none in a rehearsal
    if args.out is None:
        place = "bench/results/" + gpu.folder_name(found) if found else "build/rehearsal"
        args.out = ROOT / place
    args.out.mkdir(parents=True, exist_ok=True)
    # Ended from outside, it still ends the processes that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    end = time.monotonic() + args.limit
    rows, lines, good = [], [], True
    for name in stages:
        left = end - time.monotonic()
        if name != "env" and not (found or REHEARSAL):
            rows.append(
                f"{name:16} not run: torch finds no GPU (MIXPREC_TEST_DEVICE=cpu rehearses)"
            )
            good = False
            continue
        if left < 10:
            rows.append(f"{name:16} not run: the {args.limit:.0f} s are over")
            good = False
            continue
        seconds, result = run_stage(name, left, args)
        rows.append(row(name, seconds, result))
        lines += failures(name, result)
        good &= result["status"] == 0
        print(rows[-1], flush=True)
    print("\n" + summary(rows, lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
