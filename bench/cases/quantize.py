"""quantize, on the CPU and on the GPU: codes, amax and transpose, against the same in torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

import mixprec

from .. import device, verify
from .registry import Workload, case, times_faster

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
BLOCK = 128
CPU_SHAPE = (2048, 2048)  # 4M elements
GPU_SHAPE = (8192, 8192)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BLOCKS = ("row", "block1x128", "block128x128")
Result = tuple[torch.Tensor | None, ...]


def _cast(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x.float() * scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def _torch_tensor(x: torch.Tensor, scale: torch.Tensor | None, transpose: bool) -> Result:
    amax = x.abs().amax().float()
    factor = E4M3_MAX / amax if scale is None else scale
    q = _cast(x, factor)
    return q, q.t().contiguous() if transpose else None, 1.0 / factor, amax


def _torch_row(x: torch.Tensor, scale: None, transpose: bool) -> Result:
    factor = E4M3_MAX / x.abs().amax(1, keepdim=True).float()
    if not transpose:
        return _cast(x, factor), 1.0 / factor
    factor_t = E4M3_MAX / x.abs().amax(0, keepdim=True).float()
    q_t = _cast(x, factor_t).t().contiguous()
    return _cast(x, factor), 1.0 / factor, q_t, 1.0 / factor_t


def _torch_block1x128(x: torch.Tensor, scale: None, transpose: bool) -> Result:
    tiles = x.view(x.shape[0], -1, BLOCK)
    factor = E4M3_MAX / tiles.abs().amax(2, keepdim=True).float()
    q = _cast(tiles, factor).view_as(x), 1.0 / factor
    if not transpose:
        return q
    tiles = x.view(-1, BLOCK, x.shape[1])
    factor = E4M3_MAX / tiles.abs().amax(1, keepdim=True).float()
    return *q, _cast(tiles, factor).view_as(x).t().contiguous(), 1.0 / factor


def _torch_block128x128(x: torch.Tensor, scale: None, transpose: bool) -> Result:
    tiles = x.view(x.shape[0] // BLOCK, BLOCK, x.shape[1] // BLOCK, BLOCK)
    factor = E4M3_MAX / tiles.abs().amax((1, 3), keepdim=True).float()
    q = _cast(tiles, factor).view_as(x)
    return q, 1.0 / factor, q.t().contiguous() if transpose else None


_TORCH: dict[str, Callable[..., Result]] = {
    "tensor": _torch_tensor,
    "row": _torch_row,
    "block1x128": _torch_block1x128,
    "block128x128": _torch_block128x128,
}


def quantize_bytes(
    shape: tuple[int, int], size: int, granularity: str, given: bool, transpose: bool
) -> float:
    """x is read once, or twice where a scale depends on more of it than a block of threads sees;
    q and q^T are written, and the scales."""
    m, k = shape
    blocks = {
        "tensor": 0,
        "row": m + (k if transpose else 0),
        "block1x128": m * (k // BLOCK) * (2 if transpose else 1),
        "block128x128": (m // BLOCK) * (k // BLOCK),
    }[granularity]
    twice = not given if granularity == "tensor" else granularity == "row" and transpose
    return (size * (2 if twice else 1) + (2 if transpose else 1)) * float(m * k) + 4.0 * blocks


def _workload(
    on_gpu: bool,
    shape: tuple[int, int],
    dtype: torch.dtype,
    granularity: str,
    given: bool,
    transpose: bool,
) -> Workload:
    m, k = device.sized(*shape, tiny=2 * BLOCK) if on_gpu else shape
    where = device.DEVICE if on_gpu else torch.device("cpu")
    scale = torch.tensor(64.0, device=where) if given else None

    def inputs(i: int) -> torch.Tensor:
        generator = torch.Generator(where).manual_seed(i)
        return torch.randn(m, k, generator=generator, device=where).to(dtype)

    def ours(x: torch.Tensor) -> mixprec.Quantized:
        return mixprec.quantize(x, mixprec.E4M3, scale, transpose, granularity)

    def results() -> dict[str, torch.Tensor | None]:
        q = ours(inputs(0))
        names = ("data", "scale_inv", "amax", "data_t", "scale_inv_t")
        return {name: getattr(q, name) for name in names}

    def plain(x: torch.Tensor) -> Result:
        return _TORCH[granularity](x, scale, transpose)

    return Workload(
        ours,
        {"torch eager": plain, **({"torch.compile": device.compiled(plain)} if on_gpu else {})},
        partial(verify.same_as_reference, results),
        inputs,
        ops=("quantize",) if on_gpu else (),
        bytes=quantize_bytes((m, k), dtype.itemsize, granularity, given, transpose),
    )


def _on_cpu(name: str, granularity: str, given: bool, times: float, scale: str) -> None:
    case(
        f"quantize/{name}",
        f"fp32 -> e4m3, amax and transpose, {scale}, 4M elements",
        times_faster(times),
        partial(_workload, False, CPU_SHAPE, torch.float32, granularity, given, True),
        quick=given,
    )


def _on_gpu(
    name: str, shape: tuple[int, int], granularity: str, given: bool, transpose: bool
) -> None:
    dtype = DTYPES[name]
    how = ("given" if given else "current") if granularity == "tensor" else granularity
    how += "-transpose" if transpose else ""
    scales = "the scale given" if given else f"scales per {granularity} from this x"
    case(
        f"cuda/quantize/{name}/{how}/{shape[0]}x{shape[1]}",
        f"{name} -> e4m3 and amax{', with the transpose' if transpose else ''}, {scales}",
        times_faster(1.4 if transpose else 1.0),
        partial(_workload, True, shape, dtype, granularity, given, transpose),
        share=0.9,
        quick=True,
    )


_on_cpu("e4m3/given-scale", "tensor", True, 8.0, "scale given")
_on_cpu("e4m3/current-scale", "tensor", False, 8.0, "scale from this amax")
for _granularity in BLOCKS:
    _on_cpu(_granularity, _granularity, False, 3.0, f"granularity {_granularity}")
for _dtype in DTYPES:
    for _transpose in (False, True):
        for _given in (True, False):
            _on_gpu(_dtype, GPU_SHAPE, "tensor", _given, _transpose)
for _granularity in BLOCKS:
    for _transpose in (False, True):
        _on_gpu("bf16", GPU_SHAPE, _granularity, False, _transpose)
for _shape in ((2048, 4096), (16384, 16384)):
    _on_gpu("bf16", _shape, "tensor", False, True)
