// In place of csrc/cuda/common/rcp.cuh: a reciprocal that is as wrong as the PTX manual allows, the
// number on the other side of what is exact for every second fraction.
#pragma once

#include <cmath>

#include "math/hd.h"

namespace mixprec::cuda::ptx {

inline float rcp(float x) {
  float y = 1.0f / x, excess = std::fmaf(x, y, -1.0f);
  uint32_t fraction = float_bits(x) & 0x7FFFFFu;
  // No Newton step would correct that of the number below a power of two.
  if (excess == 0.0f || fraction % 2 == 0 || fraction == 0x7FFFFFu) return y;
  return bits_float(float_bits(y) + (excess > 0.0f ? -1 : 1));
}

}  // namespace mixprec::cuda::ptx
