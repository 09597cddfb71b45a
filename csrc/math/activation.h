// The activations, their derivatives, and what act_quantize and act_backward cast: FP32 values of
// an order of operations that every backend repeats.
#pragma once

#include "exp.h"

namespace mixprec {

enum class Activation : int32_t { silu, gelu, gelu_tanh, relu2 };

struct ValueAndSlope {
  float value, slope;
};

// x / (1 + e^-w) and its derivative, w_slope being that of w. silu: w = x.
MIXPREC_HD ValueAndSlope gated(float x, float w, float w_slope) {
  float below = 1.0f + exp_fp32(-w);
  float value = x / below, s = 1.0f / below;
  return {value, s + (value * (1.0f - s)) * w_slope};
}

// x / (1 + e^-2u) = x (1 + tanh u) / 2, u = sqrt(2 / pi) (x + 0.044715 x^3). Beyond 16 the quotient
// is x or 0 already; x^2 would overflow.
MIXPREC_HD ValueAndSlope gelu_tanh(float x) {
  float t = x > 16.0f ? 16.0f : x;  // NaN compares false
  t = t < -16.0f ? -16.0f : t;
  float square = t * t;
  float w = t * (1.59576912f + 0.0713548163f * square);
  return gated(x, w, 1.59576912f + 0.214064449f * square);
}

// x Phi(x), Phi the distribution function of the normal distribution, within 6.5 units in the last
// place for x > -8 (10 down to -13, where e^(-x^2/2) becomes subnormal).
//
//   Phi(-t) = e^(-t^2/2) s q(s - 3/4),  s = 1 / (1 + 11/32 t),  t >= 0
//
// q: the minimax polynomial of degree 8 on t in [0, 14] by relative error, which is 2^-25. t^2 is
// split: high has 12 bits, so its square is exact, and d, at most 0.02, is the rest of -t^2/2.
MIXPREC_HD ValueAndSlope gelu(float x) {
  float t = bits_float(float_bits(x) & 0x7FFFFFFFu);
  t = t > 15.0f ? 15.0f : t;  // NaN compares false
  float high = bits_float((float_bits(t) + 0x800u) & 0xFFFFF000u);
  float d = ((t - high) * (t + high)) * -0.5f;
  float e = exp_fp32((high * high) * -0.5f);
  e = e + e * (d + (d * d) * (d * 0.166666667f + 0.5f));
  float s = 1.0f / (1.0f + t * 0.34375f);
  float v = s - 0.75f;
  float q = -0x1.c7a1p-6f;
  q = q * v + -0x1.78f1e8p-6f;
  q = q * v + 0x1.74b632p-5f;
  q = q * v + 0x1.55c97ap-7f;
  q = q * v + -0x1.b9c226p-4f;
  q = q * v + -0x1.e5815p-12f;
  q = q * v + 0x1.53a90ep-2f;
  q = q * v + 0x1.0092acp-1f;
  q = q * v + 0x1.6ae756p-2f;
  float tail = e * (s * q);
  float phi = x < 0.0f ? tail : 1.0f - tail;
  return {x * phi, phi + (x * e) * 0.398942280f};
}

// max(x, 0)^2; NaN stays.
MIXPREC_HD ValueAndSlope relu2(float x) {
  float r = x < 0.0f ? 0.0f : x;
  return {r * r, r + r};
}

// What of the two is not used costs nothing.
template <Activation kind>
MIXPREC_HD ValueAndSlope activation(float x) {
  if constexpr (kind == Activation::silu) return gated(x, x, 1.0f);
  if constexpr (kind == Activation::gelu) return gelu(x);
  if constexpr (kind == Activation::gelu_tanh) return gelu_tanh(x);
  return relu2(x);
}

// act_quantize: activation<kind>(x).value [* up].
// act_backward: (g [* up]) * activation<kind>(x).slope for x, g * activation<kind>(x).value for up.

}  // namespace mixprec
