"""The command line: python -m mixprec.bench list | run | compare | plot | readme."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from . import plot, readme, results, table
from .environment import environment
from .rows import select
from .run import run_rows
from .timer import MIN_SAMPLES

RESULT = Path("mixprec-bench.json")
BUSY = 0.5  # other programs per core; threads that wait for each other then measure the wait


def _percent(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a percentage such as 5%, got {text!r}")
    return float(match[1]) / 100


def _samples(text: str) -> int:
    if not text.isdigit() or int(text) < MIN_SAMPLES:
        raise argparse.ArgumentTypeError(f"must be {MIN_SAMPLES} or more, got {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mixprec.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("list", help="the rows: name, what it measures, target")
    one.add_argument("op", nargs="*")
    one = commands.add_parser("run", help="check the values, measure, print a table, write JSON")
    one.add_argument("op", nargs="*", help="an op, the start of a row's name, or a name; none: all")
    one.add_argument("--out", type=Path, default=RESULT, help="the JSON (default: %(default)s)")
    one.add_argument("--quick", action="store_true", help="fewer rows, shorter samples")
    one.add_argument("--samples", type=_samples, default=MIN_SAMPLES, help="default %(default)s")
    one.add_argument("--device", choices=("cpu", "cuda"), help="only the rows of this device")
    one = commands.add_parser("compare", help="exit 1 if a row of NEW is slower than in OLD")
    one.add_argument("old", type=Path)
    one.add_argument("new", type=Path)
    one.add_argument("--fail-over", type=_percent, default=0.05, metavar="5%")
    one.add_argument("--any-machine", action="store_true", help="whatever machine they come from")
    one = commands.add_parser("plot", help="draw result against target as a PNG")
    one.add_argument("file", type=Path, nargs="?", default=RESULT)
    one.add_argument("--out", type=Path, help="default: the name of FILE, as .png")
    one = commands.add_parser("readme", help="write the measured tables into README.md")
    one.add_argument("file", type=Path, help="the README.md with the markers")
    one.add_argument("folder", type=Path, help="where demo.json and bench.json are")
    return parser


def _list(args: argparse.Namespace) -> int:
    for row in select(args.op):
        quick = " (quick)" if row.quick else ""
        print(f"{row.name:28} {row.device:5} {row.target!s:18} {row.what}{quick}")
    return 0


def _run(args: argparse.Namespace) -> int:
    chosen = select(args.op, device=args.device, quick=args.quick)
    if not chosen:
        raise ValueError("bench: no row fits the options given")
    total = len(chosen)
    done = 0

    def progress(name: str) -> None:
        nonlocal done
        done += 1
        print(f"[{done}/{total}] {name}", file=sys.stderr, flush=True)

    where = environment(quick=args.quick)
    min_time = 0.002 if args.quick else 0.02
    measured = run_rows(chosen, samples=args.samples, min_time=min_time, progress=progress)
    results.save(args.out, where, measured)
    print(f"written: {args.out}")
    if where["load"] is not None and where["load"] > BUSY * where["cores"]:
        print(
            f"the machine was busy (load {where['load']} on {where['cores']} cores): measure again"
        )
    table.show(measured)
    return 1 if any(row["status"] in ("wrong", "failed") for row in measured) else 0


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
    if slower:
        limit = f"{100 * args.fail_over:g} %"
        print(
            f"{len(slower)} of {len(changes)} rows slower by more than {limit}: "
            + ", ".join(slower)
        )
        return 1
    print(f"none of {len(changes)} rows slower by more than {100 * args.fail_over:g} %")
    return 0


def _plot(args: argparse.Namespace) -> int:
    out = args.out if args.out is not None else args.file.with_suffix(".png")
    plot.save(results.load(args.file), out)
    print(f"written: {out}")
    return 0


def _readme(args: argparse.Namespace) -> int:
    changed = readme.write(args.file, args.folder)
    print(f"{args.file}: {'tables brought up to date' if changed else 'nothing to change'}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """0: done; 1: a row is wrong, failed or slower; 2: bad arguments or files."""
    args = _parser().parse_args(argv)
    commands = {"list": _list, "run": _run, "compare": _compare, "plot": _plot, "readme": _readme}
    try:
        return commands[args.command](args)
    except (ValueError, results.ResultError) as error:
        print(error, file=sys.stderr)
    except OSError as error:
        print(f"bench: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
