"""quantize_mx and dequantize_mx, on the CPU and on the GPU, against the same in torch."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch

from mixprec.ops._reference import block_formats
from mixprec.ops.dequantize import dequantize_mx_op as dequantize_mx
from mixprec.ops.quantize_mx import quantize_mx_op as quantize_mx

from .. import device, verify
from .quantize import CPU_SHAPE, E4M3, E4M3_MAX, GPU_SHAPE
from .registry import DTYPES, Workload, case, times_faster

FORMATS = ("mxfp8_e4m3", "nvfp4")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Up to the boundary between neighbours a magnitude has the lower code; a tie goes to the even one.
TIES = torch.tensor([(a + b) / 2 for a, b in pairwise(E2M1)])
BOUNDARIES = torch.where(torch.arange(7) % 2 == 0, TIES, TIES.nextafter(torch.zeros(7)))
Result = tuple[torch.Tensor, ...]


def _in_mxfp8(x: torch.Tensor) -> Result:
    blocks = x.float().view(x.shape[0], -1, 32)
    amax = blocks.abs().amax(2, keepdim=True)
    power = (amax / E4M3_MAX).log2().ceil().clamp(-127, 127)
    data = (blocks * (-power).exp2()).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return data.view(x.shape), (power + 127).to(torch.uint8)[..., 0]


def _in_nvfp4(x: torch.Tensor, scale: torch.Tensor) -> Result:
    blocks = x.float().view(x.shape[0], -1, 16)
    stored = (blocks.abs().amax(2, keepdim=True) * (scale / 6)).clamp(max=E4M3_MAX).to(E4M3)
    y = blocks * (1 / (stored.float() * (1 / scale)))
    code = torch.bucketize(y.abs(), BOUNDARIES.to(x.device), out_int32=True).to(torch.uint8)
    pairs = (code | torch.signbit(y).to(torch.uint8) << 3).view(x.shape[0], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, stored[..., 0]


def _quantize_in_torch(fmt: str, transpose: bool, x: torch.Tensor) -> Result:
    """The codes and the scales of x and of its transpose, and amax."""
    amax = x.abs().amax().float()
    encode = partial(_in_nvfp4, scale=2688 / amax) if fmt == "nvfp4" else _in_mxfp8
    results = [encode(t) for t in ((x, x.t().contiguous()) if transpose else (x,))]
    return *(t for pair in zip(*results, strict=True) for t in pair), amax


def _dequantize_in_torch(
    fmt: str,
    dtype: torch.dtype,
    data: torch.Tensor,
    scales: torch.Tensor,
    of_tensor: torch.Tensor | None,
) -> Result:
    rows = data.shape[0]
    if fmt == "nvfp4":
        values = torch.tensor([*E2M1, *(-v for v in E2M1)], device=data.device)
        elements = values[torch.stack((data & 15, data >> 4), -1).int()].view(rows, -1, 16)
        factor = scales.float() * of_tensor
    else:
        elements = data.float().view(rows, -1, 32)
        factor = (scales.float() - 127).exp2()
    return ((elements * factor[..., None]).to(dtype).view(rows, -1),)


def _workload(
    on_gpu: bool, dtype: torch.dtype, fmt: str, transpose: bool, decodes: bool
) -> Workload:
    m, k = device.sized(*GPU_SHAPE, tiny=256) if on_gpu else CPU_SHAPE

    def cast(x: torch.Tensor) -> Result:
        data, data_t, scale, scale_t, of_tensor, amax = quantize_mx(
            x, fmt, "rceil", transpose, None, False, True
        )
        if decodes:
            return data, scale, of_tensor
        return (data, data_t, scale, scale_t, amax) if transpose else (data, scale, amax)

    def decode(given: Result) -> Result:
        data, scale, of_tensor = given
        tensor = of_tensor if fmt == "nvfp4" else None
        return (dequantize_mx(data, scale, tensor, fmt, k, dtype),)

    def inputs(i: int) -> Any:
        x = device.randn(m, k, dtype=dtype, seed=i, on=device.where(on_gpu))
        return cast(x) if decodes else x

    def plain(given: Any) -> Result:
        if decodes:
            return _dequantize_in_torch(fmt, dtype, *given)
        return _quantize_in_torch(fmt, transpose, given)

    ours = decode if decodes else cast

    def check() -> str | None:
        pairs = zip(plain(inputs(0)), ours(inputs(0)), strict=True)
        return verify.first(
            verify.same_as_reference(lambda: ours(inputs(0))),
            *(verify.equal(f"result {i} in torch", *pair) for i, pair in enumerate(pairs)),
        )

    block, sides = block_formats.BLOCK_FORMATS[fmt].block, 2 if transpose else 1
    codes = m * k * (1 / block_formats.per_byte(fmt) + 1 / block)  # of one side, with scales
    reads = 2 if fmt == "nvfp4" and not decodes else 1
    return Workload(
        ours,
        device.eager_and_compiled(plain, on_gpu),
        check,
        inputs,
        ops=("dequantize_mx" if decodes else "quantize_mx",) if on_gpu else (),
        bytes=float(reads * m * k * dtype.itemsize + sides * codes),
    )


def _case(on_gpu: bool, name: str, fmt: str, transpose: bool, decodes: bool) -> None:
    op, way = ("dequantize_mx", "<-") if decodes else ("quantize_mx", "->")
    how = (f"/{name}" if on_gpu else "") + ("/transpose" if on_gpu and transpose else "")
    gpu = times_faster(1.4 if transpose else 1.0)
    case(
        f"{'cuda/' if on_gpu else ''}{op}/{fmt}{how}",
        f"{name} {way} {fmt}{', with the transpose and amax' if transpose else ''}",
        gpu if on_gpu else times_faster(3.0),
        partial(_workload, on_gpu, DTYPES[name], fmt, transpose, decodes),
        **({"share": 0.9} if on_gpu else {}),
        quick=on_gpu,
    )


for _fmt in FORMATS:
    _case(False, "fp32", _fmt, True, False)
    _case(False, "fp32", _fmt, False, True)
    for _transpose in (False, True):
        _case(True, "bf16", _fmt, _transpose, False)
    _case(True, "bf16", _fmt, False, True)
