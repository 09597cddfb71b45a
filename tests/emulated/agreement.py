"""One call of an op by the kernels under test and by its reference, compared in every bit.

The tests in values/ take the fixture `agree`, an Agreement. conftest.py there makes one for the
kernels of csrc/cuda on the CPU, or for those of Triton in its interpreter, tests/gpu one for a GPU.
Those of products take `variant`, one variant of gemm and gemm_accumulate_ on its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import independent as ind
import pytest
import torch

import mixprec
from mixprec.ops._dispatch.op import OPS

TRITON = [name for name, op in OPS.items() if op.triton is not None]
Shape = tuple[int, ...]
CPU = torch.device("cpu")
CODES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
GUARD = 32  # bytes behind each tensor


def reference(name: str) -> Callable[..., Any]:
    return OPS[name].handle("reference")


def launcher(name: str) -> Callable[..., Any]:
    """Triton's, with arguments in the schema's order."""
    return OPS[name].launcher


def tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in tensors(v)] if isinstance(value, (list, tuple)) else []


def moved(value: Any, device: torch.device, dense: bool = False) -> Any:
    """Copies of all tensors in nested lists and tuples, on `device`, with 0xFF bytes (NaN) around
    and between their elements: in the same layout and distance from a 16-byte boundary, or, if
    `dense`, contiguous at a random distance."""
    if isinstance(value, (list, tuple)):
        return type(value)(moved(v, device, dense) for v in value)
    if not isinstance(value, torch.Tensor):
        return value
    x = value.contiguous() if dense else value
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=device)
    size = x.dtype.itemsize
    first = random.choice((0, 1, 2, 3, 8)) if dense else x.storage_offset()
    extent = first % (16 // size) + sum(
        (n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)
    )
    storage = torch.full((size * (extent + 1) + GUARD,), 0xFF, dtype=torch.uint8, device=device)
    there = storage.view(x.dtype).as_strided(x.shape, x.stride(), first % (16 // size))
    _codes(there).copy_(_codes(x))
    return there


def _codes(x: torch.Tensor) -> torch.Tensor:
    """The elements as integers, those of a broadcast dimension once."""
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())
    return x.view(CODES[x.dtype.itemsize])[once]


def assert_nothing_beside(x: torch.Tensor, what: str) -> None:
    """`moved` made x: the bytes around and between its elements are as they were."""
    if x.numel() > 0:
        codes = _codes(x)
        codes.fill_(255 if codes.dtype == torch.uint8 else -1)
        storage = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
        assert storage.eq(0xFF).all(), f"{what}: written beside its elements"


def assert_bits(got: Iterable[torch.Tensor], want: Iterable[torch.Tensor], what: str = "") -> None:
    """Every tensor has the bits of its partner, which may be on another device."""
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        ind.assert_same_bits(g.detach().cpu(), w.detach().cpu(), f"{what}tensor {i}")


class Budget:
    """What kernels are quick enough for; quick: they can take every combination."""

    most: int
    quick: bool

    def affordable(self, shapes: Iterable[Shape]) -> list[Shape]:
        """Those of at most `most` elements, or (M, N, K) of as many multiplications."""
        return [shape for shape in shapes if prod(shape) <= self.most]

    def some(self, values: Sequence[Any], turn: int) -> Sequence[Any]:
        """All of them, or one in turn where each takes long."""
        return values if self.quick else (values[turn % len(values)],)


@dataclass(frozen=True)
class Agreement(Budget):
    """run: the function of an op's name; dense: it takes contiguous tensors alone; count: of the
    tensors in a long list."""

    run: Callable[[str], Callable[..., Any]]
    want: Callable[[str], Callable[..., Any]] = reference
    device: torch.device = CPU
    dense: bool = False
    quick: bool = True
    most: int = 1 << 19
    count: int = 2000

    def few(self, *values: Any) -> tuple[Any, ...]:
        """All of them, or the first two where a launch takes milliseconds."""
        return values if self.most > 1 << 16 else values[:2]

    def __call__(self, op: str, arguments: Sequence[Any]) -> list[Any]:
        """Results, which are contiguous, and arguments after the call agree; returns those
        arguments. Sums of squares, in an order of their own, agree to 13 digits (or are Inf or
        NaN), and two runs in every bit."""
        ours, same = (moved(list(arguments), d, self.dense) for d in (self.device, CPU))
        got = tensors(self.run(op)(*ours))
        for result in got:
            assert result.is_contiguous(), op
        got += tensors(ours)
        want = [*tensors(self.want(op)(*same)), *tensors(same)]
        after = moved(ours, CPU)
        if op == "grad_stats_":
            sums = ours[3].clone()
            self.run(op)(*ours)
            assert_bits([ours[3]], [sums], f"{op}: two runs, ")
            total, wanted, finite = sums.cpu(), same[3], same[3].isfinite()
            torch.testing.assert_close(total[finite], wanted[finite], rtol=1e-13, atol=0)
            assert torch.equal(total[~finite].isnan(), wanted[~finite].isnan())
            assert not total[~finite].isfinite().any()
            wanted.copy_(total)
        labels = [a for a in arguments if not isinstance(a, (torch.Tensor, list))]
        assert_bits(got, want, f"{op} {labels}: ")
        for i, tensor in enumerate(tensors(ours)):
            assert_nothing_beside(tensor, f"{op}: argument {i}")
        return after


# Products of parameters, of which an emulation takes every fifth.
THINNED = ("test_all_layouts", "test_scales_and_bias", "test_random_and_one_signed_data",
           "test_small_integers")  # fmt: skip


def thin(config: pytest.Config, items: list[pytest.Item]) -> None:
    tests = ([i for i in items if getattr(i, "originalname", "") == name] for name in THINNED)
    dropped = {item for test in tests for n, item in enumerate(test) if (n + n // 5) % 5}
    config.hook.pytest_deselected(items=[*dropped])
    items[:] = [item for item in items if item not in dropped]


@dataclass
class Variant(Budget):
    """Runs calls by one backend; None where it refuses a call."""

    backend: str
    device: torch.device
    most: int = 1 << 40
    quick: bool = True
    ran: int = 0
    refusals: set[str] = field(default_factory=set)

    def __call__(self, op: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The result of op, or its first argument where it returns nothing."""
        try:
            with mixprec.use_backend(self.backend):
                result = op(*args, **options)
        except RuntimeError as error:
            if "no backend can run" not in str(error):
                raise
            self.refusals.add(str(error))
            return None
        self.ran += 1
        return args[0] if result is None else result

    def gemm(self, *args: Any, **options: Any) -> torch.Tensor | None:
        """Of CPU tensors, on the CPU. Nothing else is written."""
        return self._on_device(mixprec.gemm, [], args, options)

    def accumulate(self, acc: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor | None:
        """A new tensor, and acc stays as it is."""
        return self._on_device(mixprec.gemm_accumulate_, [acc], args, options)

    def _on_device(self, op: Any, written: list[Any], args: Any, options: Any) -> Any:
        there, read = moved(written, self.device), moved(list(args), self.device)
        options = dict(zip(options, moved(list(options.values()), self.device), strict=True))
        result = self(op, *there, *read, **options)
        result = None if result is None else result.clone().cpu()
        assert_bits(tensors(read), tensors(list(args)), "an operand has changed, ")
        for x in tensors([there, read]):
            assert_nothing_beside(x, op.__name__)
        return result

    def finish(self) -> None:
        for reason in sorted(self.refusals):
            print(f"left out: {reason}")
        if not self.ran:
            pytest.skip("; ".join(sorted(self.refusals)))
