"""The planner of the Hopper GEMM (csrc/cuda/gemm/config) for Python, compiled for these tests.

binding.cpp says what it holds; names are looked up in the compiled module: plan.GemmProblem.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from emulated.shim import runner
from torch.utils.cpp_extension import include_paths  # torch's headers hold pybind11's


@cache
def _module() -> ModuleType:
    include = [f"-isystem{path}" for path in [*include_paths(), sysconfig.get_path("include")]]
    source = Path(__file__).with_name("binding.cpp")
    path = runner.compile_(["-shared", "-fvisibility=hidden", *include, source], ".so")
    spec = importlib.util.spec_from_file_location("gemm_plan", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def __getattr__(name: str) -> Any:
    return getattr(_module(), name)
