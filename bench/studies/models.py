"""How much of a model convert reaches, and what training loses: a row for each family.

    python -m mixprec.bench.studies.models --out bench/results/cpu/model-table.json

Share of the FLOPs of a forward and backward pass that run by the recipe, as mixprec.audit counts
them, attention counted apart; what is left; and the loss after 20 steps of AdamW from the same
start, in each precision, for three seeds. make integrations-table runs this, and mixprec.bench
report writes docs/models.md.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import mixprec

from .. import pages, results
from ..environment import environment
from ..table import markdown
from .families import MAKERS, loss_of, make

WAYS = ("torch.autocast", "bf16", "fp8", "fp16")
STEPS, SEEDS = 20, (0, 1, 2)
PRODUCTS = ("product", "convolution", "rnn")
MOST, NEAR, REFERENCE = 0.95, 0.02, 0.01  # what the summary counts


def shares(name: str) -> dict[str, Any]:
    """FLOPs of products with weights by who decided their format, and of products of activations,
    as attention has; those left by module."""
    model, batch = make(name, 0)
    modules = dict(model.named_modules())
    kinds = {path: type(module).__name__ for path, module in modules.items()}
    own = {
        path for path, m in modules.items() if any(p.dim() > 1 for p in m.parameters(recurse=False))
    }
    mixprec.convert(model, "bf16")
    audit = mixprec.audit(model, batch, loss=lambda output: loss_of(output, batch))
    found: Counter[str] = Counter()
    left: Counter[str] = Counter()
    for op in audit.ops:
        if op.kind == "attention" or (op.module is not None and op.module not in own):
            found["attention"] += op.flops
        elif op.kind in PRODUCTS:
            by_recipe = op.decided.startswith("recipe")
            found["converted" if by_recipe else "left"] += op.flops
            if not by_recipe and op.flops:
                kind = kinds.get(op.module or "", "the model")
                left[f"{kind}: {op.op}"] += op.flops
    return {"flops": dict(found), "left": dict(left.most_common())}


def loss_after(name: str, way: str, seed: int) -> float:
    """After STEPS steps on one batch, without those that the scaler skips, if few are skipped."""
    model, batch = make(name, seed)
    if way in ("bf16", "fp8", "fp16"):
        mixprec.convert(model, way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = mixprec.GradScaler(enabled=way == "fp16")

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "torch.autocast"):
            return loss_of(model(**batch), batch)

    torch.manual_seed(seed)
    taken = 0
    for _ in range(3 * STEPS):
        scale = scaler.get_scale()
        scaler.scale(forward()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        taken += scaler.get_scale() >= scale
        if taken == STEPS:
            break
    return float(forward().detach())


def row(name: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="(torch|transformers|diffusers|mixprec).*")
    losses = {way: [loss_after(name, way, seed) for seed in SEEDS] for way in ("fp32", *WAYS)}
    parameters = sum(p.numel() for p in make(name, 0)[0].parameters())
    return {"name": name, "parameters": parameters, **shares(name), "losses": losses}


# The table


def share(row: dict[str, Any]) -> float:
    """Of the FLOPs of products with weights, those that run by the recipe."""
    converted, left = (row["flops"].get(name, 0) for name in ("converted", "left"))
    return float(converted / (converted + left))


def loss(row: dict[str, Any], way: str) -> float:
    """The median over seeds of how far the loss is from that of FP32, relative to it."""
    pairs = zip(row["losses"][way], row["losses"]["fp32"], strict=True)
    return statistics.median(abs(own - fp32) / abs(fp32) for own, fp32 in pairs)


def block(content: dict[str, Any]) -> str:
    rows = content["rows"]
    body = [_line(row) for row in sorted(rows, key=lambda row: (-share(row), row["name"]))]
    reached = sum(share(row) >= MOST for row in rows)
    judged = [row for row in rows if loss(row, "torch.autocast") <= REFERENCE]
    near = sum(loss(row, "fp8") <= NEAR for row in judged)
    header = ("model", "converted", "activations", "left", "fp32", "autocast", *WAYS[1:])
    return (
        f"At least {MOST:.0%} of the FLOPs are converted in {reached} of {len(rows)} models. "
        f"Where torch.autocast is within {REFERENCE:.0%} of FP32's loss, in {len(judged)} models, "
        f"fp8 is within {NEAR:.0%} in {near}. {pages.machine(content['environment'])}\n\n"
        f"{markdown(header, body)}"
    )


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    flops = row["flops"]
    products = flops.get("converted", 0) + flops.get("left", 0)
    left = ", ".join(f"{name} {count / products:.1%}" for name, count in row["left"].items())
    attention = flops.get("attention", 0) / (products + flops.get("attention", 0))
    losses = (f"{loss(row, way):.2%}" for way in WAYS)
    fp32 = statistics.median(row["losses"]["fp32"])
    return row["name"], f"{share(row):.1%}", f"{attention:.0%}", left or "-", f"{fp32:.3f}", *losses


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=list(MAKERS), metavar="MODEL")
    given = parser.parse_args()
    rows = []
    with ProcessPoolExecutor(given.workers, get_context("spawn")) as pool:
        for each in pool.map(row, given.only):
            rows.append(each)
            print(f"{each['name']:15} {share(each):6.1%}", each["losses"])
    if given.out:
        content = {"rows": rows, "steps": STEPS, "environment": environment(quick=False)}
        results.write_json(given.out, content)


if __name__ == "__main__":
    main()
