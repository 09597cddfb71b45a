"""exp and the activations of fp32 values: the operations of csrc/math/activation.h."""

import triton
import triton.language as tl

from .tiles import magnitude_bits


@triton.jit
def _power_of_two(n):
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exp_fp32(x):
    t = tl.where(x > 89.0, 89.0, x)
    t = tl.where(t < -104.0, -104.0, t)
    n = t * 1.44269504 + 12582912.0
    whole = n.to(tl.int32, bitcast=True) - 0x4B400000
    n = n - 12582912.0
    r = (t - n * 0.693359375) - n * -2.12194440e-4
    q = r * 0.0013933652 + 0.008363182
    q = q * r + 0.041666467
    q = q * r + 0.16666576
    q = q * r + 0.5
    y = (q * (r * r) + r) + 1.0
    half = whole >> 1
    y = y * _power_of_two(half) * _power_of_two(whole - half)
    return tl.where(x != x, x, y)


@triton.jit
def _gated(x, w, w_slope):
    """x / (1 + e^-w) and its derivative."""
    below = exp_fp32(w * -1.0) + 1.0
    value = tl.div_rn(x, below)
    s = tl.div_rn(tl.zeros_like(x) + 1.0, below)
    return value, s + (value * (1.0 - s)) * w_slope


@triton.jit
def _gelu_tanh(x):
    t = tl.where(x > 16.0, 16.0, x)
    t = tl.where(t < -16.0, -16.0, t)
    square = t * t
    w = t * (square * 0.0713548163 + 1.59576912)
    return _gated(x, w, square * 0.214064449 + 1.59576912)


@triton.jit
def _gelu(x):
    t = magnitude_bits(x).to(tl.float32, bitcast=True)
    t = tl.where(t > 15.0, 15.0, t)
    high = ((t.to(tl.int32, bitcast=True) + 0x800) & -4096).to(tl.float32, bitcast=True)
    d = ((t - high) * (t + high)) * -0.5
    e = exp_fp32((high * high) * -0.5)
    e = e + e * (d + (d * d) * (d * 0.166666667 + 0.5))
    s = tl.div_rn(tl.zeros_like(x) + 1.0, t * 0.34375 + 1.0)
    v = s - 0.75
    q = v * -0.027809381 + -0.023006894
    q = q * v + 0.045497034
    q = q * v + 0.010430512
    q = q * v + -0.10785117
    q = q * v + -0.00046301377
    q = q * v + 0.33169958
    q = q * v + 0.501119
    q = q * v + 0.3543981
    tail = e * (s * q)
    phi = tl.where(x < 0.0, tail, 1.0 - tail)
    return x * phi, phi + (x * e) * 0.398942280


@triton.jit
def activation(x, KIND: tl.constexpr):
    """The activation of x and its derivative."""
    if KIND == "silu":
        return _gated(x, x, 1.0)
    elif KIND == "gelu":
        return _gelu(x)
    elif KIND == "gelu_tanh":
        return _gelu_tanh(x)
    else:
        r = tl.where(x < 0.0, 0.0, x)
        return r * r, r + r
