// The activations, their derivatives, and what act_quantize and act_backward cast: FP32 values of
// an order of operations that every backend repeats.
#pragma once

#include "exp.h"

namespace mixprec {

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
