"""The kernels that the tests here run: those of csrc/cuda on the shim, or, under
TRITON_INTERPRET=1, those of Triton. (tests/gpu runs the same tests on a GPU.)"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
from emulated.agreement import CPU, Agreement, Variant, launcher, thin
from emulated.shim import runner

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED:
    collect_ignore = ["test_gemm_values.py"]  # that of csrc/cuda needs a larger model: ../hopper
elif importlib.util.find_spec("triton") is not None:
    from emulated.triton_interpreter.helpers import choose, ops_on_the_cpu
else:
    collect_ignore_glob = ["test_*"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A kernel that computes Inf or NaN is not in error; NumPy, under the interpreter, warns."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
    if INTERPRETED:
        for item in items:
            if "test_infinities" in item.name and "[tall" in item.name and "e4m3" in item.name:
                reason = "the interpreter itself converts the NaN of E4M3 to 480"
                item.add_marker(pytest.mark.skip(reason=reason))
        thin(config, items)


@pytest.fixture
def agree(poisoned: None) -> Agreement:
    if INTERPRETED:  # which takes 5 to 10 ms a launch
        return Agreement(launcher, quick=False, most=16_000, count=24)
    return Agreement(runner.OPS.__getitem__, dense=True, quick=False, most=1 << 17)


@pytest.fixture(params=["tall", "wide"])
def variant(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, poisoned: None
) -> Iterator[Variant]:
    choose(monkeypatch, request.param)
    for _ in ops_on_the_cpu(monkeypatch):
        yield Variant("triton", CPU, most=1 << 19, quick=False)
