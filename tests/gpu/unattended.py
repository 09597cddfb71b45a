"""Everything for a machine with an NVIDIA GPU, on its own: tests, profiles, benchmarks, sanitizers.

    python tests/gpu/unattended.py [--first] [--out FOLDER] [--jobs test,bench,…]
        [--limit SECONDS] [--full]

Each job is a program with a time limit of its own, in a process group that is ended as a whole: a
kernel that hangs costs its own job only. What a job has said goes to FOLDER/<job>.txt as it comes,
its measurements to JSON that it rewrites as it goes on, and FOLDER/gpu.json, rewritten after every
job, says how each ended, on which GPU, with which driver and clocks, at which commit. --first: the
jobs that decide most, in the order of what they decide. Exit status 1 if one did not end well.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from mixprec.bench import device
from mixprec.bench.environment import environment
from mixprec.bench.results import write_json

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
DRY_RUN = 10.0 if device.DRY_RUN else 1.0  # times the seconds: nothing is fast without a GPU
# A GPT that fills the GPU (about 160 million parameters, 16,384 bytes of text a step), five
# precisions, four minutes on an H200 if it reaches half of its peak.
GEMM = "2048x2048x2048 4096x4096x4096 16x4096x4096 8192x4096x4096 8192x4096x14336 4096x7168x2048"
TRAIN = "--layers 12 --width 1024 --context 1024 --batch 16 --steps 150 --lr 6e-4 --device cuda"


class Job(NamedTuple):
    name: str
    kind: str  # those of one kind run at the same time, the kinds one after another
    command: list[str]
    limit: float  # seconds


def pytest(*arguments: str) -> list[str]:
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "pytest", *options, "-q", "-rfE", *arguments]


def sanitizer(tool: str) -> list[str]:
    """compute-sanitizer over our kernels alone: torch's would take most of the time."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    path = os.pathsep.join([os.environ.get("PATH", ""), f"{home}/bin", f"{home}/compute-sanitizer"])
    program = shutil.which("compute-sanitizer", path=path) or "compute-sanitizer"
    options = ["--tool", tool, "--error-exitcode", "9", "--target-processes", "application-only"]
    if tool != "initcheck":  # which has to see what torch's kernels write
        options += ["--kernel-name-exclude", "kns=at6native,kns=at::native"]
    return [program, *options]


def bench(cases: str, *options: str) -> list[str]:
    command = [sys.executable, "-m", "mixprec.bench", "run", "--device", "cuda", *options]
    command += [f"cuda/{case}" for case in cases.split()]
    return [*command, "--out", "{out}/{name}.json", "--budget", "{budget}"]


def profile(ways: str, *size: str) -> list[str]:
    command = [sys.executable, "-m", "mixprec.bench.studies.profile_step", *ways.split(", "), *size]
    return [*command, "--out", "{out}/{name}.json", "--budget", "{budget}"]


def jobs(out: Path, first: bool = False, full: bool = False) -> list[Job]:
    """In their order; full: every case of the benchmark, in ten times the seconds."""
    python, here = [sys.executable, "-m"], str(HERE)
    # A thousand tests of a second each, of which the GPU runs many at a time.
    parallel = ["-n", str(len(os.sched_getaffinity(0))), "--dist", "worksteal"]
    quick = [] if full else ["--quick"]
    longer = 10 if full else 1
    rows = [f"gemm/{way}/{size}" for size in GEMM.split() for way in ("bf16/nt", "fp8/tensor")]
    graphed = "bf16 fused graphed, fp8 fused graphed"
    wide = ["--width", "4096", "--layers", "4"]
    # Most seconds with --first and without it; None: not run then.
    table: list[tuple[str, float | None, float | None, list[str]]] = [
        ("env", 30, 100, [*python, "mixprec.env"]),
        ("bench-ceilings", 40, None, bench("gemm/bf16/nt/8192x8192x8192 amax/bf16 "
                                           "gemm/fp8/tensor/8192x8192x8192")),
        ("self-test", 90, None, pytest(*parallel, "-k", "self_test", here)),
        ("profile-eager", 90, None, profile("bf16 eager, fp8 eager, bf16 fused, fp8 fused, "
                                            "fp8-delayed fused, fp8-delayed eager")),
        ("profile-graphed", 50, None, profile(f"{graphed}, fp8-delayed fused graphed")),
        # Rivals side by side, in one process.
        ("profile-compiled", 160, None, profile(
            "torch compiled, bf16 compiled, fp8 compiled, fp8-delayed compiled, "
            f"{graphed}, bf16 compiled graphed, fp8 compiled graphed")),
        ("profile-wide", 110, None, profile(
            f"{graphed}, fp8-block fused graphed, bf16 fused, fp8 fused, fp8-block fused, "
            "torch compiled", *wide)),
        ("bench-casts", 50, None, bench(
            "quantize/bf16 rotary norm_quantize act_quantize", "--quick")),
        ("bench-rows", 60, None, bench(" ".join(rows), "--samples", "15")),
        ("test-cuda", None, 420, pytest(*parallel, "-m", "not large", "-k", "not triton", here)),
        ("test-triton", None, 420, pytest(*parallel, "-m", "not large", "-k", "not cuda", here)),
        ("test-large", None, 200, pytest("-m", "large", here)),
        ("bench-memory", None, 150 * longer, bench(
            "quantize amax dequantize quantize_mx dequantize_mx pack unpack", *quick)),
        ("bench-step", None, 100 * longer, bench("adamw_ sgd_", *quick)),
        ("bench-fused", None, 60 * longer, bench("norm_quantize act_quantize rotary", *quick)),
        ("bench-gemm", None, 180 * longer, bench("gemm", *quick)),
        ("bench-grouped", 40, 60 * longer, bench("gemm_grouped head", *quick)),
        ("bench-overhead", None, 60 * longer, bench("overhead", *quick)),
        ("train", None, 540, [sys.executable, str(ROOT / "examples" / "train_gpt.py"),
                              *TRAIN.split(), "--out", "{out}/train"]),
    ]  # fmt: skip
    sanitized = [*((tool, "cuda") for tool in SANITIZERS), ("memcheck", "triton")]
    for tool, kernels in sanitized if DRY_RUN == 1 else ():  # they need a GPU
        command = [*sanitizer(tool), *pytest("-k", f"self_test and {kernels}", here)]
        soon = 300 if kernels == "cuda" and tool in ("memcheck", "racecheck") else None
        table.append((f"sanitize-{tool}-{kernels}", soon, 400, command))
    found = []
    for name, soon, later, command in table:
        if (seconds := soon if first else later) is not None:
            seconds *= DRY_RUN
            words = {"out": str(out), "name": name, "budget": f"{0.75 * seconds:.0f}"}
            kind = "sanitize" if name.startswith("sanitize") else name
            found.append(Job(name, kind, [word.format(**words) for word in command], seconds))
    return found


def run(job: Job, out: Path) -> dict[str, Any]:
    """How the job ended: its exit status, None where it was ended, and its last line."""
    start, text = time.monotonic(), out / f"{job.name}.txt"
    # Without torch's memory pool every tensor is an allocation of its own, with bounds to check.
    env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if job.kind == "sanitize" else {}
    found = [os.environ.get("PYTHONPATH", ""), str(ROOT / "examples")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, found))
    with text.open("wb") as file:
        try:
            process = subprocess.Popen(
                job.command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
                start_new_session=True,
            )
        except OSError as error:  # there is no such program
            return {"status": 127, "seconds": 0.0, "last": str(error)}
        try:
            status: int | None = process.wait(job.limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    lines = re.sub(r"\x1b\[\d*m", "", text.read_text(errors="replace")).strip().splitlines()
    seconds = round(time.monotonic() - start, 1)
    return {"status": status, "seconds": seconds, "last": lines[-1] if lines else ""}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="default: bench/results/ and the GPU's name")
    parser.add_argument(
        "--jobs", default="", help="beginnings of names: env,self-test,profile,bench-rows,…"
    )
    parser.add_argument("--first", action="store_true", help="what decides most, in 12 minutes")
    parser.add_argument(
        "--limit", type=float, help="seconds for all (540; 700 with --first, 5400 with --full)"
    )
    parser.add_argument("--full", action="store_true", help="bench: every case, not the quick ones")
    args = parser.parse_args()
    # "NVIDIA H200" -> "nvidia-h200"
    folder = re.sub(r"[^a-z0-9]+", "-", (device.name() or "no-gpu").lower()).strip("-")
    out = (args.out or ROOT / "bench" / "results" / folder).resolve()
    out.mkdir(parents=True, exist_ok=True)
    args.limit = args.limit or (5400 if args.full else 700 if args.first else 540) * DRY_RUN
    wanted = tuple(args.jobs.split(","))
    chosen = [job for job in jobs(out, args.first, args.full) if job.name.startswith(wanted)]
    end, done = time.monotonic() + args.limit, dict[str, dict[str, Any]]()
    about = {"environment": environment(quick=False) | device.properties()}
    if shutil.which("nvidia-smi") is not None:  # the driver, clocks, power and temperature
        about["nvidia-smi"] = subprocess.run(
            ["nvidia-smi", "-q"], capture_output=True, text=True, check=False
        ).stdout.splitlines()
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
        for kind in dict.fromkeys(job.kind for job in chosen):
            left = end - time.monotonic()
            same = [job for job in chosen if job.kind == kind and left > 5]
            capped = [job._replace(limit=min(job.limit, left)) for job in same]
            ended = pool.map(lambda job: run(job, out), capped)
            for job, result in zip(same, ended, strict=True):
                done[job.name] = result
                how = {0: "ok", None: "ENDED"}.get(result["status"], "FAILED")
                print(
                    f"{job.name:26} {how:6} {result['seconds']:6} s  {result['last']}", flush=True
                )
            write_json(out / "gpu.json", {**about, "jobs": done})
    for job in chosen:
        if job.name not in done:
            print(f"{job.name:26} not run: the {args.limit:.0f} s are over")
    return 0 if all(job.name in done and done[job.name]["status"] == 0 for job in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
