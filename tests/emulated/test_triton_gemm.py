"""The Triton GEMM: what the interpreter computes with it, the choice of tiles, the host cost."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import FP8, contiguous, name, offset, padded_rows, transposed

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (pip install triton)", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from mixprec.triton_kernels import configs, gemm, launch

ROOT = Path(__file__).resolve().parents[2]
SIXTEEN = configs.pick("gemm", 90, "16-bit", 8192, 8192, 132)


def test_interpreted_kernels_are_exact(tmp_path: Path) -> None:
    """triton_gemm_interpreted.py in a process where TRITON_INTERPRET is set before triton is
    imported; for it, not for this one, because there the kernels cannot be compiled."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)),
            str(ROOT / "tests" / "emulated" / "triton_gemm_interpreted.py"),
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


# The choice of a tile


def test_every_row_of_ours_could_be_a_users() -> None:
    for row in configs.ROWS:
        assert configs._problem(row) is None
        measured = (row.gpu, row.date, row.tflops)
        assert all(measured) or not any(measured), "measured in part"
    keys = [(row.op, row.arch, row.family, row.size) for row in configs.ROWS]
    assert len(set(keys)) == len(keys), "two rows for one case"


@pytest.mark.parametrize("capability", [80, 86, 87, 89, 90, 100, 103, 120, 121, 130])
def test_there_is_a_tile_for_everything(capability: int) -> None:
    soft = capability < 89
    for fp8, blocks, fast in itertools.product((False, True), repeat=3):
        kind = configs.family(fp8, fp8 and soft, blocks, fast)
        for shape, size in (((1, 1), "skinny"), ((65, 64), "small"), ((8192, 8192), "large")):
            for op in configs.OPS:
                row = configs.pick(op, capability, kind, *shape, 132)
                assert (row.family, row.size) == (kind, size)
                assert row.arch <= capability


def test_scales_along_k_are_never_accumulated_fast() -> None:
    assert configs.family(True, False, True, True) == "fp8"
    assert configs.family(True, False, False, True) == "fp8 fast"


def test_what_the_tiles_take_of_shared_memory() -> None:
    config = configs.Config(128, 256, 64, 8, 4)
    assert configs.shared_bytes(config, 90, 2) == 4 * 48 * 1024
    assert configs.shared_bytes(config, 80, 2) == 3 * 48 * 1024  # one stage is in registers


def test_split_k() -> None:
    """As many parts as fill the GPU once, each of at least 1024 of K."""
    row = configs.pick("gemm", 90, "16-bit", 16, 4096, 132)
    assert row.config.block_n == 64
    assert configs.split_k(row, 16, 4096, 16384, 132) == 2  # 64 tiles
    assert configs.split_k(row, 16, 4096, 1024, 132) == 1
    assert configs.split_k(row, 16, 64, 8192, 132) == 8
    assert configs.split_k(row, 16, 64, 2**20, 132) == configs.MAX_SPLIT
    assert configs.split_k(row, 16, 2**20, 2**20, 132) == 1


@pytest.fixture
def ours() -> Any:
    """Afterwards our own rows again."""
    yield
    configs.use_rows(None)


def test_measured_rows_come_first(tmp_path: Path, ours: None) -> None:
    """On the GPU they were measured on, and for the op that they name."""
    tile = replace(SIXTEEN.config, block_n=128, stages=3)
    mine = replace(SIXTEEN, config=tile, gpu="NVIDIA H100", date="2026-01-31", tflops=612.5)
    special = replace(mine, op="gemm_accumulate_", config=replace(tile, group=4))
    path = tmp_path / "rows.json"
    configs.write_rows(path, [special, mine])
    assert configs.use_rows(path) == (special, mine)
    assert configs.pick("gemm", 90, "16-bit", 8192, 8192, 132) == mine
    assert configs.pick("gemm_accumulate_", 90, "16-bit", 8192, 8192, 132) == special
    assert configs.pick("gemm", 90, "16-bit", 1024, 1024, 132) in configs.ROWS
    assert configs.pick("gemm", 100, "16-bit", 8192, 8192, 132) in configs.ROWS
    assert configs.use_rows(None) == ()
    assert configs.pick("gemm", 90, "16-bit", 8192, 8192, 132) == SIXTEEN


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "matmul"}, "op must be one of"),
        ({"arch": 75}, "arch must be one of"),
        ({"arch": "90"}, "arch must be one of"),
        ({"family": "fp4"}, "family must be one of"),
        ({"size": "huge"}, "size must be one of"),
        ({"speed": 1}, "TypeError"),
        ({"config": {"block_m": 96}}, "block_m must be one of"),
        ({"config": {"block_k": 256}}, "block_k must be one of"),
        ({"config": {"warps": 3}}, "warps must be one of"),
        ({"config": {"stages": 0}}, "stages, group and per_sm must be at least 1"),
        ({"config": {"stages": 9}}, "shared memory"),
        ({"config": {"stages": 2.0}}, "stages must be int"),
        ({"config": {"tma": 1}}, "tma must be bool"),
        ({"config": {"cluster": 2}}, "TypeError"),
    ],
)
def test_rows_that_make_no_sense(
    tmp_path: Path, ours: None, change: dict[str, Any], message: str
) -> None:
    entry = asdict(SIXTEEN)
    entry |= {**change, "config": entry["config"] | change.get("config", {})}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([asdict(SIXTEEN), entry]))
    with pytest.raises(ValueError, match=r"rows\.json, row 1: .*" + message):
        configs.use_rows(path)
    assert configs.pick("gemm", 90, "16-bit", 8192, 8192, 132) == SIXTEEN
    path.write_text("{}")
    with pytest.raises(ValueError, match="must hold a list of rows, got dict"):
        configs.use_rows(path)


# The launch


class OneGpu:
    """A Triton driver for compiling only, of a GPU of compute capability 9.0."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 90  # compiled kernels are kept per device: not that of a GPU that may be here

    def get_current_stream(self, _: int) -> int:
        return 0


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...], dict[str, Any]]]:
    """Every launch on a GPU with 132 multiprocessors: compiled for its arguments, not run."""
    launches = []
    compile_for = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
        compiled = compile_for(self, *args, grid=grid, warmup=True, **keywords)
        launches.append((self.__name__, grid, {**keywords, "ptx": compiled.asm["ptx"]}))
        return compiled

    monkeypatch.setattr(driver, "_active", OneGpu())
    monkeypatch.setattr(launch, "_converts_fp8", lambda _: True)
    monkeypatch.setattr(gemm, "_gpu", lambda _: (90, 132))
    monkeypatch.setattr(JITFunction, "run", run)
    return launches


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(m, k).to(dtype), torch.zeros(n, k).to(dtype).t()


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8[0]], ids=name)
def test_what_is_launched(launched: Any, dtype: torch.dtype) -> None:
    a, b = operands(2048, 4096, 256, dtype)
    out = gemm.gemm(a, b, torch.ones(()), torch.ones(1, 4096), None, torch.bfloat16, False)
    assert (out.shape, out.dtype) == ((2048, 4096), torch.bfloat16)
    ((kernel, grid, keywords),) = launched
    assert (kernel, grid) == ("gemm_kernel", (132,))
    assert keywords["TMA"] is True
    assert keywords["PROMOTE"] is (dtype in FP8)
    assert (keywords["A_SCALE"], keywords["B_SCALE"]) == ("scalar", "rows")
    assert "wgmma" in keywords["ptx"]


def test_split_products_take_two_launches(launched: Any) -> None:
    a, b = operands(16, 512, 8192, torch.bfloat16)
    gemm.gemm_accumulate_(torch.zeros(16, 512), a, b, None, None)
    assert [kernel for kernel, *_ in launched] == ["gemm_kernel", "reduce_kernel"]
    assert launched[0][1] == (64,)  # 8 tiles, 8 parts
    assert (launched[0][2]["SPLIT"], launched[1][2]["ACCUMULATE"]) == (True, True)


def test_awkward_sizes_and_addresses(launched: Any) -> None:
    """A size of 1 becomes a constant in Triton, and addresses of odd elements lose alignment."""
    for i, ((m, n, k), order) in enumerate(
        itertools.product(
            ((1, 1, 1), (1, 7, 1), (7, 1, 33)), (contiguous, transposed, offset, padded_rows)
        )
    ):
        a, b = operands(m, n, k, (torch.float16, FP8[1])[i % 2])
        if i % 3:
            bias = torch.zeros(n)
            gemm.gemm(order(a), order(b), None, None, bias, torch.float16, False)
        else:
            scales = torch.ones(m, -(-k // 128)), torch.ones(-(-k // 128), 1)
            gemm.gemm_accumulate_(torch.zeros(n, m).t(), order(a), order(b), *scales)
    assert not any("\t.local" in keywords["ptx"] for *_, keywords in launched)


def test_nothing_is_launched_for_empty_products(launched: Any) -> None:
    for m, n, k in ((0, 3, 5), (3, 0, 5), (3, 4, 0)):
        a, b = operands(m, n, k, torch.float16)
        assert gemm.gemm(a, b, None, None, None, torch.float16, False).shape == (m, n)
        gemm.gemm_accumulate_(torch.zeros(m, n), a, b, None, None)
    assert launched == []


def test_host_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the hand-over to Triton, a call takes a few tens of microseconds of processor time:
    measured 16 us; the bound leaves room for a slow and busy machine."""
    monkeypatch.setattr(gemm, "_gpu", lambda _: (90, 132))
    monkeypatch.setattr(launch, "_converts_fp8", lambda _: True)
    monkeypatch.setattr(JITFunction, "run", lambda *_, **__: None)
    a, b = operands(2048, 2048, 64, FP8[0])
    acc, one = torch.zeros(2048, 2048), torch.ones(())

    def seconds(call: Callable[[], None]) -> float:
        start = time.thread_time()
        for _ in range(100):
            call()
        return (time.thread_time() - start) / 100

    costs = [seconds(lambda: gemm.gemm_accumulate_(acc, a, b, one, one)) for _ in range(15)]
    assert statistics.median(costs) < 100e-6
