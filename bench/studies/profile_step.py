"""Where the time of a training step of the GPT of examples/ goes on a GPU.

    python -m mixprec.bench.studies.profile_step "bf16 eager" "fp8 fused graphed" "torch compiled"
        --out FILE [--width 1024 --layers 12 --batch 16 --context 1024 --budget SECONDS]

A way is a recipe and how it runs: eager, or one or more of fused (`convert(fuse=True)`), compiled
(each block by torch.compile) and graphed (`mixprec.graphed`). "torch" is torch alone: autocast in
bf16, AdamW(fused=True); compiled means the whole model.

Of each way: steps without a sync in between, and with one; how long Python takes to queue each part
behind a device that is busy; and two steps under torch.profiler: kernels, gaps between them with
the op that ended each, the ops that cost the host most. FILE is written after each way. A way that
fails is reported, and the others run. Without a GPU (MIXPREC_BENCH_DEVICE=cpu, or on a fake one
MIXPREC_BENCH_TINY=1) it is a dry run, tiny, compiled by aot_eager instead of inductor.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity
from torch.utils.flop_counter import FlopCounterMode

import mixprec

from .. import device
from ..cases import gpt
from ..cases.registry import example
from ..environment import environment
from ..results import write_json
from ..timing.run import clock, one_line, synchronize

WARM = 6  # steps in which code is compiled, kernels are compared and a graph is captured
STEPS, HOST_SAMPLES, PROFILED = (3, 2, 1) if device.DRY_RUN else (20, 5, 2)
LINES, LETTERS = 40, 90  # of a table, and of a name in it
GAP = 3.0  # us: shorter ones are between any two kernels
TORCH, WORDS = "torch", {"eager", "fused", "compiled", "graphed"}
PARTS = ("forward", "backward", "update")


class Size(NamedTuple):
    layers: int = 12
    width: int = 1024
    context: int = 1024
    batch: int = 16

    @property
    def tokens(self) -> int:
        return self.batch * self.context


TINY = Size(1, 64, 16, 2)


def model_of(size: Size, where: torch.device | str) -> torch.nn.Module:
    """In FP32, always with the same weights."""
    examples = example("gpt_model")
    mixprec.nn.register_fusion(examples.Norm, gpt.layer_norm)
    torch.manual_seed(0)
    with torch.device(where):
        config = examples.GPTConfig(size.layers, size.width, size.width // 64, size.context)
        return examples.GPT(config)


def in_recipe(model: torch.nn.Module, recipe: str, fuse: bool) -> torch.nn.Module:
    return mixprec.convert(mixprec.cast_parameters(model, torch.bfloat16), recipe, fuse=fuse)


def flops(size: Size) -> int:
    """Of a step, attention without a mask, as torch counts them."""
    model = gpt.in_torch(model_of(size, "meta"))
    tokens = torch.zeros(size.batch, size.context, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    return counter.get_total_flops()


class Step:
    """A training step of one way. parts: what it is made of, where it is not one graph."""

    def __init__(self, way: str, size: Size) -> None:
        recipe, *how = way.split()
        if not how or not set(how) <= WORDS:
            raise ValueError(f"a way is a recipe and some of {sorted(WORDS)}, got {way!r}")
        generator = torch.Generator(device.DEVICE).manual_seed(1)
        shape = size.batch, size.context + 1
        text = torch.randint(256, shape, generator=generator, device=device.DEVICE)
        self.batch = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        model = model_of(size, device.DEVICE)
        params, self.clip = list(model.parameters()), lambda: None
        compiled = list(model.blocks)
        self.autocast = torch.autocast(device.DEVICE.type, torch.bfloat16, enabled=recipe == TORCH)
        if recipe == TORCH:
            compiled = [gpt.in_torch(model)]
            self.optimizer = torch.optim.AdamW(params, 6e-4, fused=True)
            self.clip = lambda: torch.nn.utils.clip_grad_norm_(params, 1.0)
        else:
            in_recipe(model, recipe, "fused" in how)
            self.optimizer = mixprec.optim.AdamW(params, 6e-4, max_grad_norm=1.0)
        self.compiled_by = None
        for module in compiled if "compiled" in how else ():
            self.compiled_by = "aot_eager" if device.DRY_RUN else "inductor"
            module.compile(backend=self.compiled_by)
        self.model, self.whole = model, self.eager
        self.parts = {"forward": self.forward, "backward": self.backward, "update": self.update}
        if "graphed" in how:
            if not hasattr(mixprec, "graphed"):
                raise NotImplementedError("this mixprec has no mixprec.graphed")
            self.whole = mixprec.graphed(self.eager)
            self.parts = {"graph": lambda: self.whole(*self.batch)}

    def forward(self, *batch: torch.Tensor) -> None:
        with self.autocast:
            self.loss = self.model(*(batch or self.batch))

    def backward(self) -> None:
        self.loss.backward()

    def update(self) -> None:
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def eager(self, *batch: torch.Tensor) -> torch.Tensor:
        self.forward(*batch)
        self.backward()
        self.update()
        return self.loss.detach()

    def __call__(self) -> torch.Tensor:
        return self.whole(*self.batch)


def speed(step: Step, count: int) -> dict[str, list[float]]:
    """Seconds of each step on the device without a sync, and by the host's clock with one."""
    time_of, synced = clock(not device.ON_CPU), []
    time_of.synchronize()
    marks = [time_of.mark()]
    for _ in range(count):
        step()
        marks.append(time_of.mark())
    steps = [time_of.between(*pair) for pair in itertools.pairwise(marks)]
    for _ in range(count):
        start = time.perf_counter()
        step()
        time_of.synchronize()
        synced.append(time.perf_counter() - start)
    return {"step": steps, "synced": synced}


def host(step: Step, seconds: float) -> dict[str, Any]:
    """Seconds that Python takes to queue each part, while the device sleeps.

    waits: the parts of which the device woke up before all was queued (more launches than its queue
    holds, or a sync): they take less than it says.
    """
    time_of, found, late = clock(not device.ON_CPU), defaultdict(list), set()
    for _ in range(HOST_SAMPLES):
        for name, part in step.parts.items():
            time_of.synchronize()
            time_of.delay(min(1.0, 4 * seconds + 0.1))
            mark, start = time_of.mark(), time.perf_counter()
            part()
            found[name].append(time.perf_counter() - start)
            if time_of.reached(mark):
                late.add(name)
    time_of.synchronize()
    return {"seconds": dict(found), "waits": sorted(late)}


def table(rows: Iterable[tuple[str, float]]) -> list[list[Any]]:
    """[name, calls, us] of the names that take longest."""
    sums: dict[str, list[float]] = defaultdict(list)
    for name, took in rows:
        sums[name].append(took)
    ranked = sorted(sums.items(), key=lambda item: -sum(item[1]))[:LINES]
    return [[name[:LETTERS], len(took), round(sum(took), 1)] for name, took in ranked]


def on_device(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Kernels and gaps of a trace as torch.profiler exports it, in microseconds."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    work = sorted((e for e in events if e.get("cat") in kinds), key=lambda e: e["ts"])
    if not work:
        return {"why_no_kernels": "the profiler saw no device"}
    ops = {e["args"].get("External id"): e["name"] for e in events if e.get("cat") == "cpu_op"}
    first = end = work[0]["ts"]
    gaps, busy = [], 0.0
    for e in work:
        start, stop = e["ts"], e["ts"] + e["dur"]
        if start - end > GAP:
            gaps.append((ops.get(e["args"].get("External id"), "no op"), start - end))
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return {
        "launches": len(work),
        "busy_us": busy,
        "span_us": end - first,
        "idle_us": sum(gap for _, gap in gaps),
        "kernels": table((e["name"], e["dur"]) for e in work),
        "gaps_ended_by": table(gaps),
    }


def profile(step: Step) -> dict[str, Any]:
    """Of some steps, after one that is not recorded."""
    found: dict[str, Any] = {"steps": PROFILED}

    def read(prof: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            prof.export_chrome_trace(str(path))
            trace = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        ops = [op for op in prof.key_averages() if not op.key.startswith("ProfilerStep")]
        ops = sorted(ops, key=lambda op: -op.self_cpu_time_total)[:LINES]
        costs = [[op.key[:LETTERS], op.count, round(op.self_cpu_time_total, 1)] for op in ops]
        found.update(on_device(trace["traceEvents"]), ops=costs)

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (not device.DRY_RUN)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=PROFILED, repeat=1)
    with torch.profiler.profile(
        activities=activities, schedule=schedule, on_trace_ready=read
    ) as prof:
        for _ in range(1 + PROFILED):
            step()
            synchronize()
            prof.step()
    return found


def measured(way: str, size: Size, count: int, work: float) -> dict[str, Any]:
    """The row of one way. ValueError if its loss does not fall."""
    torch.compiler.reset()
    device.release()
    if not device.ON_CPU:
        torch.cuda.reset_peak_memory_stats()
    start, step = time.perf_counter(), Step(way, size)
    losses = [float(step()) for _ in range(WARM)]
    if not all(map(math.isfinite, losses)) or losses[-1] >= losses[0]:
        raise ValueError(f"the loss does not fall: {losses}")
    warm = time.perf_counter() - start
    row = {"way": way, "status": "ok", "losses": losses, "until_warm": warm}
    row |= {"compiled_by": step.compiled_by, **speed(step, count)}
    seconds, peak = statistics.median(row["step"]), device.peak(device.name())
    return row | {
        "tokens_per_second": size.tokens / seconds,
        "flops": work,
        "mfu": work / seconds / peak.flops16 if peak else None,
        "peak_bytes": 0 if device.ON_CPU else torch.cuda.max_memory_allocated(),
        "host": host(step, seconds),
        "profile": profile(step),
        "gpu_state": device.state(),
    }


def main(argv: list[str] | None = None) -> int:
    """1 if a way failed, or was not begun when the budget was over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ways", nargs="+", help='such as "fp8 fused graphed"')
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds")
    parser.add_argument("--steps", type=int, default=STEPS, help="samples of each (%(default)s)")
    for name, value in Size()._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=value, help="(%(default)s)")
    options = parser.parse_args(argv)
    size = TINY if device.DRY_RUN else Size(*(getattr(options, name) for name in Size._fields))
    end, rows, work = time.monotonic() + options.budget, [], flops(size)
    where = environment(quick=False) | device.properties()
    content = {"environment": where, "size": size._asdict(), "rows": rows}
    for way in options.ways:
        gc.collect()
        try:
            if time.monotonic() > end:
                raise TimeoutError(f"not begun: the {options.budget:.0f} s were over")
            row = measured(way, size, options.steps, work)
            said = f"{1e3 * statistics.median(row['step']):.2f} ms"
        except Exception as error:  # the others still run
            said = one_line(error)
            row = {"way": way, "status": "failed", "reason": said}
        rows.append(row)
        write_json(options.out, content)
        print(f"{way:24} {row['status']:8} {said}", flush=True)
    return 0 if all(row["status"] == "ok" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
