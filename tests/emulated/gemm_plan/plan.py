"""The planner of the Hopper GEMM (csrc/cuda/gemm/config) for Python, compiled for these tests."""

from __future__ import annotations

import importlib.util
import sysconfig
from collections import namedtuple
from enum import IntEnum
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from emulated.shim import runner
from torch.utils.cpp_extension import include_paths  # torch's headers hold pybind11's

Major = IntEnum("Major", "k mn", start=0)
Granularity = IntEnum("Granularity", "tensor row block1x128 block128x128", start=0)
Accumulate = IntEnum("Accumulate", "direct promoted scaled", start=0)

# The structs of gemm_plan.h and tile_configs.h, field by field.
Problem = namedtuple(
    "Problem",
    "m n k a b out a_major b_major a_scale b_scale fast_accum accumulate a_aligned b_aligned "
    "out_aligned",
    defaults=(Major.k, Major.k, Granularity.tensor, Granularity.tensor, 0, 0, 1, 1, 1),
)
Gpu = namedtuple("Gpu", "major minor sms shared_bytes", defaults=(9, 0, 132, 232448))
Override = namedtuple("Override", "tile_config splits group", defaults=(-1, 0, 0))
Tiles = namedtuple("Tiles", "m_tiles n_tiles splits group")
Config = namedtuple(
    "Config",
    "tile_config stages tiles chunks_per_split grid shared_bytes workspace_bytes tma_store",
)


class TileConfig(
    namedtuple("Fields", "index fp8 accumulate block_m block_n consumers cluster chunk_elements")
):
    @property
    def sums(self) -> str:
        return Accumulate(self.accumulate).name

    def __str__(self) -> str:
        return f"{self.index}_{self.sums}_{self.block_m}x{self.block_n}x{self.cluster}"


H200, PLANNED = Gpu(), Override()


@cache
def compiled() -> ModuleType:
    include = [f"-isystem{path}" for path in [*include_paths(), sysconfig.get_path("include")]]
    source = Path(__file__).with_name("binding.cpp")
    path = runner.compile_(["-shared", "-fvisibility=hidden", *include, source], ".so")
    spec = importlib.util.spec_from_file_location("gemm_plan", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tile_configs() -> list[TileConfig]:
    return [TileConfig(i, *row) for i, row in enumerate(compiled().tile_configs())]


def numbers(asked: Problem) -> list[int]:
    return [runner.DTYPES.index(x) if isinstance(x, torch.dtype) else int(x) for x in asked]


def plan_gemm(
    asked: Problem, gpu: Gpu = H200, forced: Override = PLANNED, measured: int = -1
) -> Config | None:
    found = compiled().plan_gemm(numbers(asked), gpu, forced, measured)
    return found and Config(*found)._replace(tiles=Tiles(*found[2]))


def reasons_against(asked: Problem, gpu: Gpu = H200, forced: Override = PLANNED) -> list[str]:
    return compiled().reasons_against(numbers(asked), gpu, forced).split("; ")[1:]
