"""Everything for a machine with an NVIDIA GPU, on its own: tests, sanitizers, benchmarks.

    python tests/gpu/unattended.py [--out FOLDER] [--jobs test,bench,…] [--limit SECONDS] [--full]

Each job is a program with a time limit of its own, in a process group that is ended as a whole: a
kernel that hangs costs its own job only. What a job has said goes to FOLDER/<job>.txt as it comes,
and FOLDER/gpu.json, rewritten after every job, says how each ended, on which GPU, with which driver
and clocks, at which commit. Exit status 1 if one did not end well.
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
# The cases of the benchmark, the seconds for each group.
BENCH = {
    "memory": (150, "quantize amax dequantize quantize_mx dequantize_mx pack unpack"),
    "step": (100, "adamw_ sgd_"),
    "fused": (60, "norm_quantize act_quantize"),
    "gemm": (180, "gemm"),
    "layer": (90, "layer overhead"),
}
# A GPT that fills the GPU (about 160 million parameters, 16,384 bytes of text a step), five
# precisions, four minutes on an H200 if it reaches half of its peak.
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


def jobs(out: Path, full: bool = False) -> list[Job]:
    """full: every case of the benchmark, in ten times the seconds."""
    python = [sys.executable, "-m"]
    found = [Job("env", "env", [*python, "mixprec.env"], 100)]
    for kernels, others in (("cuda", "triton"), ("triton", "cuda")):
        # A thousand tests of a second each, of which the GPU runs many at a time.
        chosen = ["-m", "not large", "-k", f"not {others}"]
        parallel = ["-n", str(len(os.sched_getaffinity(0))), "--dist", "worksteal"]
        command = pytest(*parallel, *chosen, str(HERE))
        found.append(Job(f"test-{kernels}", f"test-{kernels}", command, 420))
    found.append(Job("test-large", "test-large", pytest("-m", "large", str(HERE)), 200))
    found += [
        Job(
            f"sanitize-{tool}-{kernels}",
            "sanitize",
            [*sanitizer(tool), *pytest("-k", f"self_test and {kernels}", str(HERE))],
            400,
        )
        for tool, kernels in [*((tool, "cuda") for tool in SANITIZERS), ("memcheck", "triton")]
    ]
    for group, (least, cases) in BENCH.items():
        seconds = least * (10 if full else 1)
        command = [*python, "mixprec.bench", "run", "--device", "cuda"]
        command += [] if full else ["--quick"]
        command += ["--out", str(out / f"bench-{group}.json"), "--budget", str(0.7 * seconds)]
        words = [f"cuda/{case}" for case in cases.split()]
        found.append(Job(f"bench-{group}", f"bench-{group}", [*command, *words], seconds))
    command = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), *TRAIN.split()]
    found.append(Job("train", "train", [*command, "--out", str(out / "train")], 540))
    return found


def run(job: Job, out: Path) -> dict[str, Any]:
    """How the job ended: its exit status, None where it was ended, and its last line."""
    start, text = time.monotonic(), out / f"{job.name}.txt"
    # Without torch's memory pool every tensor is an allocation of its own, with bounds to check.
    env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if job.kind == "sanitize" else {}
    with text.open("wb") as file:
        process = subprocess.Popen(
            job.command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
            start_new_session=True,
        )
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
        "--jobs", default="", help="beginnings of names: env,test,sanitize,bench,train"
    )
    parser.add_argument("--limit", type=float, help="seconds for all (540; 5400 with --full)")
    parser.add_argument("--full", action="store_true", help="bench: every case, not the quick ones")
    args = parser.parse_args()
    # "NVIDIA H200" -> "nvidia-h200"
    folder = re.sub(r"[^a-z0-9]+", "-", (device.name() or "no-gpu").lower()).strip("-")
    out = (args.out or ROOT / "bench" / "results" / folder).resolve()
    out.mkdir(parents=True, exist_ok=True)
    args.limit = args.limit or (5400.0 if args.full else 540.0)
    wanted = tuple(args.jobs.split(","))
    chosen = [job for job in jobs(out, args.full) if job.name.startswith(wanted)]
    end, done = time.monotonic() + args.limit, dict[str, dict[str, Any]]()
    about = {"environment": environment(quick=False) | {"gpu_name": device.name()}}
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
