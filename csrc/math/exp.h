// exp in FP32 by additions, multiplications and integer shifts only, so that every backend computes
// the same bits and loops over it vectorise.
#pragma once

#include "hd.h"

namespace mixprec {

// The polynomial q of exp_fp32.
MIXPREC_HD float exp_fp32_q(float r) {
  float q = 0x1.6d4328p-10f;
  q = q * r + 0x1.120b74p-7f;
  q = q * r + 0x1.5554eap-5f;
  q = q * r + 0x1.5554dcp-3f;
  return q * r + 0.5f;
}

// e^x, within 1.05 ULP (all inputs) where the result is normal; subnormal results are rounded once
// more. Above 88.72 Inf, below -104 zero; NaN stays.
//
//   n = round(x / ln 2);  r = x - n ln 2, |r| <= ln 2 / 2;  e^x = 2^n (1 + r + r^2 q(r))
//
// q: the Chebyshev interpolation of degree 4 of (e^r - 1 - r) / r^2; its error is 2^-26 of e^r.
// ln 2 is subtracted in two parts, the first of which has 9 bits and so is exact times n. 2^n is
// multiplied in two factors, which are normal for every n that is left.
MIXPREC_HD float exp_fp32(float x) {
  constexpr float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  float t = x > 89.0f ? 89.0f : x;      // NaN compares false
  t = t < -104.0f ? -104.0f : t;
  float n = t * 1.44269504f + shift;
  int32_t whole = static_cast<int32_t>(float_bits(n)) - 0x4B400000;
  n = n - shift;
  float r = (t - n * 0.693359375f) - n * -2.12194440e-4f;
  float y = (exp_fp32_q(r) * (r * r) + r) + 1.0f;
  int32_t half = whole >> 1;
  y = y * bits_float(static_cast<uint32_t>(half + 127) << 23);
  y = y * bits_float(static_cast<uint32_t>(whole - half + 127) << 23);
  return x != x ? x : y;
}

// The same bits where |x| <= 87 and the result is normal: for loops that know their range, in two
// thirds of the operations.
MIXPREC_HD float exp_fp32_near(float x) {
  constexpr float shift = 12582912.0f;
  float n = x * 1.44269504f + shift;
  uint32_t power = float_bits(n) << 23;  // what is above the integer in n is shifted out
  n = n - shift;
  float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  return bits_float(float_bits((exp_fp32_q(r) * (r * r) + r) + 1.0f) + power);
}

}  // namespace mixprec
