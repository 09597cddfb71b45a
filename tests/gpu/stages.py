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
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from pool import ROOT
from runs import DRY_RUN, FILES, STAGES, Context, default_workers
from summary import failures, line, summary

from mixprec.bench.environment import environment
from mixprec.bench.gpu import device
from mixprec.bench.results import write_json


def run_stage(name: str, limit: float, args: argparse.Namespace) -> tuple[float, dict[str, Any]]:
    """Seconds, and what the stage found; the file in args.out says the same."""
    start = time.monotonic()
    where = environment(quick=False)
    about = {
        "stage": name,
        "commit": where["commit"],
        "dry_run": DRY_RUN,
        "gpu_before": device.snapshot(),
        "environment": where | {"gpu_name": device.name()},
    }

    def write(result: dict[str, Any], running: bool = True) -> None:
        seconds = round(time.monotonic() - start, 1)
        path = args.out / FILES[name]
        write_json(path, {**about, "running": running, **result, "seconds": seconds})

    write({"status": None})
    with tempfile.TemporaryDirectory() as scratch:
        budget, stage = STAGES[name]
        seconds = min(limit, budget * args.timeout_factor)
        context = Context(
            seconds, args.workers, Path(scratch), args.only, args.timeout_factor, write
        )
        try:
            result = stage(context=context)
        except Exception:
            result = {"status": 3, "message": traceback.format_exc()[-4000:]}
    write({**result, "gpu_after": device.snapshot()}, running=False)
    return time.monotonic() - start, result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="default: bench/results/ and the GPU's name")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for all stages")
    parser.add_argument("--only", help="tests whose names fit, as pytest's -k")
    parser.add_argument(
        "--timeout-factor", type=float, default=1.0, help="times each stage's own limits"
    )
    parser.add_argument("--workers", type=int, default=default_workers(), help="processes at once")
    args = parser.parse_args()
    stages = args.stages.split(",")
    if unknown := [name for name in stages if name not in STAGES]:
        parser.error(f"stages must be among {', '.join(STAGES)}, got {', '.join(unknown)}")
    found = device.name()  # none in a dry run
    if args.out is None:
        args.out = ROOT / "build/dry-run" if found is None else device.results_folder(ROOT)
    args.out.mkdir(parents=True, exist_ok=True)
    # Ended from outside, it still ends the processes that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    end = time.monotonic() + args.limit
    table, failed, good = [], [], True
    for name in stages:
        left = end - time.monotonic()
        if name != "env" and not (found or DRY_RUN):
            table.append(
                f"{name:16} not run: torch finds no GPU (MIXPREC_TEST_DEVICE=cpu: a dry run)"
            )
            good = False
            continue
        if left < 10:
            table.append(f"{name:16} not run: the {args.limit:.0f} s are over")
            good = False
            continue
        seconds, result = run_stage(name, left, args)
        table.append(line(name, seconds, result))
        failed += failures(name, result)
        good &= result["status"] == 0
        print(table[-1], flush=True)
    print("\n" + summary(table, failed))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
