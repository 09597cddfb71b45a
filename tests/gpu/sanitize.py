"""compute-sanitizer: how it is called, and what its log says.

Only options that the installed version knows are given. Torch's own kernels are left alone, which
would take most of the time, except by initcheck, which has to see what they write.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
# Without torch's memory pool every tensor is an allocation of its own, with bounds to check.
ENV = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
TORCHS = "kns=at6native,kns=at::native"  # a part of the names of torch's kernels, or that demangled
KEPT = 6000  # characters of a log, from its beginning and from its end
ERRORS = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")


def find() -> str | None:
    """The program: on the PATH, or in the CUDA toolkit."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    for place in (None, f"{home}/bin", f"{home}/compute-sanitizer"):
        if (found := shutil.which("compute-sanitizer", path=place)) is not None:
            return found
    return None


def known_options(program: str) -> str:
    done = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def command(program: str, tool: str, log: Path, known: str) -> list[str]:
    """log: one file per process, %p is its id."""
    wanted = {
        "--launch-timeout": "120",  # seconds until the program first uses CUDA; torch imports long
        "--target-processes": "application-only",  # not ptxas and the compilers
        "--show-backtrace": "device",  # those of the host take seconds each
        "--print-limit": "50",
    }
    if tool == "memcheck":
        wanted["--report-api-errors"] = "no"  # torch asks for functions that a driver may lack
    if tool != "initcheck":
        # Not the other way round: a filter that fits no name would leave out ours, and say nothing.
        filters = ("--kernel-name-exclude", "--kernel-regex-exclude")  # since 2025, and before
        wanted[next((f for f in filters if f in known), filters[0])] = TORCHS
    words = [program, "--tool", tool, "--log-file", f"{log}.%p", "--error-exitcode", "9"]
    return words + [word for option in wanted.items() if option[0] in known for word in option]


def findings(log: Path) -> dict[str, Any]:
    """The number of errors that a tool counted, None if it came to no count, and its words."""
    texts = [p.read_text(errors="replace") for p in sorted(log.parent.glob(f"{log.name}.*"))]
    counts = [int(a or b) for text in texts for a, b in ERRORS.findall(text)]
    text = "\n".join(texts)
    if len(text) > 2 * KEPT:
        text = f"{text[:KEPT]}\n[{len(text) - 2 * KEPT} characters are left out]\n{text[-KEPT:]}"
    return {"errors": sum(counts) if counts else None, "log": text}
