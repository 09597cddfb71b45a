"""The command line: python -m mixprec.bench and one of the commands that --help lists."""

from __future__ import annotations

import argparse
import gc
import math
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import device, front, report, results, table, tune
from .cases import select
from .cases.registry import Case
from .environment import environment
from .timing import timer
from .timing.run import DeviceLost, clock, heading, measure
from .timing.timer import Budget

ROOT = Path(__file__).resolve().parents[1]  # of a clone
RESULT = Path("mixprec-bench.json")
RUNNING = "the program died or hung while it ran"
BUSY = 0.5  # other programs per core; threads that wait for each other then measure the wait
QUICK_SECONDS, CPU_SECONDS = 0.002, 0.02  # that a sample lasts at least


def _percent(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a percentage such as 5%, got {text!r}")
    return float(match[1]) / 100


def _samples(text: str) -> int:
    if not text.isdigit() or int(text) < timer.MIN_SAMPLES:
        raise argparse.ArgumentTypeError(f"must be {timer.MIN_SAMPLES} or more, got {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mixprec.bench", description=__doc__)
    commands = parser.add_subparsers(required=True)

    def command(run: Callable[[argparse.Namespace], int], name: str, help: str) -> Any:
        one = commands.add_parser(name, help=help)
        one.set_defaults(run=run)
        return one.add_argument

    add = command(_list, "list", "the cases: name, what it measures, target")
    add("op", nargs="*")
    add = command(_run, "run", "check the values, measure, print a table, write JSON")
    add("op", nargs="*", help="an op, the start of a case's name, or a name; none: all")
    add("--out", type=Path, default=RESULT, help="the JSON (default: %(default)s)")
    add("--quick", action="store_true", help="fewer cases, shorter samples")
    add("--samples", type=_samples, default=timer.MIN_SAMPLES, help="at least %(default)s")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    add("--budget", type=float, default=math.inf, help="seconds, shared among the cases (GPU only)")
    add = command(_compare, "compare", "exit 1 if a case of NEW is slower than in OLD")
    add("old", type=Path)
    add("new", type=Path)
    add("--fail-over", type=_percent, default=0.05, metavar="5%")
    add("--any-machine", action="store_true", help="whatever machine they come from")
    add = command(tune.tune, "tune", "measure gemm's variants on this GPU, write the choice")
    add("--out", type=Path, help="default: where mixprec looks for it")
    add("--seconds", type=float, default=2.0, help="per shape (%(default)s)")
    add = command(_report, "report", "write the measured tables into README and docs")
    add("--root", type=Path, default=Path(), help="the repository (default: here)")
    add("--pictures", action="store_true", help="and draw README's, which needs matplotlib")
    return parser


def _list(args: argparse.Namespace) -> int:
    for case in select(args.op):
        quick = " (quick)" if case.quick else ""
        print(f"{case.name:28} {case.device:5} {case.target!s:18} {case.what}{quick}")
    return 0


def _run(args: argparse.Namespace) -> int:
    chosen = select(args.op, device=args.device, quick=args.quick)
    if not chosen:
        raise ValueError("bench: no case fits the options given")
    where = environment(quick=args.quick)
    if args.device == "cuda":
        rows = _measure_on_gpu(chosen, args, where | device.properties())
    else:
        seconds = QUICK_SECONDS if args.quick else CPU_SECONDS
        rows = []
        for i, case in enumerate(chosen):
            print(f"[{i + 1}/{len(chosen)}] {case.name}", file=sys.stderr, flush=True)
            rows.append(measure(case, Budget(args.samples, math.inf, seconds)))
        results.save(args.out, where, rows)
    print(f"written: {args.out}")
    if args.device == "cpu" and not args.op and not args.quick:
        print(_place(where))
    if where["load"] is not None and where["load"] > BUSY * where["cores"]:
        print(
            f"the machine was busy (load {where['load']} on {where['cores']} cores): measure again"
        )
    # Of the products on a GPU only those that miss; the families below stand for the others.
    shown = [row for row in rows if args.device == "cpu" or not row.get("flops") or not row["met"]]
    table.show(shown, device.peak(device.name()) if args.device == "cuda" else None)
    if args.device == "cuda" and (groups := table.families(rows)):
        print("", *table.plain(table.FAMILY_HEADER, groups), sep="\n")
    print(table.summary(rows))
    return 1 if table.bad(rows) else 0


def _place(where: dict[str, Any], root: Path = ROOT) -> str:
    """Which committed file the results of a whole run on this processor are for."""
    path = results.processor_file(where)
    text = f"the results of this processor in the repository: {path}"
    try:
        old = results.load(root / path)["environment"]
    except results.ResultError:
        return f"{text} (there is none yet)"
    return f"{text} (of {old['date'][:10]}, commit {old['commit']})"


def _measure_on_gpu(
    cases: list[Case], args: argparse.Namespace, where: dict[str, Any]
) -> list[dict[str, Any]]:
    """Their results, also written after each one: a kernel that hangs or crashes ends this process.
    The last row then says so, and the cases after it are missing."""
    rows: list[dict[str, Any]] = []
    end = time.monotonic() + args.budget
    if device.name() is not None:
        a = device.randn(8192, 8192).bfloat16()  # which heats the GPU as a training run does
        timer.settle(lambda: a @ a, clock(True))
    for i, case in enumerate(cases):
        running = heading(case) | {"status": "failed", "reason": RUNNING}
        results.save(args.out, where, [*rows, running])
        gc.collect()
        device.release()
        start = time.monotonic()
        share = max(0.0, end - start) / (len(cases) - i)
        try:
            row = measure(case, Budget(args.samples, share))
        except DeviceLost as error:
            rows.append(running | {"reason": str(error)})
            break
        took = time.monotonic() - start
        rows.append(row | {"took": took})
        print(f"[{i + 1}/{len(cases)}] {case.name} {took:.1f} s", file=sys.stderr, flush=True)
    results.save(args.out, where, rows)
    return rows


def _compare(args: argparse.Namespace) -> int:
    old, new = results.load(args.old), results.load(args.new)
    changes = results.compare(old, new, any_machine=args.any_machine)
    slower = []
    for change in changes:
        bad = change.broken is not None or change.ratio > 1 + args.fail_over
        if bad:
            slower.append(change.name)
        verdict = change.broken or f"{100 * (change.ratio - 1):+.1f} % time"
        against = f", relative to {change.against}" if change.against else ""
        print(f"{'SLOWER' if bad else 'ok':6}  {change.name:28} {verdict}{against}")
    limit = f"more than {100 * args.fail_over:g} %"
    if slower:
        print(f"{len(slower)} of {len(changes)} cases slower by {limit}: {', '.join(slower)}")
        return 1
    print(f"none of {len(changes)} cases slower by {limit}")
    return 0


def _report(args: argparse.Namespace) -> int:
    drawn = front.draw(args.root) if args.pictures else []
    for path in [*drawn, *report.write(args.root)]:
        print(f"{path}: brought up to date")
    return 0


def main(argv: list[str] | None = None) -> int:
    """0: done; 1: a case is wrong, failed or slower; 2: bad arguments or files."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
        return status
    except (ValueError, results.ResultError) as error:
        print(error, file=sys.stderr)
    except OSError as error:
        print(f"bench: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
