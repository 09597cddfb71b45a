"""The rules of the block formats computed a second time, in NumPy: FP64, and FP32 where it rounds.

Nothing here calls an op: scales follow from comparisons of exact numbers, not from bits.
"""

from __future__ import annotations

from typing import NamedTuple

import independent as ind
import numpy as np

F32 = np.float32


class Block(NamedTuple):
    spec: ind.Spec
    size: int


BLOCKS = {
    "mxfp8_e4m3": Block(ind.E4M3, 32),
    "mxfp8_e5m2": Block(ind.E5M2, 32),
    "mxfp6_e3m2": Block(ind.E3M2, 32),
    "mxfp6_e2m3": Block(ind.E2M3, 32),
    "mxfp4": Block(ind.E2M1, 32),
    "nvfp4": Block(ind.E2M1, 16),
}


def exponent(amax: np.ndarray, spec: ind.Spec, mode: str) -> np.ndarray:
    """X of finite amaxes in FP64; -127 for 0."""
    fraction, power = np.frexp(amax)  # amax = fraction * 2^power, fraction in [0.5, 1)
    largest = int(np.frexp(spec.max)[1])
    if mode == "rceil":
        x = power - largest + (fraction > np.frexp(spec.max)[0])
    else:
        x = power - largest
        if mode == "ceil":
            x = x + (fraction > 0.5)
        elif mode == "even":  # rounded up to the next power of two, from a tie on
            x = x + (fraction >= 1 - 2.0 ** -(spec.mantissa_bits + 2))
    return np.where(amax == 0, -127, np.maximum(x, -127))


def stochastic(y: np.ndarray, spec: ind.Spec, random: np.ndarray) -> np.ndarray:
    """Codes rounded up where the part of a step beyond the lower code, cut to 2^-16, and the
    random bits reach 1."""
    values = ind.decode_table(spec)[: spec.max_code + 1]
    magnitude = np.minimum(np.abs(y), spec.max)
    low = np.searchsorted(values, magnitude, side="right") - 1
    high = np.minimum(low + 1, spec.max_code)
    step = np.where(high > low, values[high] - values[low], 1.0)
    part = np.floor((magnitude - values[low]) / step * 65536)
    code = low + (part + random >= 65536)
    return (code | np.where(np.signbit(y), spec.sign_bit, 0)).astype(np.uint8)


def join(codes: np.ndarray, spec: ind.Spec) -> np.ndarray:
    """Two codes of 4 bits in a byte."""
    if spec.bits != 4:
        return codes
    padded = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    return padded[:, ::2] + 16 * padded[:, 1::2]


def swizzled(scales: np.ndarray) -> np.ndarray:
    """Codes [R, C] in tiles of 128 x 4, each in 512 bytes, with zeros beyond R and C."""
    (rows, cols), across = scales.shape, -(-scales.shape[1] // 4)
    out = np.zeros((-(-rows // 128) * across * 512,), scales.dtype)
    for r in range(rows):
        for c in range(cols):
            tile = r // 128 * across + c // 4
            out[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scales[r, c]
    return out.reshape(-(-rows // 128), across, 32, 16)


def quantize(
    rows: np.ndarray, fmt: str, mode: str, amax: float, random: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, float | None]:
    """Codes, codes of the scales and the scale of the tensor, of exact values [M, K]. amax: of the
    tensor. random: 16 bits for each element in whole blocks."""
    spec, size = BLOCKS[fmt]
    m, k = rows.shape
    across = -(-k // size)
    blocks = np.pad(rows, ((0, 0), (0, across * size - k))).reshape(m, across, size)
    largest = np.abs(blocks).max(-1, initial=0.0)
    bad = ~np.isfinite(largest)
    largest = np.where(bad, 0.0, largest)
    clean = np.where(bad[..., None], 0.0, blocks)
    of_tensor = None
    with np.errstate(all="ignore"):
        if fmt == "nvfp4":
            usable = 0 < amax < np.inf
            s = np.clip(F32(2688) / F32(amax), F32(2.0**-126), F32(2.0**126)) if usable else F32(1)
            of_tensor = F32(1) / s
            exact = (largest.astype(F32) * (s / F32(6))).astype(np.float64)
            table = ind.decode_table(ind.E4M3)
            if random is None:
                scales = ind.encode(exact, ind.E4M3)
            else:  # the first that is not below it
                scales = np.searchsorted(table[:0x7E], exact)
            decoded = table[scales].astype(F32)
            factor = np.minimum(F32(1) / (decoded * of_tensor), np.finfo(F32).max)
            y = (clean.astype(F32) * factor[..., None]).astype(np.float64)
            y = np.clip(y, -spec.max, spec.max)
        else:
            x = exponent(largest, spec, mode)
            scales = x + 127
            y = np.ldexp(clean, -x[..., None])
    scales = np.where(bad, 0x7F if fmt == "nvfp4" else 0xFF, scales).astype(np.uint8)
    bits = None if random is None else random.reshape(y.shape)
    codes = ind.encode(y, spec) if bits is None else stochastic(y, spec, bits)
    codes = codes.reshape(m, across * size)[:, :k]
    return join(codes, spec), scales, None if of_tensor is None else float(of_tensor)


def dequantize(
    data: np.ndarray, scales: np.ndarray, of_tensor: float | None, fmt: str, k: int
) -> np.ndarray:
    """The values [M, K], rounded to FP32."""
    spec, size = BLOCKS[fmt]
    codes = data
    if spec.bits == 4:
        codes = np.stack([data & 15, data >> 4], -1).reshape(len(data), 2 * data.shape[1])[:, :k]
    values = ind.decode_table(spec)[codes & 2 * spec.sign_bit - 1]
    with np.errstate(all="ignore"):
        if fmt == "nvfp4":
            scale = ind.decode_table(ind.E4M3)[scales].astype(F32)
            scale = (scale if of_tensor is None else scale * F32(of_tensor)).astype(np.float64)
        else:
            scale = np.ldexp(1.0, scales.astype(np.int64) - 127)
            scale[scales == 255] = np.nan
        product = values * np.repeat(scale, size, axis=1)[:, :k]
        return product.astype(F32).astype(np.float64)
