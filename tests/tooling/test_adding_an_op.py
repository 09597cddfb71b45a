"""What docs/adding_an_op.md says is done, in a copy of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mixprec

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding_an_op.md"
PROGRAM = """
import pytest, torch
from mixprec.ops.halve import halve
from mixprec.ops._dispatch.op import OPS

x = torch.randn(3, 5).bfloat16()
assert torch.equal(halve(x), x / 2)
assert halve(x.to("meta")).shape == (3, 5)
assert torch.equal(torch.compile(halve, backend="eager", fullgraph=True)(x), x / 2)
with pytest.raises(ValueError, match="halve: x must have dtype float32"):
    halve(x.long())
torch.library.opcheck(OPS["halve"].handle("reference"), (x,), test_utils="test_faketensor")
assert OPS["halve"].why_not("cpp", "cpu") == "it has no C++ kernel"
assert OPS["unscale_"].backend("cpu") == "cpp"
"""


def test_an_op_is_one_file(tmp_path: Path) -> None:
    package = Path(mixprec.__file__).parent
    copy = tmp_path / "mixprec"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for library in package.glob("_C*.so"):
        (copy / library.name).symlink_to(library)
    block = PAGE.read_text().split("```py\n")[1].split("```")[0]
    (copy / "ops" / "halve.py").write_text(block)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "halve runs as its plain torch reference on cpu" in done.stderr


# The loops of level base give the same bits on aarch64, in an emulator, as on this processor


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
