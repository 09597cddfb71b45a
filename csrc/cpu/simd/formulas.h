// The loops, the formulas that they use, and vectors by their numbers of lanes: included before the
// instruction set is chosen.
#pragma once

#include "loops.h"
#include "math/activation.h"
#include "math/cross_entropy.h"
#include "math/mx.h"
#include "math/norm.h"
#include "math/pack.h"
#include "math/philox.h"
#include "math/rotary.h"
#include "math/rounding.h"
#include "math/scale.h"
#include "math/state8.h"
#include "math/step.h"
#include "math/tensor_core.h"
#include "math/unscale.h"

namespace mixprec::cpu {

typedef uint8_t Bytes16 __attribute__((vector_size(16)));
typedef uint8_t Bytes32 __attribute__((vector_size(32)));
typedef uint16_t Words8 __attribute__((vector_size(16)));
typedef uint16_t Words16 __attribute__((vector_size(32)));
typedef uint16_t Words32 __attribute__((vector_size(64)));
typedef int16_t Shorts8 __attribute__((vector_size(16)));
typedef int16_t Shorts32 __attribute__((vector_size(64)));
typedef uint32_t Uints4 __attribute__((vector_size(16)));
typedef uint32_t Uints16 __attribute__((vector_size(64)));
typedef int32_t Ints4 __attribute__((vector_size(16)));
typedef float Floats16 __attribute__((vector_size(64)));

// Where vectors of 32 words are not permuted as one; loops_avx512.cpp has what they need.
struct PlainRegisters {
  static constexpr bool of_32_words = false;
};

}  // namespace mixprec::cpu
