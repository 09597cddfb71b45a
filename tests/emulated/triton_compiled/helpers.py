"""What the tests that compile Triton kernels share: no GPU is needed for that.

They need a process in which triton was imported without TRITON_INTERPRET.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton", reason="triton is not installed (pip install triton)")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels: runs without TRITON_INTERPRET", allow_module_level=True)

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from mixprec.triton_kernels import launch


def local_bytes(kernel: Any) -> int:
    """Of a thread: registers that are spilled, and arrays; none of a frame that nothing uses."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(kernel.asm["cubin"])
        file.flush()

        def said(option: str) -> str:
            command = [knobs.nvidia.cuobjdump.path, option, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        found = re.findall(r"STACK:(\d+) .*LOCAL:(\d+)", said("-res-usage"))
        assert len(found) == 1, found
        used = sum(map(int, found[0]))
        # The machine code, which takes a second, where there is anything to look for.
        return used if used and re.search(r"\b(?:LDL|STL)\b", said("-sass")) else 0


class OneGpu:
    """A Triton driver for compiling only."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # compiled kernels are kept per device: not with a GPU's own

    def get_current_stream(self, _: int) -> int:
        return 0


class Launch(NamedTuple):
    name: str
    keywords: dict[str, Any]
    grid: tuple[int, ...]
    compiled: Any
    kernel: Any
    values: dict[str, Any]  # all arguments by name

    @property
    def stem(self) -> str:
        return self.name.removesuffix("_kernel")


def record_launches(monkeypatch: pytest.MonkeyPatch, capability: int = 90) -> list[Launch]:
    """Every launch from now on: the kernel is compiled for its arguments, and not run."""
    launches: list[Launch] = []
    compile_only = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
        assert all(1 <= n < 2**31 for n in grid), f"{self.__name__}: grid {grid}"
        compiled = compile_only(self, *args, grid=grid, warmup=True, **keywords)
        values = dict(zip(self.arg_names, args, strict=False)) | keywords
        launches.append(Launch(self.__name__, keywords, grid, compiled, self, values))
        return compiled

    monkeypatch.setattr(driver, "_active", OneGpu(capability))
    monkeypatch.setattr(launch, "_converts_fp8", lambda _: capability >= 89)
    monkeypatch.setattr(JITFunction, "run", run)
    return launches


def offsets(ttir: str) -> set[str]:
    """The types of what is added to the addresses of arrays of unbounded size, as the IR before any
    optimisation shows them. (Steps and partial sums are counted by int32: 2^31 of either fill no
    machine.)"""
    return set(re.findall(r"tt\.addptr .*, tensor<[0-9x]*x(i\d+)>", ttir))


def check_zeros(ttir: str) -> None:
    """No float is negated: Triton 3.6 and 3.7 compile -x as 0 - x, which loses -0. x * -1.0."""
    assert "arith.negf" not in ttir
    for zero in re.findall(r"(%\S+) = arith.constant (?:dense<)?0\.0+e\+00", ttir):
        assert f"arith.subf {zero}," not in ttir


DOUBLE = {"lr", "eps", "max_value", "max_norm", "growth_factor", "backoff_factor"}
DOUBLE |= {f"setting{i}" for i in range(4)}
LONG = {"seed", "counter"}


def check_declarations(one: Launch) -> None:
    """Triton passes a Python number as fp32, or as the narrowest integer, unless the parameter
    says otherwise."""
    for parameter in one.kernel.params:
        declared = "fp64" if parameter.name in DOUBLE else "i64" if parameter.name in LONG else ""
        assert parameter.is_constexpr or parameter.annotation_type == declared, parameter.name
