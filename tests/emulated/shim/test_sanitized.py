"""The shim's kernels under the sanitizers, and without any one of their barriers.

sanitized.cpp runs each of them over memory of exactly the right size.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from emulated.shim import runner

BARRIER = re.compile(r"__syncthreads\(\);")


def skip_without(sanitizer: str, folder: Path) -> None:
    probe = folder / "probe.cpp"
    probe.write_text("int main() {}")
    flags = [f"-fsanitize={sanitizer}", str(probe), "-o", str(folder / "probe")]
    if subprocess.run(["g++", *flags], capture_output=True).returncode != 0:
        pytest.skip(
            f"this g++ cannot link -fsanitize={sanitizer} (its run-time library is missing)"
        )
    ran = subprocess.run([folder / "probe"], capture_output=True, text=True)
    if ran.returncode != 0:
        pytest.skip(f"-fsanitize={sanitizer} does not run on this machine: {ran.stderr[-300:]}")


def sanitized(sanitizer: str, csrc: Path = runner.CSRC) -> subprocess.CompletedProcess[str]:
    """Returns 0, 1 where a value is wrong, 66 where the sanitizer has found something."""
    scheduler = runner.compile_(["-O1", "-c", runner.SCHEDULER], ".o")
    checks = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    program = runner.compile_(
        ["-O1", "-g", *checks, scheduler, runner.HERE / "sanitized.cpp"], ".sanitized", csrc
    )
    options = "exitcode=66 halt_on_error=1"
    names = ("TSAN_OPTIONS", "ASAN_OPTIONS", "UBSAN_OPTIONS")
    env = os.environ | dict.fromkeys(names, options)
    return subprocess.run([program], capture_output=True, text=True, env=env, timeout=120)


def test_the_kernels_stay_in_their_memory_and_aligned(tmp_path: Path) -> None:
    skip_without("address,undefined", tmp_path)
    done = sanitized("address,undefined")
    assert done.returncode == 0, done.stdout + done.stderr


def barriers() -> list[tuple[Path, int]]:
    """Every barrier: its file, and where in it. Those of the Hopper GEMM: test_hopper_gemm.py."""
    files = sorted(f for f in (runner.CSRC / "cuda").rglob("*.cuh") if "sm90" not in f.name)
    return [(file, m.start()) for file in files for m in BARRIER.finditer(file.read_text())]


def test_no_barrier_is_missing(tmp_path: Path) -> None:
    skip_without("thread", tmp_path)
    done = sanitized("thread")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(barriers()) >= 4, "no barriers found in csrc/cuda"


@pytest.mark.parametrize(
    ("file", "at"), barriers(), ids=lambda x: x.stem if isinstance(x, Path) else f"at_{x}"
)
def test_every_barrier_is_needed(tmp_path: Path, file: Path, at: int) -> None:
    skip_without("thread", tmp_path)
    copy = tmp_path / "csrc"
    shutil.copytree(runner.CSRC, copy, ignore=shutil.ignore_patterns("*.cpp", "*.cu"))
    text = file.read_text()
    end = at + len(BARRIER.match(text, at)[0])
    (copy / file.relative_to(runner.CSRC)).write_text(text[:at] + ";" + text[end:])
    done = sanitized("thread", copy)
    assert done.returncode in (1, 66), "neither a value nor ThreadSanitizer shows that it is gone"
