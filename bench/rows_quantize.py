"""quantize: fp32 -> E4M3 with the amax and the transpose, against the same in torch eager."""

from __future__ import annotations

from functools import partial

import torch

import mixprec

from . import verify
from .registry import Case, row, times_faster

SHAPE = (2048, 2048)  # 4M elements
E4M3_MAX = 448.0
# Rows and columns that share a scale.
BLOCKS = {"row": (1, SHAPE[1]), "block1x128": (1, 128), "block128x128": (128, 128)}


def _input() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


def _check(ours: partial[mixprec.Quantized]) -> str | None:
    q = ours()
    with mixprec.use_backend("reference"):
        expected = ours()
    names = ["data", "data_t", "scale_inv", "amax"]
    names += ["scale_inv_t"] if q.scale_inv_t is not None else []
    return verify.first(*(verify.equal(n, getattr(q, n), getattr(expected, n)) for n in names))


def _case(given: bool) -> Case:
    x = _input()
    scale = torch.tensor(64.0) if given else None

    def eager() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        amax = x.abs().amax()
        factor = E4M3_MAX / amax if scale is None else scale
        q = (x * factor).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return q, q.t().contiguous(), amax

    ours = partial(mixprec.quantize, x, mixprec.E4M3, scale, transpose=True)
    # Each element is read once (4 bytes) and written twice (1 byte each); current scaling has to
    # know the amax before the first cast, so it reads once more.
    per_element = 6 if given else 10
    return Case(ours, {"torch eager": eager}, partial(_check, ours), bytes=per_element * x.numel())


def _eager_blocks(x: torch.Tensor, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of x and a scale for each block, in torch; sizes are multiples of the block's."""
    blocks = x.reshape(x.shape[0] // height, height, x.shape[1] // width, width)
    scale = E4M3_MAX / blocks.abs().amax((1, 3), keepdim=True)
    codes = (blocks * scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.view(x.shape), scale.squeeze(3).squeeze(1)


def _block_case(granularity: str) -> Case:
    x = _input()
    height, width = BLOCKS[granularity]

    def eager() -> tuple[torch.Tensor, ...]:
        q, scale = _eager_blocks(x, height, width)
        if height == width:
            return q, scale, q.t().contiguous(), scale.t().contiguous()
        return q, scale, *_eager_blocks(x.t().contiguous(), height, width)

    ours = partial(mixprec.quantize, x, mixprec.E4M3, transpose=True, granularity=granularity)
    # A block stays in the cache between its amax and its cast: read once and written twice. The
    # columns of "row" do not: every element is read once more.
    per_element = 10 if granularity == "row" else 6
    return Case(ours, {"torch eager": eager}, partial(_check, ours), bytes=per_element * x.numel())


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
for granularity in BLOCKS:
    row(
        f"quantize/{granularity}",
        f"fp32 -> e4m3, amax and transpose, granularity {granularity}, 4M elements",
        times_faster(3.0),
    )(partial(_block_case, granularity))
