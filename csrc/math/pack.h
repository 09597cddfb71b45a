// pack and unpack: a group of numbers as a minimum, a step and codes of 8, 4 or 2 bits. No result
// depends on whether the processor flushes subnormal numbers or fuses multiply-adds.
#pragma once

#include "convert.h"

namespace mixprec {

constexpr int kPackGroup = 128;  // elements that share a minimum and a step
constexpr int kPackRandom = 16;  // elements that share one evaluation of Philox

// The least and the greatest of numbers by their bits. They have the order of numbers as signed
// integers if positive, the opposite one as unsigned integers if negative; NaN is beyond Inf.
template <class Signed, class Unsigned>
struct Limits {
  Signed most;
  Unsigned farthest, nearest;

  MIXPREC_HD Unsigned least() const {
    return farthest >> (8 * sizeof(Unsigned) - 1) ? farthest : nearest;
  }
  MIXPREC_HD Unsigned greatest() const { return most >= 0 ? static_cast<Unsigned>(most) : nearest; }
};

MIXPREC_HD int64_t packed_bytes(int64_t n, int64_t bits) { return (n * bits + 7) / 8; }
MIXPREC_HD int64_t packed_groups(int64_t n) { return (n + kPackGroup - 1) / kPackGroup; }

struct PackRange {
  Bf16 minimum, step;
};

// u, or for the bits of a subnormal number those of the next normal one, or of 0, in the direction
// of `sign`.
MIXPREC_HD uint32_t without_subnormals(uint32_t u, uint32_t sign) {
  bool small = (u & 0x7F800000u) == 0, zero = (u & 0x7FFFFFFFu) == 0;
  uint32_t moved = zero | ((u & 0x80000000u) != sign) ? 0u : sign | 0x00800000u;
  return small ? moved : u;
}

// Of a group whose least and greatest values these are; levels: 2^bits - 1. All of the group is in
// [minimum, minimum + levels * step], which must not overflow. Without branches, to vectorise.
MIXPREC_HD PackRange pack_range(float lowest, float highest, float levels) {
  constexpr uint32_t min_step = 0x15800000u;  // 2^-84
  uint32_t low = without_subnormals(float_bits(lowest), 0x80000000u);
  uint32_t high = without_subnormals(float_bits(highest), 0u);
  uint32_t down = (low + (low >> 31) * 0xFFFFu) & 0xFFFF0000u;
  float minimum = bits_float(down), maximum = bits_float(high);
  uint32_t step = (float_bits((maximum - minimum) / levels) + 0xFFFFu) & 0xFFFF0000u;
  step = step > min_step ? step : min_step;
  bool below = minimum + bits_float(step) * levels < maximum;  // where the division rounded down
  step += below ? 0x10000u : 0u;
  step = high == down ? 0u : step;
  float span = bits_float(step) * levels;
  bool bad = is_nonfinite(lowest) | is_nonfinite(highest) | is_nonfinite(span) |
             is_nonfinite(minimum + span);
  down = bad ? 0x7FC00000u : down;
  step = bad ? 0u : step;
  return {{static_cast<uint16_t>(down >> 16)}, {static_cast<uint16_t>(step >> 16)}};
}

// What x - minimum is multiplied with, for its steps in units of 2^-8; 0 for a step of 0.
MIXPREC_HD float pack_factor(Bf16 step) {
  float factor = 256.0f / Convert<Bf16>::decode(step);
  return step.bits == 0 ? 0.0f : factor;
}

// In units of 2^-8 of a step. For a finite minimum; dither: 8 random bits of the group as a number
// in [0, 1), see pack_dither, which make this rounding unbiased.
MIXPREC_HD uint32_t pack_steps(float x, float minimum, float factor, float dither) {
  return static_cast<uint32_t>(static_cast<int32_t>((x - minimum) * factor + dither));
}

// The code; byte: 8 random bits of the element. limit: 2^8 * (2^bits - 1).
MIXPREC_HD uint8_t pack_code(uint16_t steps, uint8_t byte, uint16_t limit) {
  steps = steps < limit ? steps : limit;
  return static_cast<uint8_t>(static_cast<uint16_t>(steps + byte) >> 8);
}

// Of a group, from the exclusive or of its 128 random bytes, 8 of them in a word: independent of
// each of them.
MIXPREC_HD float pack_dither(uint64_t both) {
  uint32_t word = static_cast<uint32_t>(both) ^ static_cast<uint32_t>(both >> 32);
  word ^= word >> 16;
  word = (word ^ word >> 8) & 0xFFu;
  return static_cast<float>(static_cast<int32_t>(word)) * 0x1p-8f;
}

template <class T>
constexpr float kLargest = 0x1.FFFFFEp127f;
template <>
inline constexpr float kLargest<Bf16> = 0x1.FEp127f;
template <>
inline constexpr float kLargest<Fp16> = 65504.0f;

// The product is exact, the sum is rounded to fp32.
MIXPREC_HD float unpack_value(int32_t code, float minimum, float step) {
  return minimum + static_cast<float>(code) * step;
}

// y, next rounded to a dtype with this largest number: a number must not become Inf.
MIXPREC_HD float unpack_bounded(float y, float largest) {
  y = y > largest ? largest : y;  // NaN stays NaN
  return y < -largest ? -largest : y;
}

}  // namespace mixprec
