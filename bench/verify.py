"""Values before speed: each function returns None when they are right, else what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from mixprec import testing, use_backend


def _close(
    name: str, got: torch.Tensor, expected: torch.Tensor, bound: float | torch.Tensor
) -> str | None:
    if got.shape == expected.shape and bool(((got - expected).abs() <= bound).all()):
        return None  # the plain case, without the thorough look for Inf and NaN below
    try:
        testing.assert_close(got, expected, bound, show=1)
    except AssertionError as error:
        return f"{name}: {' '.join(str(error).split())}"
    return None


def gemm(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, factor: float = 1.0, *,
    most: tuple[int, int] = (2048, 2048),
) -> str | None:  # fmt: skip
    """c [M, N] against a [M, K] @ b [K, N] in FP64, within FP32 accumulation and one rounding.

    factor: of both scales together, a power of two. most: of so many rows and columns, from both
    ends and between.
    """
    rows, cols = (_some(n, limit, c.device) for n, limit in zip(c.shape, most, strict=True))
    c, a, b = c[rows][:, cols], _codes(a)[rows].view(a.dtype), _codes(b)[:, cols].view(b.dtype)
    exact = a.double() @ b.double()
    tensor_core = a.device.type == "cuda" and a.dtype.itemsize == 1
    bound = testing.tolerance(exact, a, b, c.dtype, fp8_tensor_core=tensor_core)
    return _close("c", c, exact * factor, bound * factor)


def _codes(x: torch.Tensor) -> torch.Tensor:
    """Not every torch can pick rows of an FP8 tensor."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _some(count: int, most: int, device: torch.device) -> torch.Tensor:
    if count <= most:
        return torch.arange(count, device=device)
    ends = torch.arange(most // 3)
    middle = torch.randint(count, (most // 3,), generator=torch.Generator().manual_seed(count))
    return torch.cat([ends, middle, count - 1 - ends]).to(device)


def equal(name: str, got: torch.Tensor, expected: torch.Tensor) -> str | None:
    """The same values in the same dtype; any NaN is equal to any other."""
    if got.dtype != expected.dtype:
        return f"{name} is {got.dtype}, not {expected.dtype}"
    return _close(name, got.float(), expected.float(), 0.0)


def same_as_reference(run: Callable[[], Iterable[torch.Tensor | None]]) -> str | None:
    """What `run` returns on the backend in force equals what it returns on the reference."""
    got = run()
    with use_backend("reference"):
        want = run()
    pairs = [p for p in zip(got, want, strict=True) if p[0] is not None and p[1] is not None]
    return first(*(equal(f"result {i}", *pair) for i, pair in enumerate(pairs)))


def close(
    names: str,
    got: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    *,
    rtol: float,
    atol: float,
) -> str | None:
    """Lists of tensors, element by element within atol + rtol * |expected|."""
    if len(got) != len(expected):
        return f"{len(got)} {names}, not {len(expected)}"
    return first(
        *(
            _close(f"{names}[{i}]", x.detach(), y.detach(), atol + rtol * y.detach().abs())
            for i, (x, y) in enumerate(zip(got, expected, strict=True))
        )
    )


def sqnr_at_least(
    bars: Mapping[str, float], got: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]
) -> str | None:
    """The signal-to-noise ratio of each tensor, by name, is so many dB or more."""
    for (name, bar), x, exact in zip(bars.items(), got, expected, strict=True):
        if not (decibels := testing.sqnr(exact, x)) >= bar:
            return f"{name} has an SQNR of {decibels:.1f} dB, below {bar:g} dB"
    return None


def first(*findings: str | None) -> str | None:
    """The first thing that is wrong, or None."""
    return next((f for f in findings if f is not None), None)
