"""The Triton kernels: their package, and what Triton's interpreter computes with them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_folder_is_not_importable_under_its_own_name() -> None:
    """It would stand in the way of Triton's own package triton_kernels."""
    done = subprocess.run(
        [sys.executable, "-c", "import triton_kernels"],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "mixprec.triton_kernels and cannot be imported as 'triton_kernels'" in done.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (pip install triton)",
)
def test_interpreted_kernels_agree_with_the_references(tmp_path: Path) -> None:
    """triton_interpreted.py in a process where TRITON_INTERPRET is set before triton is imported;
    for it, not for this one, because there the kernels cannot be compiled."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)),
            str(ROOT / "tests" / "emulated" / "triton_interpreted.py"),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
