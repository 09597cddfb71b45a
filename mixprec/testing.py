"""Testing utilities: a derived tolerance for GEMM, a comparison with a detailed message, SQNR."""

from __future__ import annotations

import math

import torch

__all__ = ["ACCUMULATION", "FP32_ROUNDOFF", "assert_close", "sqnr", "tolerance"]

# An FP32 sum of K products, in any order, is off by at most about K units of roundoff (2^-24)
# relative to the sum of |products|. Two more roundings undo the scales of the operands, which
# doubling covers down to K = 1.
ACCUMULATION = 2.0
FP32_ROUNDOFF = 2.0**-24
CHUNK = 128  # of K: partial sums of FP8 that stay in the tensor core
STEP = 32  # of K: products that Hopper's tensor cores add at once
# The exponents below which numbers are subnormal.
MIN_EXPONENT = {torch.float8_e4m3fn: -6, torch.float8_e5m2: -14}


def tolerance(
    expected: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    fp8_tensor_core: bool = False,
) -> torch.Tensor:
    """The largest error, elementwise, that a correct FP32-accumulating GEMM may have. FP64 [M, N].

        eps(out) * |expected| + c * K * 2^-24 * (|a| @ |b|)        with c = ACCUMULATION

    expected: [M, N], a @ b (+ bias) in FP64. a: [M, K], b: [K, N]: the dequantized operands.
    out_dtype: what the result was rounded to; below its smallest normal number the constant spacing
    replaces eps * |expected|. fp8_tensor_core: of Ada or Hopper, with promotion every 128 of K; a
    and b are FP8, and `_of_fp8_tensor_cores` is added. The bound is the standard one for sums of
    products: Higham, Accuracy and Stability of Numerical Algorithms, section 3.5.
    """
    k = a.shape[-1]
    out = torch.finfo(out_dtype)
    magnitude = a.double().abs() @ b.double().abs()
    roundoff = ACCUMULATION * k * FP32_ROUNDOFF
    short = _of_fp8_tensor_cores(a, b) if fp8_tensor_core else 0.0
    rounding = (out.eps * expected.double().abs()).clamp(min=out.smallest_normal * out.eps)
    return rounding + roundoff * magnitude + short


def _of_fp8_tensor_cores(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What the accumulators of Ada's and Hopper's tensor cores lose at most. FP64 [M, N].

    A step of Hopper's adds 32 products to the sum c so far in units of q = 2^(top - 13), where
    2^top <= max(T, |c|), T being the largest product of 2^e(a_i) and 2^e(b_i), and e the exponent,
    for a subnormal number that of the smallest normal one. Each of the 33 addends loses less than
    q, and the result, of 14 bits, less than 2^-13 of itself. With P = sum of |a_i b_i| of the chunk
    so far, |c| and the result are at most P, because addends are cut toward zero. A step loses

        33 * 2^-13 * max(T, P) + 2^-13 * P <= 34 * 2^-13 * max(T, P)

    Ada's takes two steps of 16 products: 2 * (17 + 1) = 36 instead of 34. Without subnormal
    operands T <= P, and the four steps of a chunk lose at most 4 * 36 * 2^-13 = 2^-5.8 of its P. T
    here is the product of the largest 2^e(a_i) and the largest 2^e(b_i), which is no less.
    """
    for name, x in (("a", a), ("b", b)):
        if x.dtype not in MIN_EXPONENT:
            raise ValueError(f"tolerance: {name} must be FP8 with fp8_tensor_core, got {x.dtype}")
    m, k, n = *a.shape, b.shape[1]
    lost = torch.zeros((m, n), dtype=torch.float64, device=a.device)
    for chunk in range(0, k, CHUNK):
        so_far = torch.zeros_like(lost)
        for start in range(chunk, min(k, chunk + CHUNK), STEP):
            x, y = a[:, start : start + STEP], b[start : start + STEP]
            so_far = so_far + x.double().abs() @ y.double().abs()
            largest = _power(x).amax(1, keepdim=True) * _power(y).amax(0, keepdim=True)
            lost = lost + 36 * 2.0**-13 * torch.maximum(largest, so_far)
    return lost


def _power(x: torch.Tensor) -> torch.Tensor:
    """2^e(x) of FP8 numbers, FP64; of 0 it is 0."""
    wide = x.double().abs()
    power = torch.exp2(torch.frexp(wide).exponent.double() - 1).clamp(
        min=2.0 ** MIN_EXPONENT[x.dtype]
    )
    return torch.where(wide > 0, power, 0.0)


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    bound: float | torch.Tensor,
    *,
    rms: float | None = None,
    show: int = 5,
) -> None:
    """Raise AssertionError, showing the worst elements, unless |actual - expected| <= bound.

    actual, expected: one shape, any dtypes, compared in FP64. bound: a number, or a tensor that
    broadcasts to that shape (from `tolerance`). NaN must match NaN of expected, and Inf, with its
    sign, must match Inf of expected rounded to actual's dtype; the bound applies to the other
    elements. rms: if given, also require rms(actual - expected) <= rms * rms(expected), which
    detects small errors in many elements. show: how many elements to print.
    """
    if actual.shape != expected.shape:
        raise AssertionError(
            f"shapes differ: actual {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        )
    rounded = expected.to(actual.dtype).double()
    got, want = actual.double(), expected.double()
    limit = torch.as_tensor(bound, dtype=torch.float64, device=got.device).expand(got.shape)
    for kind, here, there in (
        ("NaN", got.isnan(), want.isnan()),
        ("+Inf", got.isposinf(), rounded.isposinf()),
        ("-Inf", got.isneginf(), rounded.isneginf()),
    ):
        wrong = here != there
        if wrong.any():
            raise AssertionError(
                f"{kind} at different places: {int(wrong.sum())} of {wrong.numel()} elements\n"
                + _rows(wrong.double(), got, want, limit, show)
            )
    finite = got.isfinite() & want.isfinite()
    error = torch.where(finite, (got - want).abs(), 0.0)
    too_far = finite & ~(error <= limit)  # also where the bound itself is NaN
    excess = torch.where(error > 0, error / limit, 0.0)
    summary = _summary(error, excess, torch.where(finite, want, 0.0))
    if too_far.any():
        raise AssertionError(
            f"{int(too_far.sum())} of {error.numel()} elements exceed the bound; {summary}\n"
            + _rows(excess, got, want, limit, show)
        )
    if rms is not None and error.norm() > rms * torch.where(finite, want, 0.0).norm():
        raise AssertionError(
            f"the rms error exceeds {rms:.3g}; {summary}\n" + _rows(excess, got, want, limit, show)
        )


def _summary(error: torch.Tensor, excess: torch.Tensor, want: torch.Tensor) -> str:
    if error.numel() == 0:
        return "no elements"
    relative = error.norm() / want.norm()
    return (
        f"max error {error.max():.4g} ({excess.max():.3g} x its bound), "
        f"rms error {error.square().mean().sqrt():.4g} ({relative:.3g} of rms(expected))"
    )


def _rows(
    badness: torch.Tensor, got: torch.Tensor, want: torch.Tensor, limit: torch.Tensor, show: int
) -> str:
    """One line for each of the `show` worst elements, by `badness`."""
    lines = []
    for flat in badness.flatten().topk(min(show, badness.numel())).indices.tolist():
        where = tuple(
            int(i) for i in torch.unravel_index(torch.tensor(flat, device="cpu"), badness.shape)
        )
        lines.append(
            f"  {list(where)}: actual {got[where].item():.9g}, expected {want[where].item():.9g}, "
            f"error {(got[where] - want[where]).abs().item():.4g}, bound {limit[where].item():.4g}"
        )
    return "\n".join(lines)


def sqnr(ref: torch.Tensor, x: torch.Tensor) -> float:
    """Signal to quantization noise, 20 * log10(||ref|| / ||ref - x||) in dB, computed in FP64.

    ref and x: one shape, any dtypes. inf where they are equal; nan if either is not finite.
    ValueError if the shapes differ.
    """
    if ref.shape != x.shape:
        raise ValueError(
            f"sqnr: ref and x must have one shape, got {tuple(ref.shape)} and {tuple(x.shape)}"
        )
    signal, noise = ref.double().norm().item(), (ref.double() - x.double()).norm().item()
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return math.nan
    if noise == 0:
        return math.inf
    return 20 * math.log10(signal / noise) if signal > 0 else -math.inf
