"""python -m mixprec.bench.head: the time, the peak and the errors of the loss of a head.

Writes --out and prints its table: each way takes turns with the others, and times are minima; the
peak is the resident set of a fresh process above what it had before the pass; errors are those of
the gradients, of the norm of the exact ones.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import pages, results
from .cases.head import WAYS, Head, make_head
from .environment import environment
from .table import full, markdown


def _times(head: Head, rounds: int) -> dict[str, float]:
    best = dict.fromkeys(WAYS, float("inf"))
    for _ in range(rounds):
        for name, way in WAYS.items():
            start = time.perf_counter()
            way(head)
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def _status(field: str) -> int:
    """Of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def _print_peak(name: str) -> None:
    head = make_head()
    WAYS[name](Head(head.x[:1], head.weight[:1], head.target[:1] * 0))  # code that loads late
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    WAYS[name](head)
    print(_status("VmHWM") - before)


def _peak(name: str) -> int:
    command = [sys.executable, "-m", "mixprec.bench.head", "--peak", name]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _errors(head: Head) -> dict[str, list[float]]:
    x, weight, target = make_head(torch.float64)
    loss = torch.nn.functional.cross_entropy(x @ weight.t(), target)
    exact = torch.autograd.grad(loss, (x, weight))
    return {
        name: [
            float((got.double() - want).norm() / want.norm())
            for got, want in zip(way(head)[1:], exact, strict=True)
        ]
        for name, way in WAYS.items()
    }


def block(content: dict[str, Any]) -> str:
    """The table of docs/memory.md."""
    body = []
    for name, row in content["rows"].items():
        cells = (f"{row['seconds']:.2f} s", f"{row['peak'] / 1e6:.0f} MB")
        body.append((name, *cells, *(f"{error:.1e}" for error in row["errors"])))
    header = ("", "time", "peak", "error of dx", "of dweight")
    return (
        f"{markdown(*full(header, body))}\n\n"
        f"`{content['command']}`. {pages.machine(content['environment'])}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m mixprec.bench.head", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help="the JSON to write")
    parser.add_argument("--peak", choices=[*WAYS], help="print that of one way, in bytes")
    given = parser.parse_args(arguments)
    if given.peak:
        _print_peak(given.peak)
        return
    head = make_head()
    times, errors = _times(head, given.rounds), _errors(head)
    rows = {
        name: {"seconds": times[name], "peak": _peak(name), "errors": errors[name]} for name in WAYS
    }
    content = {
        "command": f"python -m mixprec.bench.head --rounds {given.rounds}",
        "environment": environment(quick=False),
        "rows": rows,
    }
    if given.out:
        results.write_json(given.out, content)
    print(block(content))


if __name__ == "__main__":
    main()
