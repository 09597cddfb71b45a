"""What Recipe(outliers=...) saves of the loss that formats of 4 bits cost.

    python examples/outliers_study.py --out bench/results/cpu/outliers-study.json

Models are continued from a checkpoint for 100 steps, with all layers in one recipe, over seeds of
the order of the data. Measured is the growth of the validation loss, in that recipe, against the
run in FP32 on the same batches. "at random": features that are drawn, not chosen.
"""

from __future__ import annotations

import torch
from plan_tasks import Task, report

import mixprec

# Written before the first run.
FORMATS, SHARES, SEEDS = ("mxfp4", "nvfp4-1x16"), (0.01, 0.05, 0.2), 5
MODELS = ("gpt", "mlp")  # the vision transformers differ by more between orders of the data
AT_RANDOM = 0.05


def grown(task: Task, seed: int) -> dict[str, dict[str, float]]:
    """By format and share, of one order of the data."""
    exact = task.run(None)

    def run(recipe: str, is_random: bool = False) -> float:
        def apply(model: torch.nn.Module) -> None:
            mixprec.convert(model, recipe)
            if "outliers" not in recipe:
                return
            mixprec.choose_outliers(model, task.after[:8])
            if is_random:
                torch.manual_seed(seed)
                for layer in (m for m in model.modules() if isinstance(m, mixprec.nn.Linear)):
                    layer.outliers = layer.outliers[torch.randperm(layer.in_features)]

        return task.run(apply) - exact

    found = {}
    for name in FORMATS:
        found[name] = {"none": run(name)}
        found[name] |= {f"{s:.0%}": run(f"{name}+outliers-{s}") for s in SHARES}
        found[name][f"{AT_RANDOM:.0%} at random"] = run(f"{name}+outliers-{AT_RANDOM}", True)
    return found


def measure(name: str) -> list[dict[str, dict[str, float]]]:
    found = []
    for seed in range(SEEDS):
        found.append(grown(Task(name, seed=seed), seed))
        rows = {f: {k: f"{v:+.4f}" for k, v in row.items()} for f, row in found[-1].items()}
        print(name, rows, flush=True)
    return found


if __name__ == "__main__":
    report(__doc__, MODELS, measure)
