"""The loops of level `base` give the same bits on aarch64, in an emulator, as on this processor."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (ROOT / "tests/other_processors/loops.cpp", ROOT / "csrc/cpu/simd/loops_base.cpp")
# As setup.py compiles them: nothing that may change a rounding.
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno")
CROSS = ("aarch64-linux-gnu-g++", "qemu-aarch64")
MISSING = [name for name in (*CROSS, "c++") if shutil.which(name) is None]


def lines(compiler: str, folder: Path, *emulator: str) -> list[str]:
    """A digest for each loop."""
    program = folder / compiler
    sources = [str(path) for path in SOURCES]
    # Static: the emulator has no libraries of the other processor.
    flags = [*FLAGS, "-Wno-psabi", "-static", f"-I{ROOT / 'csrc'}"]
    subprocess.run([compiler, *flags, *sources, "-o", program], check=True)
    return subprocess.check_output([*emulator, program], text=True).splitlines()


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not here: {', '.join(MISSING)}")
def test_every_loop_gives_the_same_bits_on_aarch64(tmp_path: Path) -> None:
    here = lines("c++", tmp_path)
    assert len(here) == len({line.rpartition(" ")[0] for line in here}) > 40
    assert lines(CROSS[0], tmp_path, CROSS[1]) == here
