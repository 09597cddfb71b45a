// The casts between fp32 and fp16, bf16, E4M3, E5M2, in integer arithmetic without branches, so
// that every compiler vectorises them and every processor gives the same bits.
//
// Encoding rounds to nearest, ties to even, by adding a power of two so large that the last bit of
// the sum is the last bit of the result. The FPU then does the rounding, also for subnormal
// results.
#pragma once

#include "hd.h"

namespace mixprec {

struct Fp16 {
  uint16_t bits;
};
struct Bf16 {
  uint16_t bits;
};
struct E4m3 {
  uint8_t bits;
};
struct E5m2 {
  uint8_t bits;
};

// Rounds |x| (bits u, taken as max_bits if larger) to a format with `mantissa` bits and exponent
// bias `bias`; returns its code without the sign.
template <int mantissa, int bias, uint32_t max_bits>
MIXPREC_HD uint32_t round_magnitude(uint32_t u) {
  constexpr int shift = 23 - mantissa;
  constexpr uint32_t min_normal = static_cast<uint32_t>(128 - bias) << 23;
  u = u < max_bits ? u : max_bits;
  uint32_t exponent = u & 0x7F800000u;
  exponent = exponent > min_normal ? exponent : min_normal;
  uint32_t magic = exponent + (static_cast<uint32_t>(shift) << 23);
  // In units of the result's last bit: up to 2^(mantissa + 1), including the implicit leading bit.
  uint32_t significand = float_bits(bits_float(u) + bits_float(magic)) - magic;
  return significand + ((exponent - min_normal) >> shift);
}

// q = saturate(y) for E4M3 and E5M2, where y = x * scale. A finite x saturates even if y is
// infinite. A NaN in y comes from x or from an invalid scale. With known_finite (x and scale are
// finite) special values are not checked.
template <bool known_finite, int mantissa, int bias, uint32_t max_bits, uint32_t inf, uint32_t nan>
MIXPREC_HD uint8_t encode_fp8(uint32_t x, uint32_t y) {
  uint32_t code = round_magnitude<mantissa, bias, max_bits>(y & 0x7FFFFFFFu);
  if (!known_finite) {
    code = (x & 0x7FFFFFFFu) == 0x7F800000u ? inf : code;
    code = (y & 0x7FFFFFFFu) > 0x7F800000u ? nan : code;
  }
  return static_cast<uint8_t>(code | ((x >> 24) & 0x80u));
}

// cast<T>(x, scale) = T(x * scale): one fp32 multiplication, one rounding.
template <class T>
struct Convert;

template <>
struct Convert<E4m3> {
  template <bool known_finite = false>
  static MIXPREC_HD E4m3 encode(float x, float scale) {
    return E4m3{encode_fp8<known_finite, 3, 7, 0x43E00000u, 0x7F, 0x7F>(float_bits(x),
                                                                        float_bits(x * scale))};
  }
  static MIXPREC_HD float decode(E4m3 q) {
    uint32_t magnitude = q.bits & 0x7Fu, sign = static_cast<uint32_t>(q.bits & 0x80u) << 24;
    uint32_t normal = (magnitude << 20) + (120u << 23);
    uint32_t subnormal = float_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f);
    uint32_t u = magnitude < 8u ? subnormal : normal;
    u = magnitude == 0x7Fu ? 0x7FC00000u : u;
    return bits_float(u | sign);
  }
};

template <>
struct Convert<Fp16> {
  static MIXPREC_HD Fp16 encode(float x) {
    uint32_t u = float_bits(x) & 0x7FFFFFFFu, sign = (float_bits(x) >> 16) & 0x8000u;
    uint32_t code = round_magnitude<10, 15, 0x47800000u>(u);  // 2^16 and beyond: Inf
    code = u > 0x7F800000u ? 0x7E00u : code;
    return {static_cast<uint16_t>(code | sign)};
  }
  template <bool known_finite = false>
  static MIXPREC_HD Fp16 encode(float x, float scale) {
    return encode(x * scale);
  }
  static MIXPREC_HD float decode(Fp16 h) {
    uint32_t magnitude = h.bits & 0x7FFFu, sign = static_cast<uint32_t>(h.bits & 0x8000u) << 16;
    uint32_t normal = (magnitude << 13) + (112u << 23);
    uint32_t subnormal = float_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    uint32_t u = magnitude < 0x400u ? subnormal : normal;
    u = magnitude >= 0x7C00u ? (magnitude << 13) | 0x7F800000u : u;
    return bits_float(u | sign);
  }
};

template <>
struct Convert<E5m2> {
  template <bool known_finite = false>
  static MIXPREC_HD E5m2 encode(float x, float scale) {
    return E5m2{encode_fp8<known_finite, 2, 15, 0x47600000u, 0x7C, 0x7F>(float_bits(x),
                                                                         float_bits(x * scale))};
  }
  // E5M2 is the high byte of fp16.
  static MIXPREC_HD float decode(E5m2 q) {
    return Convert<Fp16>::decode({static_cast<uint16_t>(q.bits << 8)});
  }
};

template <>
struct Convert<Bf16> {
  static MIXPREC_HD Bf16 encode(float x) {
    uint32_t u = float_bits(x);
    uint32_t code = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    code = (u & 0x7FFFFFFFu) > 0x7F800000u ? ((u >> 16) & 0x8000u) | 0x7FC0u : code;
    return {static_cast<uint16_t>(code)};
  }
  template <bool known_finite = false>
  static MIXPREC_HD Bf16 encode(float x, float scale) {
    if (!known_finite) return encode(x * scale);
    uint32_t u = float_bits(x * scale);
    return {static_cast<uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16)};
  }
  static MIXPREC_HD float decode(Bf16 b) { return bits_float(static_cast<uint32_t>(b.bits) << 16); }
};

template <>
struct Convert<float> {
  static MIXPREC_HD float encode(float x) { return x; }
  static MIXPREC_HD float decode(float x) { return x; }
};

template <class T>
MIXPREC_HD float decode(T x) {
  return Convert<T>::decode(x);
}

}  // namespace mixprec
