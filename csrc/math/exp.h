// exp in FP32 by additions, multiplications and integer shifts only, so that every backend computes
// the same bits and loops over it vectorise.
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

// Numbers (F) are float, or several vectors side by side: see csrc/cpu/simd/side_by_side.h, which
// has functions of the same names as those with bits here.

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
  int32_t whole = static_cast<int32_t>(float_bits(n)) - 0x4B400000;
  float y = exp_of_rest(t, n - E::to_integer);
  int32_t half = whole >> 1;
  y = y * bits_float(static_cast<uint32_t>(half + 127) << 23);
  y = y * bits_float(static_cast<uint32_t>(whole - half + 127) << 23);
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

}  // namespace mixprec
