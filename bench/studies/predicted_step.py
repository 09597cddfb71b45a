"""The time of a training step on an H100, predicted: nothing here was measured as a whole.

    python -m mixprec.bench.studies.predicted_step

A step of the GPT of examples/ runs on torch's meta device, where every op shows its shapes. The
bytes of an op are its operands and results, once each, and once more for what is read twice to know
its maximum; the FLOPs of attention are those of torch.utils.flop_counter, half of them for a causal
mask. Rates are those of the committed results of an H100 (RESULTS):

    products        FLOPs, bytes and a launch, each at a rate fitted to the products there
    attention       at ASSUMED, which no file there has
    casts           as quantize, with and without a transpose, a scale that is given or not
    fused kernels   as quantize, and a launch each
    other kernels   at the rate of chains of torch's kernels there, and a launch each
    update          as AdamW with masters

A part of a step takes as long as the device or the host, whichever is longer. The host's time is
that of its calls, alone, times how much longer the measured forward pass of FP8, which waited for
the host, took than its calls. (A cast was a call of its own then, and is in that of its layer now.)
Gaps and limits of power are left out. The steps that were measured are predicted in the same way,
and held against it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.nn import functional
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

import mixprec
from mixprec.functional import operands

from .. import results
from ..cases import gpt
from ..cases.quantize import GPU_SHAPE, in_torch
from ..environment import environment
from ..table import markdown
from .profile_step import PARTS, Size, in_recipe, model_of
from .step_counts import Ops

ROOT = Path(__file__).resolve().parents[2]
RESULTS = results.RESULTS / "nvidia-h100-80gb-hbm3"
OUT = results.RESULTS / "predicted-step.json"
ASSUMED = {"attention FLOP/s": 230e12}  # torch's, causal, heads of 64, forward and backward
SIZES = (Size(), Size(layers=4, width=4096))
RECIPES = ("bf16", "fp8", "fp8-delayed")
QUANTIZE = f"cuda/quantize/bf16/{{}}/{GPU_SHAPE[0]}x{GPU_SHAPE[1]}"
FUSED = ("norm_quantize", "norm_backward", "act_quantize", "act_backward", "rotary")
TERMS = ("products", "attention", "casts", "fused kernels", "other kernels", "update")
MEASURED = dict(zip(PARTS, ("forward", "backward", "optimizer"), strict=True))


class Call(NamedTuple):
    """of: FLOPs of a product or of attention, and the size of an operand's element; of a cast, how
    its scale is known."""

    op: str
    bytes: int
    launches: int
    of: Any = None


class Calls(Ops):
    """The calls of ops that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def see(self, name: str, given: dict[str, Any], moved: list[torch.Tensor]) -> None:
        self.calls.append(_call(name.removesuffix("_"), sum(x.nbytes for x in moved), given))


def _call(name: str, moved: int, given: dict[str, Any]) -> Call:
    if name.startswith("gemm"):
        (m, k), n = given["a"].shape, given["b"].shape[1]
        return Call(name, moved, 1, (2 * m * n * k, given["a"].itemsize))
    if name.startswith("attention"):
        shapes = [given[key].shape for key in ("g", "q", "k", "v") if key in given]
        count = sdpa_backward_flop_count if "g" in given else sdpa_flop_count
        return Call(name, moved, 1, count(*shapes) // 2)
    if "granularity" not in given or given["dtype"].itemsize > 1:
        return Call(name, moved, 1)
    suffix = "-transpose" * bool(given["transpose"])
    if given["scale"] is not None:
        return Call(name, moved, 1, f"given{suffix}")
    again = sum(given[key].nbytes for key in ("g", "x", "up") if given.get(key) is not None)
    return Call(name, moved + again, 2, f"current{suffix}")


def _attention(*args: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """One op, as on a GPU; on the meta device torch's would be several."""
    return mixprec.functional.attention(*args, causal=is_causal)


def counted(recipe: str, fuse: bool, size: Size, as_measured: bool) -> dict[str, list[Call]]:
    """The calls of each part of a step. as_measured: with rotary positions in FP32, by torch."""
    model = in_recipe(model_of(size, "meta"), recipe, fuse)
    if as_measured:
        gpt.in_torch(model)
    optimizer = mixprec.optim.AdamW(model.parameters(), max_grad_norm=1.0)
    tokens = torch.zeros(size.batch, size.context, dtype=torch.int64, device="meta")
    for _ in range(2):  # the first makes the state
        found = {part: Calls() for part in PARTS}
        with (
            patch.object(functional, "scaled_dot_product_attention", _attention),
            patch.object(operands, "wants_k_major", lambda *_: True),  # as on Hopper
        ):
            with found["forward"]:
                loss = model(tokens, tokens)
            with found["backward"]:
                loss.backward()
            with found["update"]:
                optimizer.step()
            optimizer.zero_grad()
    return {part: seen.calls for part, seen in found.items()}


class Rates:
    """What the results of the GPU say."""

    def __init__(self, root: Path) -> None:
        files = (
            results.load(root / RESULTS / f"bench-{n}.json") for n in ("gemm", "memory", "step")
        )
        self.rows = {row["name"]: row for file in files for row in file["rows"]}
        # Seconds of a FLOP, a byte and a launch, by the size of an element.
        wide, narrow = self._fit("bf16/nt", "torch.matmul"), self._fit("fp8/tensor", "vendor")
        self.products, self.launch = {2: wide, 1: narrow}, wide[2]
        kinds = [scale + t for scale in ("given", "current") for t in ("", "-transpose")]
        casts = {kind: self.rows[QUANTIZE.format(kind)] for kind in kinds}
        self.casts = {k: row["bytes"] / row["median"]["ours"] for k, row in casts.items()}
        chains = (_chain(k) / row["median"]["torch eager"] for k, row in casts.items())
        self.eager = statistics.median(chains)
        adamw = self.rows["cuda/adamw_/bf16-masters/1e9"]
        self.update = adamw["bytes"] / adamw["median"]["ours"]
        self.torchs, self.ours = self._call("gemm", "torch.matmul"), self._call("quantize", "cuda")

    def _fit(self, family: str, by: str) -> list[float]:
        """Least squares of the relative errors over the aligned products."""
        terms = []
        for name, row in self._rows(f"gemm/{family}", by):
            if all(int(n) % 16 == 0 for n in name.rpartition("/")[2].split("x")):
                seconds = statistics.median(row["samples"][by])
                terms.append([row["flops"] / seconds, row["bytes"] / seconds, 1 / seconds])
        matrix = torch.tensor(terms, dtype=torch.float64)
        unit = matrix.abs().amax(0)
        one = torch.ones(len(terms), 1, dtype=torch.float64)
        return (torch.linalg.lstsq(matrix / unit, one).solution[:, 0] / unit).tolist()

    def _call(self, op: str, by: str) -> float:
        """Seconds that Python takes for a call."""
        calls = (row["calls"][by] for _, row in self._rows(op, by))
        return statistics.median(map(statistics.median, calls))

    def _rows(self, op: str, by: str) -> list[tuple[str, dict[str, Any]]]:
        of = self.rows.items()
        return [(n, r) for n, r in of if n.startswith(f"cuda/{op}/") and by in r.get("samples", ())]

    def seconds(self, call: Call) -> tuple[str, float]:
        """The term, and the device's seconds."""
        if call.op.startswith("gemm"):
            flops, size = call.of
            of_flop, of_byte, launch = self.products[size]
            return "products", flops * of_flop + call.bytes * of_byte + launch
        if call.op.startswith("attention"):
            return "attention", call.of / ASSUMED["attention FLOP/s"]
        if call.op in ("adamw", "grad_stats"):
            return "update", call.bytes / self.update
        if call.op == "quantize":
            return "casts", call.bytes / self.casts[call.of]
        fused = call.op in FUSED
        rate = self.casts[call.of or "given"] if fused else self.eager
        term = "fused kernels" if fused else "other kernels"
        return term, call.bytes / rate + self.launch * call.launches


def _chain(kind: str) -> int:
    """The bytes of the baseline of a cast in eager torch."""
    x = torch.empty(GPU_SHAPE, dtype=torch.bfloat16, device="meta")
    scale = torch.empty((), device="meta") if kind.startswith("given") else None
    with Calls() as seen:
        in_torch("tensor", scale, kind.endswith("transpose"), x)
    return sum(call.bytes for call in seen.calls)


def predicted(
    rates: Rates, recipe: str, fuse: bool, size: Size, slower: float, as_measured: bool = False
) -> dict[str, Any]:
    """Milliseconds of a step with and without calls, of its parts on the device and of their calls,
    and of the terms. slower: a call in a step than alone."""
    terms = dict.fromkeys(TERMS, 0.0)
    device, calls = defaultdict(float), dict.fromkeys(PARTS, 0.0)
    for part, found in counted(recipe, fuse, size, as_measured).items():
        for call in found:
            term, seconds = rates.seconds(call)
            terms[term] += 1e3 * seconds
            device[part] += 1e3 * seconds
            in_a_call = term == "casts" and not as_measured
            if part != "update" and not in_a_call:
                each = rates.torchs if term == "other kernels" else rates.ours
                calls[part] += 1e3 * slower * each
    whole = sum(max(device[part], calls[part]) for part in PARTS)
    return {
        **{"recipe": recipe, "fuse": fuse, "width": size.width, "tokens": size.tokens},
        **{"ms": whole, "graphed_ms": sum(device.values())},
        **{"device": dict(device), "host": calls, "terms": terms},
    }


def content(root: Path) -> dict[str, Any]:
    rates, checks, forward = Rates(root), [], {}
    for row in results.read_json(root / RESULTS / "train" / "results.json")["rows"]:
        if row["recipe"] in RECIPES:
            one = predicted(rates, row["recipe"], False, SIZES[0], 1.0, as_measured=True)
            parts = row["median_seconds_by_part"]
            measured = {part: 1e3 * parts[name] for part, name in MEASURED.items()}
            step = 1e3 * statistics.median(row["step_seconds"][1:])  # the first one warms up
            checks.append(one | {"measured": {"step": step, **measured}})
            forward[row["recipe"]] = measured["forward"] / one["host"]["forward"]
    slower = forward["fp8"]
    settings = [(r, fuse, size) for size in SIZES for r in RECIPES for fuse in (False, True)]
    return {
        "what": "predicted, not measured: counted FLOPs and bytes over measured rates",
        "results": str(RESULTS),
        "environment": environment(quick=False),
        "assumed": ASSUMED,
        "rates": {name: value for name, value in vars(rates).items() if name != "rows"},
        "a call in a step, of one alone": slower,
        "checks": checks,
        "rows": [predicted(rates, *setting, slower) for setting in settings],
    }


def table_of(root: Path) -> str:
    """For docs/gpu.md."""
    found = results.read_json(root / OUT)
    lines, checks = [], []
    for row in found["rows"]:
        name = f"{row['recipe']}{', fused' * row['fuse']}, width {row['width']}"
        speed = f"{1e-3 * row['tokens'] * 1e3 / row['graphed_ms']:,.0f}k"
        parts = [f"{row['device'][p]:.1f}, {row['host'][p]:.1f}" for p in PARTS[:2]]
        steps = [f"{row[key]:.1f}" for key in ("ms", "graphed_ms")]
        lines.append((name, *steps, speed, *parts, *(f"{row['terms'][t]:.1f}" for t in TERMS)))
    header = ("predicted, ms", "step", "in a graph", "tokens/s", "forward: device, host")
    table = markdown((*header, "backward: device, host", *TERMS), lines)
    for row in found["checks"]:
        own = {"step": row["ms"], **row["device"]}
        pairs = [(part, own[part], got) for part, got in row["measured"].items()]
        said = (f"{part} {ms:.1f} ({got:.1f}, {ms / got - 1:+.0%})" for part, ms, got in pairs)
        checks.append(f"- {row['recipe']}: {', '.join(said)}")
    slower = f"A call takes {found['a call in a step, of one alone']:.1f}x its time alone. "
    against = "Of the run that was measured, predicted (measured, difference), in ms:"
    return "\n".join([table, "", slower + against, "", *checks])


if __name__ == "__main__":
    results.write_json(ROOT / OUT, content(ROOT))
    print(table_of(ROOT))
