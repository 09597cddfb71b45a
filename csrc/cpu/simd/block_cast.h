// What the loops of the block formats are given.
#pragma once

#include "loops.h"
#include "math/mx.h"

namespace mixprec::cpu {

// A cast to a block format.
struct BlockCastRule {
  Dtype x_dtype;
  BlockFormat format;
  ScaleRule scale;
  bool stochastic;
  uint64_t seed;
  uint32_t stream;  // 0 for x, 1 for its transpose
};

}  // namespace mixprec::cpu
