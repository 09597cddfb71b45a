"""`python -m mixprec plan MODULE:FUNCTION`: the format of every product of a model."""

from __future__ import annotations

import argparse

from ..batches import made
from .assignment import QUANTITIES
from .planning import plan

_EPILOG = (
    "MODULE is imported as Python does, first from the current directory. FUNCTION returns (model, "
    "batches), or (model, batches, loss): the arguments of mixprec.plan."
)
_HELP = {
    "loss": "by how much it may grow",
    "time": "of products and casts, as a part of that in bf16",
    "memory": "kept for backward, as a part of that in bf16",
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mixprec plan", epilog=_EPILOG)
    parser.add_argument("make", metavar="MODULE:FUNCTION")
    for name in QUANTITIES:
        parser.add_argument(f"--{name}", type=float, metavar="LIMIT", help=_HELP[name])
    parser.add_argument("--hardware", help="such as h200: its rates, and the formats that it has")
    parser.add_argument("--formats", nargs="+", metavar="RECIPE", help="to choose from")
    parser.add_argument("--steps", type=int, default=1000, help="of the training that is planned")
    parser.add_argument("--json", metavar="PATH", help="write the plan, for Plan.load")
    given = parser.parse_args(arguments)
    budget = {name: v for name in QUANTITIES if (v := getattr(given, name)) is not None}
    more = {"formats": given.formats} if given.formats else {}
    try:
        model, batches, *loss = made(given.make)
        found = plan(
            model, batches, budget=budget, loss=loss[0] if loss else None, steps=given.steps,
            hardware=given.hardware, **more,
        )  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    print(found)
    if given.json:
        found.save(given.json)
    return 0
