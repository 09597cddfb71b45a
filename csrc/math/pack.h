// pack and unpack: a group of numbers as a minimum, a step and codes of 8, 4 or 2 bits. No result
// depends on whether the processor flushes subnormal numbers or fuses multiply-adds.
#pragma once

#include "convert.h"
#include "philox.h"

namespace mixprec {

constexpr int kPackGroup = 128;  // elements that share a minimum and a step
constexpr int kPackRandom = 16;  // elements that share one evaluation of Philox

// The bits of a floating-point number, as a signed integer, in its order: NaN beyond Inf on both
// sides, -0 below 0. Its own inverse.
template <class Int>
MIXPREC_HD Int in_order(Int bits) {
  constexpr Int magnitude = static_cast<Int>((Int{1} << (8 * sizeof(Int) - 2)) - 1 +
                                             (Int{1} << (8 * sizeof(Int) - 2)));
  return static_cast<Int>(bits ^ ((bits >> (8 * sizeof(Int) - 1)) & magnitude));
}

MIXPREC_HD int64_t packed_bytes(int64_t n, int64_t bits) { return (n * bits + 7) / 8; }
MIXPREC_HD int64_t packed_groups(int64_t n) { return (n + kPackGroup - 1) / kPackGroup; }

struct PackRange {
  Bf16 minimum, step;
};

// Moves subnormal numbers to 0, or to the smallest normal one where they have this sign.
MIXPREC_HD uint32_t without_subnormals(uint32_t u, uint32_t sign) {
  bool small = (u & 0x7F800000u) == 0;
  uint32_t outer = (u & 0x7FFFFFFFu) != 0 && (u & 0x80000000u) == sign ? sign | 0x00800000u : 0u;
  return small ? outer : u;
}

// Of a group whose least and greatest values these are; levels: 2^bits - 1. All of the group is in
// [minimum, minimum + levels * step], which must not overflow.
MIXPREC_HD PackRange pack_range(float lowest, float highest, float levels) {
  uint32_t low = without_subnormals(float_bits(lowest), 0x80000000u);
  uint32_t high = without_subnormals(float_bits(highest), 0u);
  uint32_t down = (low + (low >> 31 != 0 ? 0xFFFFu : 0u)) & 0xFFFF0000u;
  float minimum = bits_float(down), maximum = bits_float(high);
  constexpr uint32_t min_step = 0x15800000u;  // 2^-84
  uint32_t step = (float_bits((maximum - minimum) / levels) + 0xFFFFu) & 0xFFFF0000u;
  step = step > min_step ? step : min_step;
  step += minimum + bits_float(step) * levels < maximum ? 0x10000u : 0u;  // where / rounded down
  step = high == down ? 0u : step;
  float span = bits_float(step) * levels;
  bool bad = is_nonfinite(lowest) || is_nonfinite(highest) || is_nonfinite(span) ||
             is_nonfinite(minimum + span);
  down = bad ? 0x7FC00000u : down;
  step = bad ? 0u : step;
  return {{static_cast<uint16_t>(down >> 16)}, {static_cast<uint16_t>(step >> 16)}};
}

// What x - minimum is multiplied with: steps in units of 2^-16.
MIXPREC_HD float pack_factor(Bf16 step) {
  return step.bits == 0 ? 0.0f : 65536.0f / Convert<Bf16>::decode(step);
}

// For a finite minimum; random: 16 bits.
MIXPREC_HD int32_t pack_code(float x, float minimum, float factor, int32_t random, int32_t levels) {
  int32_t code = (static_cast<int32_t>((x - minimum) * factor) + random) >> 16;
  return code < levels ? code : levels;
}

template <class T>
constexpr float kLargest = 0x1.FFFFFEp127f;
template <>
inline constexpr float kLargest<Bf16> = 0x1.FEp127f;
template <>
inline constexpr float kLargest<Fp16> = 65504.0f;

// The product is exact. Rounded to a dtype of 16 bits, a value must not become Inf: bounded by its
// largest number.
MIXPREC_HD float unpack_value(int32_t code, float minimum, float step, float largest) {
  float y = minimum + static_cast<float>(code) * step;
  y = y > largest ? largest : y;  // NaN stays NaN
  return y < -largest ? -largest : y;
}

// The counter of the random bits of elements 16 * call to 16 * call + 15.
MIXPREC_HD PhiloxWords pack_counter(int64_t call, int64_t counter) {
  uint64_t e = static_cast<uint64_t>(call), c = static_cast<uint64_t>(counter);
  return {{static_cast<uint32_t>(e), static_cast<uint32_t>(e >> 32), static_cast<uint32_t>(c),
           static_cast<uint32_t>(c >> 32)}};
}

// Four elements share a word of Philox: 16 bits of it, from bit 8 * j on and around its end. The
// high byte of one is the low byte of the next.
MIXPREC_HD uint32_t pack_random16(uint32_t word, int j) {
  return (j == 0 ? word : word >> (8 * j) | word << (32 - 8 * j)) & 0xFFFFu;
}

}  // namespace mixprec
