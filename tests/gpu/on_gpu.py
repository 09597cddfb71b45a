"""The same call on the GPU and on the CPU, compared bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

import mixprec
from mixprec.bench.gpu.device import FAKE_NAME
from mixprec.ops._dispatch.op import OPS

# tests/emulated/device: a GPU in everything but speed, and without what inductor generates.
FAKE_DEVICE = torch.cuda.is_available() and torch.cuda.get_device_name() == FAKE_NAME

Shape = tuple[int, ...]


def affordable(shapes: Iterable[Shape], most: int = 2**16) -> tuple[Shape, ...]:
    """Those shapes that the device is quick enough for. most: elements of a tensor, or
    multiplications of a GEMM (M, N, K)."""
    return tuple(s for s in shapes if not FAKE_DEVICE or math.prod(s) <= most)


def affordable_gemms(shapes: Iterable[Shape]) -> tuple[Shape, ...]:
    return affordable(shapes, most=2**21)


def moved(value: Any, device: torch.device) -> Any:
    """Copies of all tensors in nested lists and tuples, on `device`, in the same memory layout."""
    if isinstance(value, torch.Tensor):
        return _same_layout(value, device)
    if isinstance(value, (list, tuple)):
        return type(value)(moved(v, device) for v in value)
    return value


def _same_layout(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """With x's strides and its distance from a 16-byte boundary; the memory between is poison."""
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=device)
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    first = x.storage_offset() % (16 // min(16, x.dtype.itemsize))
    storage = torch.full((x.dtype.itemsize * (first + extent),), 0xFF, dtype=torch.uint8)
    there = storage.to(device).view(x.dtype)
    result = there.as_strided(x.shape, x.stride(), first)
    # A broadcast dimension is written once.
    index = tuple(slice(0, 1) if s == 0 else slice(None) for s in x.stride())
    codes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    result.view(codes)[index] = x.view(codes)[index].to(device)
    return result


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from tensors(v)


def bits_differ(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """None where every element has the same bits, any NaN equal to any other."""
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return f"{tuple(got.shape)} {got.dtype}, not {tuple(want.shape)} {want.dtype}"
    got = got.detach().cpu()
    if not got.dtype.is_floating_point:
        bad = got != want
    else:
        codes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        kind = codes[got.dtype.itemsize]
        g, w = got.contiguous(), want.detach().contiguous()
        nan = torch.isnan(g.float()) & torch.isnan(w.float())
        bad = (g.view(kind) != w.view(kind)) & ~nan
    if not bad.any():
        return None
    at = tuple(bad.nonzero()[0].tolist())
    return f"{int(bad.sum())} of {bad.numel()} differ, at {at}: {got[at]!r}, not {want[at]!r}"


def assert_bits(got: Iterable[torch.Tensor], want: Iterable[torch.Tensor], what: str = "") -> None:
    """Every tensor has the bits of its partner, which may be on another device."""
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        wrong = bits_differ(g, w.cpu())
        assert wrong is None, f"{what}tensor {i}: {wrong}"


def assert_same(
    op: str,
    arguments: list[Any],
    device: torch.device,
    close: Callable[[torch.Tensor], bool] = lambda _: False,
) -> None:
    """Run `op` on copies on `device` with the backend in force, and on the CPU kernels; results
    and arguments afterwards agree bit for bit (those that `close` names: to 13 digits)."""
    there, here = moved(arguments, device), moved(arguments, torch.device("cpu"))
    got = [*tensors(OPS[op](*there)), *tensors(there)]
    with mixprec.use_backend("cpp"):
        want = [*tensors(OPS[op](*here)), *tensors(here)]
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if close(w):
            torch.testing.assert_close(g.cpu(), w, rtol=1e-13, atol=0, equal_nan=True)
        else:
            assert_bits([g], [w], f"{op} {i}, ")
