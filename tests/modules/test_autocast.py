"""autocast: regions with another recipe or none, and the ops that stay in FP32."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cases import for_each, observed
from layer_cases import Twice
from torch import nn
from torch.nn import functional as F

import mixprec
from mixprec.nn.autocast import FP32_OPS

LOW = (torch.bfloat16, torch.float16)
DOC = Path(__file__).resolve().parents[2] / "docs" / "autocast.md"


def model(recipe: str = "fp8") -> nn.Sequential:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 48), nn.GELU(), Twice(48, 8))
    return mixprec.convert(plain, recipe)  # type: ignore[return-value]


def formats(run: Callable[..., object], *args: object) -> set[str]:
    """The formats of the operands of the GEMMs that a call runs."""
    seen: set[str] = set()
    with observed(lambda kind, name, a, b: seen.update((a, b))):
        run(*args)
    return seen


def test_regions_choose_the_recipe() -> None:
    converted, x = model(), torch.randn(4, 32)
    assert formats(converted, x) == {"e4m3"}
    with mixprec.autocast("bf16"):
        assert formats(converted, x) == {"bf16"}
        with mixprec.autocast(enabled=False):
            assert formats(converted, x) == set()
            with mixprec.autocast():
                assert formats(converted, x) == {"e4m3"}
            assert formats(converted, x) == set()
        assert formats(converted, x) == {"bf16"}
    assert formats(converted, x) == {"e4m3"}


def test_methods_of_the_table_in_compiled_code() -> None:
    """`x ** 2` and others, which are functions of torch in Python."""

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        with mixprec.autocast():
            return [x**2, 2**x, x.norm(), x.exp()]

    x = torch.randn(4, 8, dtype=torch.bfloat16)
    for got, right in zip(torch.compile(run, backend="aot_eager")(x), run(x), strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, right)


def test_a_decorator_and_an_exception_restore_what_held() -> None:
    converted, x = model(), torch.randn(4, 32)
    region = mixprec.autocast("fp16")

    @region
    def run() -> set[str]:
        """a docstring"""
        return formats(converted, x)

    assert run() == {"fp16"}
    assert run.__doc__ == "a docstring"
    with pytest.raises(ZeroDivisionError), region, region:  # one object may be entered again
        _ = 1 / 0
    assert formats(converted, x) == {"e4m3"}


CALLS = {
    "exp": lambda x: x.exp(),
    "log": lambda x: torch.log(x.abs() + 1),
    "pow": lambda x: x**3,
    "softmax": lambda x: F.softmax(x, -1),
    "torch.softmax": lambda x: torch.softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "norm": lambda x: x.norm(),
    "vector_norm": lambda x: torch.linalg.vector_norm(x),
    "sum": lambda x: x.sum(),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long)),
    "bce": lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones_like(x)),
}


@for_each("dtype", LOW)
@for_each("call", CALLS)
def test_delicate_ops_compute_and_return_fp32(call: str, dtype: torch.dtype) -> None:
    x = torch.randn(6, 64).to(dtype)
    assert CALLS[call](x).dtype == dtype  # torch's own CPU ops, outside
    with mixprec.autocast():
        y = CALLS[call](x)
    assert y.dtype == torch.float32
    if call not in ("log", "bce"):  # those have 16-bit ops inside the call
        assert torch.equal(y, CALLS[call](x.float()))


def test_other_ops_and_wanted_dtypes_are_left_alone() -> None:
    x = torch.randn(4, 8).bfloat16()
    with mixprec.autocast():
        assert (x + x).dtype == torch.bfloat16
        assert (x @ x.t()).dtype == torch.bfloat16
        assert x.sum(dtype=torch.bfloat16).dtype == torch.bfloat16
        assert F.relu(x).dtype == torch.bfloat16
        assert torch.arange(4).sum().dtype == torch.int64
        assert x.double().sum().dtype == torch.float64
    with mixprec.autocast("bf16"), mixprec.autocast(enabled=False):
        assert x.exp().dtype == torch.bfloat16
        with mixprec.autocast():
            assert x.exp().dtype == torch.float32


def test_the_table_of_the_docs_is_that_of_the_code() -> None:
    rows = re.findall(r"\| (\w+) \| computed and returned in FP32 \| (.*) \|", DOC.read_text())
    documented = {group: re.findall(r"`(\w+)`", names) for group, names in rows}
    public = {k: [n for n in names if n[0] != "_"] for k, names in FP32_OPS.items()}
    assert documented == public
    places = (torch, torch.Tensor, F, torch.special, torch.linalg)
    for group, names in FP32_OPS.items():
        for name in names:
            assert any(hasattr(place, name) for place in places), f"{group}: {name}"


def test_a_recipe_with_state_and_what_runs_after_the_call_are_refused() -> None:
    def generate() -> Iterator[int]:
        yield 1

    async def coroutine() -> None: ...

    for function in (generate, coroutine):
        with pytest.raises(TypeError, match="enter the region inside of it"):
            mixprec.autocast()(function)
    with pytest.raises(ValueError, match=r"fp8-delayed.*convert"):
        mixprec.autocast("fp8-delayed")
