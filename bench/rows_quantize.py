"""quantize: fp32 -> E4M3 with the amax and the transpose, against the same in torch eager."""

from __future__ import annotations

from functools import partial

import torch

import mixprec

from . import verify
from .registry import Case, row, times_faster

SHAPE = (2048, 2048)  # 4M elements
E4M3_MAX = 448.0


def _case(given: bool) -> Case:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor(64.0) if given else None

    def eager() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        amax = x.abs().amax()
        factor = E4M3_MAX / amax if scale is None else scale
        q = (x * factor).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return q, q.t().contiguous(), amax

    ours = partial(mixprec.quantize, x, mixprec.E4M3, scale, transpose=True)

    def check() -> str | None:
        q = ours()
        with mixprec.use_backend("reference"):
            expected = ours()
        names = ("data", "data_t", "scale_inv", "amax")
        return verify.first(*(verify.equal(n, getattr(q, n), getattr(expected, n)) for n in names))

    # Each element is read once (4 bytes) and written twice (1 byte each); current scaling has to
    # know the amax before the first cast, so it reads once more.
    per_element = 6 if given else 10
    return Case(ours, {"torch eager": eager}, check, bytes=per_element * x.numel())


row(
    "quantize/e4m3/given-scale",
    "fp32 -> e4m3, amax and transpose, scale given, 4M elements",
    times_faster(8.0),
    quick=True,
)(partial(_case, True))
row(
    "quantize/e4m3/current-scale",
    "fp32 -> e4m3, amax and transpose, scale from this amax, 4M elements",
    times_faster(8.0),
)(partial(_case, False))
