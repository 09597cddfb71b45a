"""pack and unpack, by the rule of docs/numerics.md 9."""

from __future__ import annotations

import math

import independent as ind
import numpy as np
import torch
from definitions_casts import filled

F32, GROUP = np.float32, 128
# 0, and what BF16 has beside subnormal numbers and NaN, in order.
TABLE = ind.decode_table(ind.BF16)
GRID = np.unique(TABLE[(TABLE == 0) | (np.abs(TABLE) >= 2.0**-126)]) + 0.0


def up(x: np.ndarray) -> np.ndarray:
    return GRID[np.searchsorted(GRID, x)].astype(F32)


def ranges_of(groups: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """The minimum and the step of each group, FP32 numbers that BF16 holds."""
    bad = ~np.isfinite(groups).all(1)
    lowest, highest = (np.where(bad, F32(0), x) for x in (groups.min(1), groups.max(1)))
    low = GRID[np.searchsorted(GRID, lowest, "right") - 1].astype(F32)
    high = np.where(np.abs(highest) < 2.0**-126, up(highest), highest)
    step = np.maximum(up((high - low) / F32(levels)), F32(2.0**-84))
    step = np.where(low + step * F32(levels) < high, up(np.nextafter(step, F32(np.inf))), step)
    step = np.where(high == low, F32(0), step)
    bad |= ~np.isfinite(low + step * F32(levels))
    return np.where(bad, F32(np.nan), low), np.where(bad, F32(0), step)


def random_bytes(groups: int, seed: int, counter: int) -> np.ndarray:
    words = [
        ind.philox((call & 0xFFFFFFFF, call >> 32, counter & 0xFFFFFFFF, counter >> 32), seed)
        for call in range(groups * GROUP // 16)
    ]
    return np.array(words, "<u4").view(np.uint8).reshape(groups, GROUP)


@np.errstate(all="ignore")
def pack(
    x: torch.Tensor, bits: int, seed: int, counter: int, offset: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    counter += 0 if offset is None else int(offset)
    flat, levels, count = ind.values(x).astype(F32).ravel(), 2**bits - 1, -(-x.numel() // GROUP)
    groups = np.pad(flat, (0, count * GROUP - len(flat)), mode="edge").reshape(count, GROUP)
    low, step = ranges_of(groups, levels)
    r = random_bytes(count, seed & 2**64 - 1, counter & 2**64 - 1)
    v = np.bitwise_xor.reduce(r, axis=1, keepdims=True).astype(F32) / F32(256)
    factor = np.where(step == 0, F32(0), F32(256) / step)[:, None]
    t = np.nan_to_num((groups - low[:, None]) * factor + v, nan=0.0).astype(np.int64)
    codes = np.where(np.isnan(low)[:, None], 0, np.minimum(t, 256 * levels) + r >> 8)
    codes = codes.ravel() * (np.arange(codes.size) < len(flat))
    of_byte = codes.reshape(-1, 8 // bits) << np.arange(0, 8, bits)
    data = of_byte.sum(1).astype(np.uint8)[: -(-len(flat) * bits // 8)]
    ranges = ind.narrow(np.stack([low, step], 1), torch.bfloat16)
    return torch.from_numpy(data), filled(ranges, torch.bfloat16)


@np.errstate(all="ignore")
def unpack(
    codes: torch.Tensor, ranges: torch.Tensor, bits: int, shape: list[int], dtype: torch.dtype
) -> torch.Tensor:
    n, most = math.prod(shape), F32(torch.finfo(dtype).max)
    code = (codes.numpy()[:, None] >> np.arange(0, 8, bits) & 2**bits - 1).ravel()[:n].astype(F32)
    low, step = np.repeat(ind.values(ranges).astype(F32), GROUP, axis=0)[:n].T
    y = ind.narrow(np.clip(low + code * step, -most, most), dtype)
    return filled(y, dtype).reshape(shape)
