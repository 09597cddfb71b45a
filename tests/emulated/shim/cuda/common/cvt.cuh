// In place of csrc/cuda/common/cvt.cuh: what the PTX manual says of each of its instructions ("cvt"
// in "Data movement and conversion instructions"), in fp64 and without the casts of csrc/math, of
// which the references of ../../../../values are made.
#pragma once

#include <cmath>

#include "math/convert.h"
#include "math/hd.h"

namespace mixprec::cuda::ptx {

// A GPU that has all of them. Without one the kernels use convert.h and mx.h, which the ops on the
// CPU use too.
constexpr bool kConvertsFp8 = true, kConvertsFp4 = true, kHasMaxOfPairs = true;

inline uint32_t max_u16x2(uint32_t a, uint32_t b) {
  uint32_t low = (a & 0xFFFFu) > (b & 0xFFFFu) ? a & 0xFFFFu : b & 0xFFFFu;
  uint32_t high = a >> 16 > b >> 16 ? a >> 16 : b >> 16;
  return low | high << 16;
}

// The code of a finite x without its sign: to nearest, ties to even, in a format with `mantissa`
// bits whose smallest normal number is 2^bottom, as if it had no largest one.
inline uint32_t code_of(double x, int mantissa, int bottom) {
  x = std::fabs(x);
  int exponent = x == 0.0 ? bottom : std::ilogb(x);
  exponent = exponent < bottom ? bottom : exponent;
  // In steps of the last bit; a carry into the next power of two is one into the exponent.
  double steps = std::nearbyint(std::ldexp(x, mantissa - exponent));
  return static_cast<uint32_t>(steps) + (static_cast<uint32_t>(exponent - bottom) << mantissa);
}

inline uint16_t to_16_bits(float x, int mantissa, int bottom, uint32_t inf) {
  if (x != x) return 0x7FFF;  // the canonical NaN
  uint32_t code = std::isinf(x) ? inf : code_of(x, mantissa, bottom);
  return static_cast<uint16_t>((code < inf ? code : inf) | (std::signbit(x) ? 0x8000u : 0u));
}

// .satfinite: what exceeds the largest number, Inf too, becomes it.
inline uint16_t to_8_bits(float x, int mantissa, int bottom, uint32_t largest) {
  if (x != x) return 0x7F;
  uint32_t code = std::isinf(x) ? largest : code_of(x, mantissa, bottom);
  return static_cast<uint16_t>((code < largest ? code : largest) | (std::signbit(x) ? 0x80u : 0u));
}

inline uint32_t bf16x2(float first, float second) {
  auto of = [](float x) { return uint32_t{to_16_bits(x, 7, -126, 0x7F80)}; };
  return of(first) | of(second) << 16;
}
inline uint32_t fp16x2(float first, float second) {
  auto of = [](float x) { return uint32_t{to_16_bits(x, 10, -14, 0x7C00)}; };
  return of(first) | of(second) << 16;
}

// Exactly; code: without its sign.
inline float value_of(uint32_t code, int mantissa, int bottom) {
  int exponent = static_cast<int>(code >> mantissa);
  uint32_t fraction = code & ((1u << mantissa) - 1);
  uint32_t steps = exponent > 0 ? fraction | 1u << mantissa : fraction;
  exponent = exponent > 0 ? exponent - 1 : 0;
  return std::ldexp(static_cast<float>(steps), exponent + bottom - mantissa);
}
inline float widen(Fp16 x) {
  uint32_t code = x.bits & 0x7FFFu;
  if (code > 0x7C00u) return bits_float(0x7FFFFFFFu);
  float magnitude = code == 0x7C00u ? HUGE_VALF : value_of(code, 10, -14);
  return std::copysign(magnitude, (x.bits & 0x8000u) != 0 ? -1.0f : 1.0f);
}
inline void forget(uint32_t&) {}
inline void store_early(void* p, uint64_t low, uint64_t high) {
  uint64_t words[] = {low, high};
  std::memcpy(p, words, sizeof(words));
}
inline void widen_bf16x2(uint32_t pair, float& first, float& second) {
  auto of = [](uint32_t bits) { return decode(Bf16{static_cast<uint16_t>(bits)}); };
  first = of(pair), second = of(pair >> 16);
}

inline uint32_t to_four(const float* x, int mantissa, int bottom, uint32_t largest) {
  uint32_t codes = 0;
  for (int j = 0; j < 4; ++j) {
    codes |= uint32_t{to_8_bits(x[j], mantissa, bottom, largest)} << (8 * j);
  }
  return codes;
}
inline uint32_t e4m3x4(const float* x) { return to_four(x, 3, -6, 0x7E); }
inline uint32_t e5m2x4(const float* x) { return to_four(x, 2, -14, 0x7B); }
inline uint32_t fp16x2_of_e4m3x2(uint16_t codes) {
  auto of = [](uint32_t code) {
    float magnitude = (code & 0x7Fu) == 0x7Fu ? NAN : value_of(code & 0x7Fu, 3, -6);
    uint32_t wide = to_16_bits(magnitude, 10, -14, 0x7C00);
    return wide | ((code & 0x80u) != 0 ? 0x8000u : 0u);
  };
  return of(codes & 0xFFu) | of(codes >> 8) << 16;
}

inline uint32_t e2m1x8(const float* x) {
  uint32_t codes = 0;
  for (int j = 0; j < 8; ++j) {
    uint32_t code = x[j] != x[j] || std::isinf(x[j]) ? 7 : code_of(x[j], 1, 0);
    bool negative = x[j] == x[j] && std::signbit(x[j]);
    codes |= ((code < 7 ? code : 7) | (negative ? 8u : 0u)) << (4 * j);
  }
  return codes;
}
inline uint32_t fp16x2_of_e2m1x2(uint8_t codes) {
  auto of = [](uint32_t code) {
    uint32_t wide = to_16_bits(value_of(code & 7u, 1, 0), 10, -14, 0x7C00);
    return wide | ((code & 8u) != 0 ? 0x8000u : 0u);
  };
  return of(codes & 0xFu) | of(codes >> 4) << 16;
}

inline float rcp(float x) {
  float y = 1.0f / x, excess = std::fmaf(x, y, -1.0f);
  uint32_t fraction = float_bits(x) & 0x7FFFFFu;
  // No Newton step would correct that of the number below a power of two.
  if (excess == 0.0f || fraction % 2 == 0 || fraction == 0x7FFFFFu) return y;
  return bits_float(float_bits(y) + (excess > 0.0f ? -1 : 1));
}

}  // namespace mixprec::cuda::ptx
