"""quantize, on the CPU and on the GPU: codes, amax and transpose, against the same in torch; and on
the GPU amax and dequantize."""

from __future__ import annotations

from functools import partial

import torch

import mixprec

from .. import device, verify
from .registry import GPU_DTYPES, Workload, case, times_faster, with_fresh_results

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
BLOCK = 128
CPU_SHAPE = (2048, 2048)  # 4M elements
GPU_SHAPE = (8192, 8192)
BOTH = (False, True)
Result = tuple[torch.Tensor, ...]
# The height and width of a block with a scale of its own; 0: all of x.
BLOCKS = {"tensor": (0, 0), "row": (1, 0), "block1x128": (1, BLOCK), "block128x128": (BLOCK, BLOCK)}


def _cast(x: torch.Tensor, height: int, width: int, scale: torch.Tensor | None) -> Result:
    """Codes, inverse scales and the amax of each block."""
    m, k = x.shape
    blocks = x.view(m // (height or m), height or m, k // (width or k), width or k)
    amax = blocks.abs().amax((1, 3), keepdim=True).float()
    factor = E4M3_MAX / amax if scale is None else scale
    codes = (blocks.float() * factor).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return codes.view_as(x), 1.0 / factor, amax


def in_torch(
    granularity: str, scale: torch.Tensor | None, transpose: bool, x: torch.Tensor
) -> Result:
    height, width = BLOCKS[granularity]
    q = _cast(x, height, width, scale)
    if not transpose:
        return q
    if height == width:
        return *q, q[0].t().contiguous()
    codes, *scales = _cast(x, width, height, scale)
    return *q, codes.t().contiguous(), *scales


def quantize_bytes(
    shape: tuple[int, int], size: int, granularity: str, given: bool, transpose: bool
) -> float:
    """x is read once, or twice where a scale depends on more of it than a block of threads sees;
    q and q^T are written, and the scales."""
    m, k = shape
    height, width = BLOCKS[granularity]
    scales = (m // (height or m)) * (k // (width or k))
    if transpose and height != width:
        scales += (m // (width or m)) * (k // (height or k))
    twice = not given if granularity == "tensor" else granularity == "row" and transpose
    return (size * (2 if twice else 1) + (2 if transpose else 1)) * float(m * k) + 4.0 * scales


def _workload(
    on_gpu: bool,
    shape: tuple[int, int],
    dtype: torch.dtype,
    granularity: str,
    given: bool,
    transpose: bool,
    fresh: bool = False,
) -> Workload:
    m, k = device.sized(*shape, tiny=2 * BLOCK) if on_gpu else shape
    where = device.where(on_gpu)
    scale = torch.tensor(64.0, device=where) if given else None

    def inputs(i: int) -> torch.Tensor:
        return device.randn(m, k, dtype=dtype, seed=i, on=where)

    def ours(x: torch.Tensor) -> mixprec.Quantized:
        return mixprec.quantize(x, mixprec.E4M3, scale, transpose, granularity)

    baselines = device.eager_and_compiled(partial(in_torch, granularity, scale, transpose), on_gpu)
    if fresh:
        baselines = {name: with_fresh_results(run) for name, run in baselines.items()}
    return Workload(
        with_fresh_results(ours) if fresh else ours,
        baselines,
        # data, scale_inv, amax, data_t, scale_inv_t
        partial(verify.same_as_reference, lambda: ours(inputs(0))[:5]),
        inputs,
        ops=("quantize",) if on_gpu else (),
        bytes=quantize_bytes((m, k), dtype.itemsize, granularity, given, transpose),
    )


_ON_CPU = (
    # name, granularity, scale given, times the baseline
    ("e4m3/given-scale", "tensor", True, 8.0),
    ("e4m3/current-scale", "tensor", False, 8.0),
    *((granularity, granularity, False, 3.0) for granularity in list(BLOCKS)[1:]),
)
for _name, _granularity, _given, _times in _ON_CPU:
    case(
        f"quantize/{_name}",
        f"fp32 -> e4m3, amax and transpose, {_name}, 4M elements",
        times_faster(_times),
        partial(_workload, False, CPU_SHAPE, torch.float32, _granularity, _given, True),
        quick=_given,
    )
    if _granularity == "tensor":
        case(
            f"quantize/{_name}/fresh-results",
            f"the same as quantize/{_name}, with results in memory that was not in use before",
            times_faster(7.0),
            partial(
                _workload, False, CPU_SHAPE, torch.float32, _granularity, _given, True, fresh=True
            ),
        )

_ON_GPU: list[tuple[str, tuple[int, int], str, bool, bool]] = [
    # dtype, shape, granularity, scale given, transpose
    (d, GPU_SHAPE, "tensor", given, t)
    for d in GPU_DTYPES
    for t in BOTH
    for given in (True, False)
]
_ON_GPU += [("bf16", GPU_SHAPE, kind, False, t) for kind in list(BLOCKS)[1:] for t in BOTH]
_ON_GPU += [("bf16", shape, "tensor", False, True) for shape in ((2048, 4096), (16384, 16384))]
for _name, _shape, _granularity, _given, _transpose in _ON_GPU:
    _how = ("given" if _given else "current") if _granularity == "tensor" else _granularity
    _scales = "the scale given" if _given else f"scales per {_granularity} from this x"
    case(
        f"cuda/quantize/{_name}/{_how}{'-transpose' * _transpose}/{_shape[0]}x{_shape[1]}",
        f"{_name} -> e4m3 and amax{', with the transpose' * _transpose}, {_scales}",
        times_faster((1.15 if _how == "current" else 1.4) if _transpose else 1.0),
        partial(_workload, True, _shape, GPU_DTYPES[_name], _granularity, _given, _transpose),
        share=0.9,
        quick=True,
    )


def _amax(dtype: torch.dtype) -> Workload:
    m, k = device.sized(*GPU_SHAPE)
    inputs = partial(device.randn, m, k, dtype=dtype)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x.abs().amax().float()

    return Workload(
        mixprec.amax,
        device.eager_and_compiled(plain),
        lambda: verify.equal("amax", mixprec.amax(inputs()), plain(inputs())),
        lambda i: inputs(seed=i),
        ops=("amax",),
        bytes=float(dtype.itemsize * m * k),
    )


def _dequantize(granularity: str, dtype: torch.dtype) -> Workload:
    m, k = device.sized(*GPU_SHAPE, tiny=2 * BLOCK)

    def inputs(i: int) -> mixprec.Quantized:
        with mixprec.use_backend("reference"):
            x = device.randn(m, k, dtype=torch.bfloat16, seed=i)
            return mixprec.quantize(x, mixprec.E4M3, granularity=granularity)

    def plain(q: mixprec.Quantized) -> torch.Tensor:
        if granularity == "tensor":
            return (q.data.float() * q.scale_inv).to(dtype)
        tiles = q.data.view(m, -1, BLOCK).float() * q.scale_inv.unsqueeze(2)
        return tiles.to(dtype).view(m, k)

    scales = 0 if granularity == "tensor" else m * (k // BLOCK)
    return Workload(
        lambda q: mixprec.dequantize(q, dtype),
        device.eager_and_compiled(plain),
        lambda: verify.equal("x", mixprec.dequantize(inputs(0), dtype), plain(inputs(0))),
        inputs,
        ops=("dequantize",),
        bytes=float((1 + dtype.itemsize) * m * k + 4 * scales),
    )


_SIZE = "x".join(map(str, GPU_SHAPE))
for _name, _dtype in GPU_DTYPES.items():
    _make, _what = partial(_amax, _dtype), f"max |x| of {_name}"
    case(f"cuda/amax/{_name}/{_SIZE}", _what, times_faster(1.0), _make, share=0.9, quick=True)
    for _kind in ("tensor", "block1x128") if _name == "bf16" else ("tensor",):
        _make, _what = partial(_dequantize, _kind, _dtype), f"e4m3 -> {_name}, scales per {_kind}"
        _case = f"cuda/dequantize/{_kind}-{_name}/{_SIZE}"
        case(_case, _what, times_faster(1.0), _make, share=0.9, quick=True)
