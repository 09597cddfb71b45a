"""`python -m mixprec audit MODULE:FUNCTION`: audit of one forward and backward pass."""

from __future__ import annotations

import argparse
import sys

from ...nn.convert import convert
from ..batches import made
from .report import Audit, audit

_EPILOG = (
    "MODULE is imported as Python does, first from the current directory. FUNCTION returns (model, "
    "batch), or (model, batch, loss): the arguments of mixprec.audit."
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mixprec audit", epilog=_EPILOG)
    parser.add_argument("make", metavar="MODULE:FUNCTION")
    parser.add_argument("--recipe", help="convert the model with it first, as to fp8")
    parser.add_argument(
        "--require",
        metavar="PRECISION=SHARE",
        type=_requirement,
        action="append",
        default=[],
        help="exit with 1 if a smaller share of the FLOPs has this precision, as in fp8=0.9",
    )
    parser.add_argument(
        "--sqnr", action="store_true", help="compute each op in FP32 too, and show what it loses"
    )
    parser.add_argument(
        "--what-if",
        metavar="RECIPE",
        action="append",
        default=[],
        help="what layers would lose with this recipe, as with --sqnr",
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 if there is a finding")
    parser.add_argument("--html", metavar="PATH", help="write a page to look at")
    parser.add_argument("--json", metavar="PATH", help="write all that was found")
    given = parser.parse_args(arguments)
    try:
        model, *rest = made(given.make)
    except ValueError as error:
        parser.error(str(error))
    if given.recipe:
        convert(model, given.recipe)
    loss = rest[1] if len(rest) > 1 else None
    report = audit(model, rest[0], loss=loss, sqnr=given.sqnr, what_if=given.what_if)
    print(report)
    if given.html:
        report.save_html(given.html)
    if given.json:
        report.save(given.json)
    missed = [line for name, share in given.require for line in _missed(report, name, share)]
    for line in missed:
        print(line, file=sys.stderr)
    return 1 if missed or (given.strict and report.findings) else 0


def _requirement(text: str) -> tuple[str, float]:
    name, _, share = text.partition("=")
    if not name or not 0 <= float(share) <= 1:  # argparse reports a ValueError
        raise ValueError(text)
    return name, float(share)


def _missed(report: Audit, name: str, share: float) -> list[str]:
    total = sum(report.flops.values())
    has = report.flops.get(name, 0) / total if total else 0.0
    return [] if has >= share else [f"required: {name} {share:.1%} of the FLOPs, got {has:.1%}"]
