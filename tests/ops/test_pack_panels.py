"""The memory that packing writes: heap memory past a panel is another's, which no value shows."""

import os
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"


def test_packing_writes_its_panel_only(tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    assert compiler is not None, "this test compiles C++: apt-get install g++"
    program = tmp_path / "pack_panels"
    loops = sorted(CSRC.glob("cpu/simd/loops_*.cpp"))
    sources = [str(path) for path in (HERE / "pack_panels.cpp", *loops)]
    flags = ["-std=c++20", "-O0", "-ffp-contract=off", f"-I{CSRC}", "-o", str(program)]
    subprocess.run([compiler, *flags, *sources], check=True)
    assert subprocess.run([program], check=True, capture_output=True, text=True).stdout == ""
