// FP32 to BF16 other than to nearest even: at random, or keeping the 16 bits that are cut off.
#pragma once

#include "convert.h"

namespace mixprec {

// One of the two BF16 neighbours of x, the upper (in magnitude) with the probability that the 16
// bits cut off stand for; `bits` are 16 random ones. Inf and NaN stay what they are: a carry must
// not run through a NaN into the sign.
MIXPREC_HD Bf16 stochastic_bf16(float x, uint32_t bits) {
  uint32_t u = float_bits(x);
  uint32_t code = is_nonfinite_bits(u) ? Convert<Bf16>::encode(x).bits : (u + bits) >> 16;
  return {static_cast<uint16_t>(code)};
}

// An FP32 master as a BF16 param and the difference of their bits. The param is rounded to
// nearest, ties away from zero: to nearest even, one master in 65,536 would be lost, because a tie
// could belong to either neighbour.
struct SplitMaster {
  Bf16 param;
  int16_t remainder;
};

MIXPREC_HD SplitMaster split_master(float master) {
  uint32_t u = float_bits(master);
  bool nan = (u & 0x7FFFFFFFu) > 0x7F800000u;
  uint32_t code = nan ? Convert<Bf16>::encode(master).bits : (u + 0x8000u) >> 16;
  return {{static_cast<uint16_t>(code)}, static_cast<int16_t>(nan ? 0u : u & 0xFFFFu)};
}

// A param that someone else set to zero stays zero: nothing lies below it to subtract from.
MIXPREC_HD float join_master(Bf16 param, int16_t remainder) {
  int32_t low = remainder;
  low = (param.bits & 0x7FFFu) == 0 && low < 0 ? 0 : low;
  return bits_float((static_cast<uint32_t>(param.bits) << 16) + static_cast<uint32_t>(low));
}

}  // namespace mixprec
