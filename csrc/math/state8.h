// An optimizer state in 8 bits: blocks of 256 elements that share a power of two as their scale. A
// code is a floating-point number whose fraction has 4 bits in the upper half of the codes and 3
// below. Documented in mixprec/ops/_reference/state8.py.
#pragma once

#include "hd.h"

namespace mixprec {

constexpr int64_t kState8Block = 256;

constexpr int64_t state8_blocks(int64_t numel) { return (numel + kState8Block - 1) / kState8Block; }

// The codes of a magnitude, of signed values or of values that are not negative.
template <bool is_signed>
struct State8Codes {
  static constexpr int32_t half = is_signed ? 64 : 128;
  static constexpr int32_t middle = (is_signed ? 127 - 3 : 127 - 7) << 23;  // the value of `half`
  static constexpr int32_t upper = 0x7FF - (2 * half - 1);  // code + upper: first 12 bits
  static constexpr int32_t lower = (middle >> 20) - half;   // code + lower: first 11 bits
};

// The value of a code, which is a BF16 number: its bits.
template <bool is_signed>
MIXPREC_HD uint16_t state8_value(uint8_t code) {
  using Codes = State8Codes<is_signed>;
  uint16_t c = code & (2 * Codes::half - 1);
  uint16_t fine = static_cast<uint16_t>(c + Codes::upper);
  uint16_t coarse = static_cast<uint16_t>(2 * (c + Codes::lower));  // less where it applies
  uint16_t bits = static_cast<uint16_t>((fine < coarse ? fine : coarse) << 3);
  bits = c == 0 ? 0 : bits;
  return is_signed ? static_cast<uint16_t>(bits | (code & 0x80) << 8) : bits;
}

template <bool is_signed>
MIXPREC_HD float decode_state8(uint8_t code, float scale) {
  return bits_float(static_cast<uint32_t>(state8_value<is_signed>(code)) << 16) * scale;
}

// The scale of a block whose largest magnitude has these bits: Inf for one that is not finite, or
// too large.
MIXPREC_HD float state8_scale(uint32_t largest) {
  constexpr uint32_t inf = 0x7F800000u, min = (127u - 100u) << 23, max = (127u + 126u) << 23;
  largest = largest < inf ? largest : inf;
  uint32_t scale = (largest + 0x7FFFFu) & inf;
  scale = scale > min ? scale : min;
  return bits_float(scale > max ? inf : scale);
}

// 1 / scale; 0 for Inf.
MIXPREC_HD float state8_inverse(float scale) {
  uint32_t bits = float_bits(scale);
  return bits_float(bits == 0x7F800000u ? 0u : (254u << 23) - bits);
}

// The code of x, times 2^16: a whole number where x is the value of a code.
template <bool is_signed>
MIXPREC_HD int32_t state8_position(float magnitude, float inverse) {
  using Codes = State8Codes<is_signed>;
  float y = magnitude * inverse;
  int32_t u = static_cast<int32_t>(float_bits(y));
  // The bits count in steps of 2^-3 of a power of two below `middle`, and of 2^-4 above it.
  int32_t position = ((u + (u > Codes::middle ? u : Codes::middle)) >> 4) - Codes::upper * 65536;
  // Between 0 and code 1: linear, or code 1 for all that must not become 0.
  int32_t low = is_signed ? static_cast<int32_t>(y * (65536.0f / (1.125f / 2048.0f))) : u;
  low = low < 65536 ? low : 65536;
  return position > low ? position : low;
}

// The random bits of an element: those of its place in the block, the same in all blocks, plus
// those of the block. Any two sums are independent of each other, and a sum is cheaper than a draw.
MIXPREC_HD uint16_t block_random(uint16_t place, uint16_t block) {
  return static_cast<uint16_t>(place + block);
}

// inverse: of the block's scale; random: 16 bits.
template <bool is_signed>
MIXPREC_HD uint8_t encode_state8(float x, float inverse, uint32_t random) {
  uint32_t sign = float_bits(x) & 0x80000000u;
  int32_t position = state8_position<is_signed>(bits_float(float_bits(x) ^ sign), inverse);
  uint32_t code = (static_cast<uint32_t>(position) + random) >> 16;
  code = is_signed ? code | sign >> 24 : code;
  return static_cast<uint8_t>(inverse == 0.0f ? 0u : code);
}

}  // namespace mixprec
