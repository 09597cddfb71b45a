"""The command line: python -m mixprec.bench and one of the commands that --help lists."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from . import (
    accumulator,
    evidence,
    footprint,
    gpu,
    gpu_plot,
    gpu_stages,
    gpu_timer,
    plot,
    readme,
    report,
    results,
    sources,
    table,
    tune,
    underflow,
    vision,
    vision_models,
    vision_row,
    vision_step,
)
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


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text!r}")
    return int(text)


def _names(valid: Collection[str]) -> Callable[[str], list[str]]:
    """A type for argparse: some of `valid`, separated by commas."""

    def names(text: str) -> list[str]:
        found = list(dict.fromkeys(text.split(",")))
        if unknown := [name for name in found if name not in valid]:
            raise argparse.ArgumentTypeError(
                f"must be among {', '.join(valid)}, got {', '.join(unknown)}"
            )
        return found

    return names


def _vision(parser: argparse.ArgumentParser, *, needs_out: bool = False) -> None:
    models, precisions = vision_models.MODELS, vision_step.PRECISIONS
    parser.add_argument(
        "--out", type=Path, required=needs_out, help="default: vision.json where `gpu` writes"
    )
    parser.add_argument("--models", type=_names(models), default=list(models), metavar="A,B")
    parser.add_argument(
        "--precisions", type=_names(precisions), default=list(vision_step.DEFAULT), metavar="A,B",
        help=f"among {', '.join(precisions)} (default: {','.join(vision_step.DEFAULT)})",
    )  # fmt: skip
    parser.add_argument("--batch", type=_positive, help="images a step (default: the model's own)")
    parser.add_argument("--seconds", type=float, default=vision.SECONDS, help="default %(default)s")


def _sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=int, default=gpu_timer.SAMPLES, help="at most, per row")
    parser.add_argument("--full", action="store_true", help="every shape, not only a selection")


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
    one.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s"
    )
    one = commands.add_parser("gpu", help="measure the GPU in stages, one JSON each")
    one.add_argument("--out", type=Path, help="default: bench/results/ and the GPU's name")
    one.add_argument(
        "--stages", type=_names(gpu_stages.STAGES), default=list(gpu_stages.STAGES), metavar="A,B"
    )
    one.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="for these stages (default: their share of 7 minutes)",
    )
    _sampling(one)
    one = commands.add_parser("gpu-stage", help="one stage, in this process (for `gpu`)")
    one.add_argument("stage", choices=gpu_stages.STAGES)
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--seconds", type=float, required=True)
    one.add_argument("--resume", action="store_true", help="keep the rows that OUT has")
    _sampling(one)
    _vision(commands.add_parser("vision", help="train ResNet-50, EfficientNet-B0 and ViT-L on it"))
    one = commands.add_parser("vision-rows", help="its rows, in this process (for `vision`)")
    _vision(one, needs_out=True)
    one.add_argument("--resume", action="store_true", help="keep the rows that OUT has")
    one = commands.add_parser("compare", help="exit 1 if a row of NEW is slower than in OLD")
    one.add_argument("old", type=Path)
    one.add_argument("new", type=Path)
    one.add_argument("--fail-over", type=_percent, default=0.05, metavar="5%")
    one.add_argument("--any-machine", action="store_true", help="whatever machine they come from")
    one = commands.add_parser("plot", help="draw result against target as a PNG")
    one.add_argument("file", type=Path, nargs="?", default=RESULT, help="or a GPU's folder")
    one.add_argument("--out", type=Path, help="default: the name of FILE, as .png")
    one = commands.add_parser("report", help="write the measured tables into README and docs")
    one.add_argument("--root", type=Path, default=Path(), help="the repository (default: here)")
    one = commands.add_parser("evidence", help="exit 1, saying what a GPU's results lack, if any")
    one.add_argument("--root", type=Path, default=Path(), help="the repository (default: here)")
    commands.add_parser("tune", help="measure gemm's variants on this GPU, write the choice")
    one = commands.add_parser("accumulator", help="model the sums of FP8 tensor cores, for docs/")
    one.add_argument("--docs", type=Path, default=Path("docs"), help="default: %(default)s")
    one = commands.add_parser("footprint", help="the bytes that a step holds in each precision")
    one.add_argument(
        "--out", type=Path, default=Path("bench/results/cpu/footprint.json"), help="%(default)s"
    )
    one = commands.add_parser("underflow", help="fp16 with and without loss scaling, for docs/")
    one.add_argument("--root", type=Path, default=Path(), help="the repository (default: here)")
    one.add_argument("--out", type=Path, help="the picture (default: docs/underflow.png)")
    one = commands.add_parser("readme", help="write the CPU's tables into README.md")
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
    contents = results.load_folder(args.file) if args.file.is_dir() else [results.load(args.file)]
    if any(row["device"] == "cuda" for content in contents for row in content["rows"]):
        written = gpu_plot.save(contents, out)
    else:
        plot.save(contents[0], out)
        written = [out]
    print("written:", *written)
    return 0


def _gpu_folder(command: str) -> Path | None:
    """Where results of this GPU go; None, with a word why, where there is none."""
    if not gpu.REHEARSAL and gpu.name() is None:
        print(f"{command}: this machine has no GPU that torch can use", file=sys.stderr)
        return None
    root = sources.root() or Path()
    of_gpu = root / "bench" / "results" / gpu.folder_name(gpu.name())
    return root / "build" / "rehearsal" if gpu.REHEARSAL else of_gpu


def _gpu(args: argparse.Namespace) -> int:
    default = _gpu_folder("gpu")
    if default is None:
        return 2
    folder = args.out or default
    found = gpu_stages.run_all(
        args.stages, folder, budget=args.budget, samples=args.samples, full=args.full
    )
    status = gpu_stages.show(found)
    print(f"written: {folder}")
    return status


def _gpu_stage(args: argparse.Namespace) -> int:
    return gpu_stages.run_stage(
        args.stage, args.out, seconds=args.seconds, samples=args.samples, full=args.full,
        resume=args.resume,
    )  # fmt: skip


def _vision_all(args: argparse.Namespace) -> int:
    folder = _gpu_folder("vision")
    if folder is None:
        return 2
    path = args.out or folder / "vision.json"
    rows = vision.run_all(
        args.models, args.precisions, path, batch=args.batch, seconds=args.seconds
    )
    status = vision.show(rows)
    print(f"written: {path}")
    return status


def _vision_rows(args: argparse.Namespace) -> int:
    rows = vision_row.plan(args.models, args.precisions, args.batch)
    return vision.run_rows(rows, args.out, seconds=args.seconds, resume=args.resume)


def _report(args: argparse.Namespace) -> int:
    for path in report.write(args.root):
        print(f"{path}: brought up to date")
    return 0


def _evidence(args: argparse.Namespace) -> int:
    return evidence.main(args.root)


def _readme(args: argparse.Namespace) -> int:
    changed = readme.write(args.file, args.folder)
    print(f"{args.file}: {'tables brought up to date' if changed else 'nothing to change'}")
    return 0


def _footprint(args: argparse.Namespace) -> int:
    content = footprint.write(args.out)
    for recipe, sizes in content["training"].items():
        words = (f"{kind} {count / 1e6:.1f} MB" for kind, count in sizes.items())
        print(f"{recipe:12} {', '.join(words)}")
    print(f"written: {args.out}")
    return 0


def _accumulator(args: argparse.Namespace) -> int:
    print(accumulator.write(args.docs))
    return 0


def _underflow(args: argparse.Namespace) -> int:
    content = underflow.write(args.root, args.out)
    print(underflow.block(content))
    return 0


def main(argv: list[str] | None = None) -> int:
    """0: done; 1: a row is wrong, failed or slower; 2: bad arguments or files."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["tune"]:  # with a parser of its own
        return tune.tune(words[1:])
    args = _parser().parse_args(words)
    commands = {
        **{"list": _list, "run": _run, "gpu": _gpu, "gpu-stage": _gpu_stage},
        **{"vision": _vision_all, "vision-rows": _vision_rows},
        **{"compare": _compare, "plot": _plot, "report": _report, "readme": _readme},
        **{"evidence": _evidence},
        **{"accumulator": _accumulator, "footprint": _footprint},
        **{"underflow": _underflow},
    }
    try:
        return commands[args.command](args)
    except (ValueError, results.ResultError) as error:
        print(error, file=sys.stderr)
    except OSError as error:
        print(f"bench: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
