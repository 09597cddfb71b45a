// exp, the activations, their derivatives, and what act_quantize and act_backward cast: FP32 values
// of an order of operations that every backend repeats. By additions, multiplications, divisions
// and integer shifts only, so that every backend computes the same bits and loops over them
// vectorise.
#pragma once

#include "hd.h"

namespace mixprec {

//   n = round(x / ln 2);  r = x - n ln 2, |r| <= ln 2 / 2;  e^x = 2^n (1 + r + r^2 q(r))
//
// q: the Chebyshev interpolation of degree 4 of (e^r - 1 - r) / r^2; its error is 2^-26 of e^r.
// ln 2 is subtracted in two parts, the first of which has 9 bits and so is exact times n.
struct ExpTerms {
  static constexpr float log2_e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  static constexpr float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float q4 = 0x1.6d4328p-10f, q3 = 0x1.120b74p-7f, q2 = 0x1.5554eap-5f;
  static constexpr float q1 = 0x1.5554dcp-3f, q0 = 0.5f;
};

// Numbers (F) are float, or several vectors side by side: see csrc/cpu/simd/activation_loops.h,
// which has functions of the same names as those with bits here.

// e^r, r = x - n ln 2.
template <class F>
MIXPREC_HD F exp_of_rest(F x, F n) {
  using E = ExpTerms;
  F r = (x - n * E::ln2_high) - n * E::ln2_low;
  F q = r * E::q4 + E::q3;
  q = q * r + E::q2;
  q = q * r + E::q1;
  q = q * r + E::q0;
  return (q * (r * r) + r) + 1.0f;
}

// e^x, within 1.05 ULP (all inputs) where the result is normal; subnormal results are rounded once
// more. Above 88.72 Inf, below -104 zero; NaN stays. 2^n is multiplied in two factors, which are
// normal for every n that is left.
MIXPREC_HD float exp_fp32(float x) {
  using E = ExpTerms;
  float t = x > 89.0f ? 89.0f : x;  // NaN compares false
  t = t < -104.0f ? -104.0f : t;
  float n = t * E::log2_e + E::to_integer;
  int32_t power = static_cast<int32_t>(float_bits(n)) - 0x4B400000;
  float y = exp_of_rest(t, n - E::to_integer);
  int32_t half = power >> 1;
  y = y * bits_float(static_cast<uint32_t>(half + 127) << 23);
  y = y * bits_float(static_cast<uint32_t>(power - half + 127) << 23);
  return x != x ? x : y;
}

// y * 2^n, both normal, of the integer n that is in the low bits of `shifted`: what is above it is
// shifted out.
MIXPREC_HD float times_power(float y, float shifted) {
  return bits_float(float_bits(y) + (float_bits(shifted) << 23));
}

// The same bits where |x| <= 87 and the result is normal: for loops that know their range, in two
// thirds of the operations.
template <class F>
MIXPREC_HD F exp_fp32_near(F x) {
  using E = ExpTerms;
  F n = x * E::log2_e + E::to_integer;
  return times_power(exp_of_rest(x, n - E::to_integer), n);
}

enum class Activation : int32_t { silu, gelu, gelu_tanh, relu2 };

template <class F>
struct ValueAndSlope {
  F value, slope;
};

// The |x| up to which `near` may be set, which changes no bit and saves a third of the time.
constexpr float activation_near(Activation kind) {
  return kind == Activation::silu ? 87.0f : kind == Activation::gelu ? 13.0f : 9.5f;
}

// e^w, |w| <= 87 if `near`.
template <bool near, class F>
MIXPREC_HD F activation_exp(F w) {
  if constexpr (near) {
    return exp_fp32_near(w);
  } else {
    return exp_fp32(w);
  }
}

// x between -limit and limit; NaN stays.
MIXPREC_HD float bounded(float x, float limit) {
  float t = x > limit ? limit : x;  // NaN compares false
  return t < -limit ? -limit : t;
}

MIXPREC_HD float magnitude(float x) { return bits_float(float_bits(x) & 0x7FFFFFFFu); }

// x to 12 bits, the last of which is rounded.
MIXPREC_HD float high_part(float x) { return bits_float((float_bits(x) + 0x800u) & 0xFFFFF000u); }

MIXPREC_HD float if_negative(float x, float then, float otherwise) {
  return x < 0.0f ? then : otherwise;
}

// x / (1 + e^-w) and its derivative, w_slope being that of w. silu: w = x.
template <bool near, class F, class Slope>
MIXPREC_HD ValueAndSlope<F> gated(F x, F w, Slope w_slope) {
  F below = activation_exp<near>(-w) + 1.0f;
  F value = x / below, s = 1.0f / below;
  return {value, s + (value * (1.0f - s)) * w_slope};
}

// x / (1 + e^-2u) = x (1 + tanh u) / 2, u = sqrt(2 / pi) (x + 0.044715 x^3). Beyond 16 the quotient
// is x or 0 already; x^2 would overflow.
template <bool near, class F>
MIXPREC_HD ValueAndSlope<F> gelu_tanh(F x) {
  F t = x;
  if constexpr (!near) t = bounded(x, 16.0f);
  F square = t * t;
  F w = t * (square * 0.0713548163f + 1.59576912f);
  return gated<near>(x, w, square * 0.214064449f + 1.59576912f);
}

// x Phi(x), Phi the distribution function of the normal distribution, within 6.5 units in the last
// place for x > -8 (10 down to -13, where e^(-x^2/2) becomes subnormal).
//
//   Phi(-t) = e^(-t^2/2) s q(s - 3/4),  s = 1 / (1 + 11/32 t),  t >= 0
//
// q: the minimax polynomial of degree 8 on t in [0, 14] by relative error, which is 2^-25. t^2 is
// split: high has 12 bits, so its square is exact, and d, at most 0.02, is the rest of -t^2/2.
template <bool near, class F>
MIXPREC_HD ValueAndSlope<F> gelu(F x) {
  F t = magnitude(x);
  if constexpr (!near) t = bounded(t, 15.0f);
  F high = high_part(t);
  F d = ((t - high) * (t + high)) * -0.5f;
  F e = activation_exp<near>((high * high) * -0.5f);
  e = e + e * (d + (d * d) * (d * 0.166666667f + 0.5f));
  F s = 1.0f / (t * 0.34375f + 1.0f);
  F v = s - 0.75f;
  F q = v * -0x1.c7a1p-6f + -0x1.78f1e8p-6f;
  q = q * v + 0x1.74b632p-5f;
  q = q * v + 0x1.55c97ap-7f;
  q = q * v + -0x1.b9c226p-4f;
  q = q * v + -0x1.e5815p-12f;
  q = q * v + 0x1.53a90ep-2f;
  q = q * v + 0x1.0092acp-1f;
  q = q * v + 0x1.6ae756p-2f;
  F tail = e * (s * q);
  F phi = if_negative(x, tail, 1.0f - tail);
  return {x * phi, phi + (x * e) * 0.398942280f};
}

// max(x, 0)^2; NaN stays.
MIXPREC_HD ValueAndSlope<float> relu2(float x) {
  float r = x < 0.0f ? 0.0f : x;
  return {r * r, r + r};
}

// What of the two is not used costs nothing.
template <Activation kind, bool near = false, class F>
MIXPREC_HD ValueAndSlope<F> activation(F x) {
  if constexpr (kind == Activation::silu) {
    return gated<near>(x, x, 1.0f);
  } else if constexpr (kind == Activation::gelu) {
    return gelu<near>(x);
  } else if constexpr (kind == Activation::gelu_tanh) {
    return gelu_tanh<near>(x);
  } else {
    return relu2(x);
  }
}

// act_quantize: activation<kind>(x).value [* up].
// act_backward: (g [* up]) * activation<kind>(x).slope for x, g * activation<kind>(x).value for up.

}  // namespace mixprec
