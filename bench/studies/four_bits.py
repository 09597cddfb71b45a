"""What published recipes of four and eight bits say of themselves, and what they do here.

    python -m mixprec.bench.studies.four_bits    # about ten minutes on one core

writes bench/results/cpu/four-bits.json, of which docs/formats.md has the table. The claims are
those of the papers, or computed from their formulas.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import mixprec
from mixprec.diagnostics import measure
from mixprec.ops._reference.block_formats import hadamard
from mixprec.recipes import Recipe

from .. import pages, results
from ..environment import environment
from ..table import markdown

FILE = results.CPU / "four-bits.json"
RECIPES = (
    *("mxfp8", "mxfp4", "nvfp4", "nvfp4-1x16", "nvfp4-rowwise"),
    *("nvfp4-4over6", "quartet2", "tetrajet"),
)
EDEN = "nvfp4/eden"
# Mean squared error of N(0, 1), in 10^-3: granularity, rounded at random, claim, of whom.
ERRORS = (
    ("nvfp4", False, 9.04, "Quartet II: nearest"),
    ("nvfp4/nearest/x1.0625", True, 23.52, "Quartet II: stochastic, factor 17/16"),
    (EDEN, True, 9.72, "Quartet II: MS-EDEN, rotated by 128"),
    ("nvfp4/mse/max256", False, 7.56, "4/6 by squared error"),
    ("nvfp4/mae/max256", False, 7.80, "4/6 by absolute error"),
    ("nvfp4/16x16", False, 12.40, "4/6: squares of 16 x 16, without it"),
    ("nvfp4/16x16/mse/max256", False, 12.38, "4/6: squares of 16 x 16, with it"),
)
# Bits of the average of 4^k products, k = 0, 1, ..., with both operands rotated by 128, with new
# signs for each product, or as they are: None where no claim is known.
AVERAGES = (
    ("nvfp4/nearest/x1.0625", (2.20, 3.20, 4.20, 5.20, 6.20), True, "factor 17/16"),
    ("nvfp4/nearest", (2.37, None, None, None, 6.17), True, "scale to nearest"),
    ("nvfp4/mse/max256/nearest", (2.40, 3.39, 4.33, 5.17, 5.73), False, "4/6, not rotated"),
    (EDEN, (None,) * 5, True, "MS-EDEN"),
)
SATURATED = (("e4m3", "floor", 19.26), ("e2m1", "floor", 41.49), ("e4m3", "rceil", 0.0))


def _cast(x: torch.Tensor, granularity: str, seed: int | None) -> torch.Tensor:
    return mixprec.dequantize(mixprec.quantize(x, "e2m1", granularity=granularity, seed=seed))


def error(granularity: str, is_random: bool, side: int) -> float:
    """Of side x side numbers of N(0, 1), in 10^-3 of their mean square."""
    x = torch.randn(side, side, generator=torch.Generator().manual_seed(0))
    x = hadamard(x, 128) if granularity == EDEN else x
    off = _cast(x, granularity, 1 if is_random else None) - x
    return 1e3 * float(off.double().square().mean() / x.double().square().mean())


def averages(granularity: str, powers: int, rotates: bool, side: int = 512) -> list[float]:
    """-1/2 log2 of the relative squared error of the mean of 4^k products of two random casts."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(side, side, generator=generator) for _ in range(2))
    exact, total, bits = (a @ b.t()).double(), torch.zeros(side, side, dtype=torch.float64), []
    for i in range(4 ** (powers - 1)):
        signs = torch.randint(0, 2, (side,), generator=generator) * 2 - 1
        turned = [hadamard(t * signs, 128) if rotates else t for t in (a, b)]
        casts = [_cast(t, granularity, 2 * i + j) for j, t in enumerate(turned)]
        total += casts[0] @ casts[1].t()
        if (count := i + 1) in {4**k for k in range(powers)}:
            off = (total / count - exact).square().sum() / exact.square().sum()
            bits.append(-0.5 * math.log2(off))
    return bits


def saturated(element: str, mode: str, blocks: int) -> float:
    """The share of blocks, in %, whose largest magnitude, log-uniform, exceeds the format's."""
    generator = torch.Generator().manual_seed(0)
    m = torch.exp2(16 * torch.rand(blocks, 1, generator=generator, dtype=torch.float64) - 8).float()
    q = mixprec.quantize(m.expand(blocks, 32), element, granularity="mx", scale_mode=mode)
    return 100 * float((m * torch.exp2(127 - q.scale_inv.float()) > q.fmt.max).double().mean())


def slopes(name: str, seeds: int, side: int = 256) -> dict[str, tuple[float, float, float]]:
    """Of both gradients: the slope of their mean over seeds against the exact product of g and the
    operand as its product reads it, what is left of the error of that mean, and the error of one
    (relative, root mean square). An operand that is cast at random is read as before that."""
    recipe, generator = Recipe.parse(name), torch.Generator().manual_seed(0)
    g, x, w = (torch.randn(side, side, generator=generator) for _ in range(3))
    found = {}
    for product, role, a, b in (("grad_input", "w", g, w.t()), ("grad_weight", "x", g.t(), x.t())):
        one, size = recipe.product(product), recipe.product(product).rotation(product)
        if recipe.backward:
            b = measure.cast(recipe.product("forward"), role, b.t()).t()
        turned = [hadamard(t, size) if size else t for t in (a, b)]
        is_random = role in one.stochastic_rounding
        fixed = None if is_random else measure.cast(one, role, b, size)
        exact = turned[0].double() @ (turned[1] if fixed is None else fixed).double().t()
        total, single = torch.zeros_like(exact), 0.0
        count = seeds if one.is_random else 1
        for seed in range(count):
            torch.manual_seed(seed)
            operand = measure.cast(one, role, b, size) if fixed is None else fixed
            got = measure.cast(one, "g", a, size) @ operand.t()
            total += got / count
            single += float((got - exact).square().sum() / exact.square().sum()) / count
        left = float((total - exact).square().sum() / exact.square().sum())
        slope = float((total * exact).sum() / exact.square().sum())
        found[product] = slope, math.sqrt(left), math.sqrt(single)
    return found


def rows(side: int, powers: int, blocks: int, seeds: int) -> Iterator[dict[str, Any]]:
    for granularity, is_random, claim, of in ERRORS:
        what = f"error of N(0, 1) in 10^-3, {of}"
        yield {"what": what, "claim": claim, "ours": error(granularity, is_random, side)}
    for granularity, claims, rotates, of in AVERAGES:
        what, ours = (
            f"bits of the average of 4^k products, {of}",
            averages(granularity, powers, rotates),
        )
        yield {"what": what, "claim": claims[:powers], "ours": ours}
    for element, mode, claim in SATURATED:
        what = f"% of MX blocks, log-uniform, beyond the maximum, {element}, {mode}"
        yield {"what": what, "claim": claim, "ours": saturated(element, mode, blocks)}
    for name in RECIPES:
        yield {"recipe": name, "seeds": seeds, "gradients": slopes(name, seeds)}


def _numbers(value: Any) -> str:
    listed = value if isinstance(value, (list, tuple)) else [value]
    return ", ".join("…" if number is None else f"{number:.2f}" for number in listed)


def block(root: Path) -> str:
    """Both tables, for docs/formats.md."""
    content = results.read_json(root / FILE)
    found = content["rows"]
    anchors = [
        (row["what"], _numbers(row["claim"]), _numbers(row["ours"]))
        for row in found
        if "what" in row
    ]
    gradients = [
        (
            row["recipe"],
            *(
                cell
                for slope, left, single in row["gradients"].values()
                for cell in (f"{slope:.4f}", f"{left:.3f}", f"{single:.3f}")
            ),
        )
        for row in found
        if "recipe" in row
    ]
    header = ("recipe", *(f"{p}: {of}" for p in ("grad_input", "grad_weight")
                          for of in ("slope", "error of the mean", "of one")))  # fmt: skip
    return (
        f"{markdown(('claim of', 'claim', 'ours'), anchors)}\n\n{markdown(header, gradients)}\n\n"
        f"{pages.machine(content['environment'])}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--side", type=int, default=4096, help="the numbers of an error are its square")
    add("--powers", type=int, default=5, help="of 4, of the products averaged (%(default)s)")
    add("--blocks", type=int, default=1_000_000, help="of the shares that saturate (%(default)s)")
    add("--seeds", type=int, default=200, help="of the gradients (%(default)s)")
    add("--out", type=Path, default=FILE, help="the result file (%(default)s)")
    options = parser.parse_args(argv)
    where, found = environment(quick=False), []
    for row in rows(options.side, options.powers, options.blocks, options.seeds):
        print(*row.values(), flush=True)
        found.append(row)
    results.save(options.out, where, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
