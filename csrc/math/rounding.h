// FP32 to BF16 by stochastic rounding, or as a split into a BF16 param and a remainder.
#pragma once

#include "convert.h"

namespace mixprec {

// One of the two BF16 neighbours of x: the larger in magnitude with a probability of (the 16 bits
// cut off) / 2^16; `bits` are 16 random bits. Inf and NaN are kept: a carry must not run through a
// NaN into the sign.
MIXPREC_HD Bf16 stochastic_bf16(float x, uint32_t bits) {
  uint32_t u = float_bits(x);
  uint32_t code = is_nonfinite_bits(u) ? Convert<Bf16>::encode(x).bits : (u + bits) >> 16;
  return {static_cast<uint16_t>(code)};
}

// An FP32 master as a BF16 param and the difference of their bits. The param is rounded to nearest,
// ties away from zero: with ties to even, one master in 65,536 could not be restored, because a tie
// could belong to either neighbour.
struct SplitMaster {
  Bf16 param;
  int16_t remainder;
};

// A remainder of 8 bits is the upper half of one of 16, of a master that has 24 bits: x with its
// last 8 bits cut off, one unit more in magnitude with a probability of (these bits) / 2^8. Inf and
// NaN are kept. Of the random bits, the lower 8 are used.
MIXPREC_HD float stochastic_24(float x, uint32_t bits) {
  uint32_t u = float_bits(x);
  return bits_float(is_nonfinite_bits(u) ? u : (u + (bits & 0xFFu)) & 0xFFFFFF00u);
}

MIXPREC_HD int16_t remainder_16(int16_t remainder) { return remainder; }
MIXPREC_HD int16_t remainder_16(int8_t remainder) { return static_cast<int16_t>(remainder * 256); }

MIXPREC_HD SplitMaster split_master(float master) {
  uint32_t u = float_bits(master);
  bool nan = (u & 0x7FFFFFFFu) > 0x7F800000u;
  uint32_t code = nan ? Convert<Bf16>::encode(master).bits : (u + 0x8000u) >> 16;
  return {{static_cast<uint16_t>(code)}, static_cast<int16_t>(nan ? 0u : u & 0xFFFFu)};
}

// A param that was set to zero from outside stays zero: the difference cannot be subtracted from
// it.
MIXPREC_HD float join_master(Bf16 param, int16_t remainder) {
  int32_t low = remainder;
  low = (param.bits & 0x7FFFu) == 0 && low < 0 ? 0 : low;
  return bits_float((static_cast<uint32_t>(param.bits) << 16) + static_cast<uint32_t>(low));
}

}  // namespace mixprec
