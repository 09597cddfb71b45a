"""What an audit costs: the time of a step, and the peak of the process.

    python examples/audit_cost.py --out bench/results/cpu/audit-cost.json

A GPT of 4 layers of width 512, 4 sequences of 256 tokens, forward and backward. Each case runs in a
process of its own, alternating with the others; the peak is the maximum resident set size.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from gpt_model import GPT, GPTConfig

import mixprec
from mixprec.bench.environment import environment

WAYS = ("fp32", "torch.autocast", "bf16", "fp8")
CASES = ("plain", "audit", "sqnr")
STEPS = 5


def measure(way: str, case: str) -> dict[str, Any]:
    """The seconds of each step but the first, and the peak in bytes."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=4, width=512, heads=8, context=256))
    if way in ("bf16", "fp8"):
        mixprec.convert(model, way)
    tokens, region = torch.randint(0, 256, (4, 256)), nullcontext
    if way == "torch.autocast":
        region = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    seconds = []
    for _ in range(STEPS + 1):
        start = time.perf_counter()
        with nullcontext() if case == "plain" else mixprec.audit(model, sqnr=case == "sqnr"):
            with region():
                loss = model(tokens, tokens)
            loss.backward()
        seconds.append(time.perf_counter() - start)
        model.zero_grad()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds[1:], "peak": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("WAY", "CASE"))
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(*given.one)))
        return
    rows: dict[str, Any] = {way: {case: [] for case in CASES} for way in WAYS}
    for _ in range(3):
        for way in WAYS:
            for case in CASES:
                command = [sys.executable, __file__, "--one", way, case]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                rows[way][case].append(json.loads(done.stdout.splitlines()[-1]))
    for way, cases in rows.items():
        for case, runs in cases.items():
            seconds = statistics.median(s for run in runs for s in run["seconds"])
            peak = statistics.median(run["peak"] for run in runs)
            print(f"{way:15} {case:6} {seconds * 1e3:7.0f} ms {peak / 1e6:7.0f} MB")
    if given.out:
        report = {"rows": rows, "environment": environment(quick=False)}
        given.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
