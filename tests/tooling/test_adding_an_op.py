"""What docs/adding_an_op.md says is done, in a copy of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

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
