// What the loops of the optimizers are given.
#pragma once

#include "loops.h"
#include "math/adamw.h"
#include "math/lion.h"
#include "math/muon_direction.h"
#include "math/sgd.h"

namespace mixprec::cpu {

enum class Master { none, real, remainder_16, remainder_8 };  // the last two beside a bf16 param

// One param and the arrays updated with it, all in one memory order.
struct StepArrays {
  Dtype param_dtype, grad_dtype, state_dtype[2];
  Master master_kind;
  bool stochastic;  // stochastic rounding of the param
  void* param;
  const void* grad;
  void* state[2];             // null where there is none; u8: of signed and of unsigned codes
  float* scale[2];            // of a state in u8, one per 256 elements
  void* master;               // null if there is none
  int64_t seed, step, index;  // of the random bits
};

}  // namespace mixprec::cpu
