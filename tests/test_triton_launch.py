"""The launchers of the Triton kernels, up to the launch itself, without a GPU.

Triton is told of a driver that knows one GPU, and every kernel is compiled for exactly the
arguments it would be launched with: names, types, sizes of 1, pointers that are not aligned.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from cases import FP8, WIDE, name, normal, offset, padded_rows

from mixprec import _self_test
from mixprec.ops import _library

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (pip install triton)", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from mixprec.triton_kernels import launch


class OneGpu:
    """A Triton driver for compiling only, of a GPU of compute capability 9.0."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 90  # compiled kernels are kept per device: not that of a GPU that may be here

    def get_current_stream(self, _: int) -> int:
        return 0


Launch = tuple[str, dict[str, Any], tuple[int, ...]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """(name, keywords, grid) of every launch; nothing runs."""
    launches: list[Launch] = []
    compile_for = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
        assert all(1 <= n < 2**31 for n in grid), f"{self.__name__}: grid {grid}"
        launches.append((self.__name__, keywords, grid))
        return compile_for(self, *args, grid=grid, warmup=True, **keywords)

    monkeypatch.setattr(driver, "_active", OneGpu())
    monkeypatch.setattr(launch, "_converts_fp8", lambda _: True)
    monkeypatch.setattr(JITFunction, "run", run)
    return launches


def kernels(launches: list[Launch]) -> list[str]:
    return [kernel.removesuffix("_kernel") for kernel, _, _ in launches]


@pytest.mark.parametrize("op", _library.TRITON)
def test_every_launcher(launched: list[Launch], op: str) -> None:
    for arguments in _self_test.INPUTS[op]("cpu"):
        _library.triton_launcher(op)(*arguments)
    assert launched
    assert not any(keywords.get("SOFT_CAST") for _, keywords, _ in launched)


def test_soft_casts_where_the_gpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """16-bit formats have instructions everywhere, FP8 from compute capability 8.9 on."""
    device = torch.device("cuda", 0)
    for converts in (False, True):
        monkeypatch.setattr(launch, "_converts_fp8", lambda _, converts=converts: converts)
        assert not launch.soft_cast(device, torch.bfloat16, torch.float16, torch.float64)
        for dtype in FP8:
            assert launch.soft_cast(device, torch.float32, dtype) is not converts
    monkeypatch.undo()
    for capability, converts in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        launch._converts_fp8.cache_clear()
        assert launch._converts_fp8(device) is converts
    launch._converts_fp8.cache_clear()


@pytest.mark.parametrize("dtype", WIDE[:2], ids=name)  # fp16 takes the same way as bf16
def test_awkward_sizes_and_addresses(launched: list[Launch], dtype: torch.dtype) -> None:
    """A size of 1 becomes a constant in Triton, and addresses of odd elements lose alignment."""
    run = _library.triton_launcher
    one = torch.ones(())
    for x in (
        normal((1,), dtype),
        offset(normal((33,), dtype)),
        padded_rows(normal((3, 5), dtype)),
    ):
        run("amax")(x)
        run("quantize")(x, torch.float8_e4m3fn, None, False, True)
        run("unscale_")([x.clone()], one, torch.zeros(()))
        run("grad_stats_")([x, x], None, torch.zeros(()), torch.zeros((), dtype=torch.float64))
    for shape in ((1, 1), (1, 7), (7, 1)):
        run("quantize")(normal(shape, dtype), torch.float8_e5m2, one, True, True)
    state = [[normal((1,), torch.float32)] for _ in range(2)]
    numbers = (0.1, 0.9, 0.99, 1e-8, 0.0, True)
    run("adamw_")([x[:1, 0]], [x[:1, 1]], *state, [], [one], *numbers, None, None, None)


def test_launches_of_quantize(launched: list[Launch]) -> None:
    """Current scaling: amax, then the cast; with a scale, or to 16 bits: one launch."""
    run = _library.triton_launcher("quantize")
    x = normal((64, 32), torch.bfloat16)
    for dtype in FP8:
        run(x, dtype, None, True, True)
        run(x, dtype, torch.ones(()), False, True)
    run(x, torch.float16, None, True, True)
    one_dtype = ["amax", "quantize_transpose", "quantize"]
    assert kernels(launched) == [*one_dtype, *one_dtype, "quantize_transpose"]


def test_launches_of_a_step(launched: list[Launch]) -> None:
    """adamw_: the constants of all params, then one launch a param; nothing for empty ones."""
    params = [normal((n,), torch.float32) for n in (5, 0, 5000)]
    lists = [[p.clone() for p in params] for _ in range(3)]
    steps = [torch.zeros(()) for _ in params]
    numbers = (0.1, 0.9, 0.99, 1e-8, 0.0, False)
    _library.triton_launcher("adamw_")(params, *lists, [], steps, *numbers, None, None, None)
    assert kernels(launched) == ["adamw_constants", "adamw", "adamw"]
    assert all(keywords["enable_fp_fusion"] is False for _, keywords, _ in launched)
    launched.clear()
    sums = torch.zeros(()), torch.zeros((), dtype=torch.float64)
    _library.triton_launcher("grad_stats_")(params, torch.ones(()), *sums)
    assert kernels(launched) == ["grad_stats", "grad_stats", "sum"]
