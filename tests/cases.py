"""Test cases: shapes, layouts, dtypes, awkward values (empties first), and loops over them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from mixprec.functional import _products
from mixprec.recipes import Recipe

WIDE = (torch.float32, torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
GRADS = (*WIDE, torch.float64)

Shapes = tuple[tuple[int, ...], ...]
EMPTY: Shapes = ((0,), (0, 5), (5, 0), (4, 0, 3))
# Primes, and 2^k with its neighbours.
VECTORS: Shapes = ((), (1,), (7,), (31,), (32,), (33,), (127,), (129,))
MATRICES: Shapes = ((1, 1), (13, 17), (63, 65), (64, 64), (1, 1009), (1009, 1), (128, 257))
SHAPES: Shapes = (*EMPTY, *VECTORS, *MATRICES, (2, 3, 5), (3, 1, 129), (2, 3, 2, 7))


def contiguous(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def transposed(x: torch.Tensor) -> torch.Tensor:
    """The last two dimensions swapped in memory."""
    return contiguous(x.transpose(-1, -2)).transpose(-1, -2) if x.dim() > 1 else contiguous(x)


def permuted(x: torch.Tensor) -> torch.Tensor:
    """Dense, all dimensions in reverse order in memory."""
    order = tuple(reversed(range(x.dim())))
    return contiguous(x.permute(order)).permute(order)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Dense, the first dimension innermost in memory (channels-last like)."""
    return contiguous(x.movedim(0, -1)).movedim(-1, 0) if x.dim() > 1 else contiguous(x)


def every_second(x: torch.Tensor) -> torch.Tensor:
    """Every second element of a twice as wide buffer full of NaN."""
    if x.dim() == 0:
        return offset(x)
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), math.nan).to(x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def padded_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows that are three elements longer in memory, the rest NaN."""
    if x.dim() == 0:
        return offset(x)
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), math.nan).to(x.dtype)
    wide[..., 1:-2] = x
    return wide[..., 1:-2]


def offset(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, but starting one element into its storage: no 16-byte alignment."""
    storage = torch.full((x.numel() + 1,), math.nan).to(x.dtype)
    storage[1:] = x.reshape(-1)
    return storage[1:].view(x.shape)


def odd_strides_of_ones(x: torch.Tensor) -> torch.Tensor:
    """Dimensions of size 1 carry a stride that no kernel may use."""
    x = contiguous(x)
    strides = [999 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(x.shape, strides)


def expanded_rows(x: torch.Tensor) -> torch.Tensor:
    """The first row, with stride 0 in every other dimension. Other values than x's."""
    if x.dim() < 2 or x.numel() == 0:
        return contiguous(x)
    return contiguous(x[(0,) * (x.dim() - 1)]).expand(x.shape)


def expanded_last(x: torch.Tensor) -> torch.Tensor:
    """The first element of each row, with stride 0 along the row. Other values than x's."""
    return contiguous(x[..., :1]).expand(x.shape) if x.dim() and x.numel() else contiguous(x)


Layout = Callable[[torch.Tensor], torch.Tensor]
# Layouts that can be written in place, and those that can only be read.
WRITABLE: tuple[Layout, ...] = (contiguous, transposed, permuted, rotated, every_second)
WRITABLE += (padded_rows, offset, odd_strides_of_ones)
LAYOUTS: tuple[Layout, ...] = (*WRITABLE, expanded_rows, expanded_last)


def name(case: object) -> str:
    """A short name for a case."""
    if isinstance(case, torch.dtype):
        return str(case).removeprefix("torch.")
    if isinstance(case, torch.Tensor):
        return f"{name(case.dtype)}[{','.join(map(str, case.shape))}]"
    if isinstance(case, dict):
        return "-".join(case) or "plain"
    if isinstance(case, tuple | list) and not all(isinstance(n, int) for n in case):
        return "-".join(map(name, case))
    if isinstance(case, tuple):
        return "x".join(map(str, case)) or "scalar"
    return str(getattr(case, "__name__", None) or getattr(case, "name", None) or case)


def from_bits(pattern: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of `dtype` from unsigned bit patterns of its width."""
    signed = np.ascontiguousarray(pattern).view(f"int{8 * pattern.itemsize}")
    if pattern.itemsize == 1:
        signed = signed.view(np.uint8)
    return torch.from_numpy(signed.copy()).view(dtype)


def random_bits(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """`count` patterns drawn evenly from all of them: every exponent, NaN and Inf included."""
    width = torch.empty((), dtype=dtype).element_size()
    rng = np.random.default_rng(seed)
    pattern = rng.integers(0, 1 << (8 * width), count, dtype=np.uint64).astype(f"uint{8 * width}")
    return from_bits(pattern, dtype)


def normal(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Standard normal values, reproducible, rounded to `dtype` by torch."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def small_integers(
    shape: tuple[int, ...], dtype: torch.dtype, limit: int = 7, seed: int = 0
) -> torch.Tensor:
    """Integers in [-limit, limit]: exact in every format up to 7 (E5M2), sums exact in FP32."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-limit, limit + 1, shape, generator=generator).double()
    return drawn.to(dtype)


def random_list(rng: random.Random, count: int, dtypes: tuple[torch.dtype, ...] = GRADS) -> list:
    """`count` vectors of mixed dtypes, 0 to 40 elements, every other element of memory or all."""
    tensors = []
    for i in range(count):
        size, step = rng.choice([0, 1, 2, 3, 7, 16, 17, 33, 40]), rng.choice([1, 1, 2, 3])
        tensors.append(normal((size * step,), rng.choice(dtypes), seed=i)[::step])
    return tensors


def for_each(names: str, values: Iterable[Any]) -> Callable:
    """pytest.mark.parametrize as a loop in one test, for cases cheaper than a test id (3 ms).

    Each case starts from the same seed, and what fails names its case.
    """
    keys, values = names.split(", "), tuple(values)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def loop(**fixtures: Any) -> None:
            for value in values:
                torch.manual_seed(0)
                case = dict(zip(keys, value if len(keys) > 1 else (value,), strict=True))
                try:
                    test(**fixtures, **case)
                except Exception as error:
                    label = ", ".join(f"{key}={name(v)}" for key, v in case.items())
                    raise AssertionError(f"{label}: {type(error).__name__}: {error}") from error

        signature = inspect.signature(test)
        left = [p for key, p in signature.parameters.items() if key not in keys]
        loop.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return loop

    return decorate


@contextlib.contextmanager
def observed(callback: Callable[[str, str, str, str], object]) -> Iterator[None]:
    """Calls callback(kind, layer, format of a, format of b) before each product in the block."""

    def listener(kind: str, recipe: Recipe, layer: str) -> None:
        callback(kind, layer, *(fmt.name for fmt in getattr(recipe, kind)))

    _products.listeners.append(listener)
    try:
        yield
    finally:
        _products.listeners.remove(listener)


def pairwise(first: Sequence[Any], second: Sequence[Any], *others: Sequence[Any]) -> list[tuple]:
    """Cases in which any two values of different lists meet; the longest two come first."""
    return [
        (x, y, *(other[(i + j) % len(other)] for other in others))
        for i, x in enumerate(first)
        for j, y in enumerate(second)
    ]


def nearest(recipe: Any) -> Any:
    """`recipe` (a name or a Recipe) without stochastic rounding: two runs give the same bits."""
    parsed = Recipe.parse(recipe)
    products = {n: dataclasses.replace(r, stochastic_rounding=()) for n, r in parsed.products}
    return dataclasses.replace(parsed, stochastic_rounding=(), products=products)
