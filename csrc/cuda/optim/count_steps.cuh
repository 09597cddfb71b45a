// The first launch of an optimizer's update: counts the steps and computes the constants of each
// tensor once, instead of in every thread.
#pragma once

#include "cuda/common/launch.h"
#include "math/step.h"

namespace mixprec::cuda {

// The arguments that all tensors of a call share.
struct StepArgs {
  float* steps;  // [tensors]
  // Device memory, one element each. If null: the rule's lr (at most one of the two is not null),
  // 1, 1, 0.
  const float* lr_f32;
  const double* lr_f64;
  const float *inv_scale, *clip, *found_inf;
  double max_value;
  bool maximize, stochastic_rounding;
  int64_t seed;

  __device__ __forceinline__ bool skip() const {
    return found_inf != nullptr && *found_inf != 0.0f;
  }
};

// The count of one tensor's step, and its constants.
template <class Rule>
struct StepOfTensor {
  StepConstants<Rule> constants;
  int64_t step;
};

template <class Rule>
__global__ void __launch_bounds__(kThreads)
    count_steps_kernel(Rule rule, const StepArgs args, int count, StepOfTensor<Rule>* result) {
  int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (i >= count || args.skip()) return;
  float steps = args.steps[i] + 1.0f;
  args.steps[i] = steps;
  if (args.lr_f32 != nullptr) rule.lr = *args.lr_f32;
  if (args.lr_f64 != nullptr) rule.lr = *args.lr_f64;
  GradSettings grad = {args.inv_scale != nullptr ? *args.inv_scale : 1.0,
                       args.clip != nullptr ? *args.clip : 1.0, args.max_value, args.maximize};
  int64_t step = static_cast<int64_t>(steps);
  result[i] = {step_constants(rule, grad, step), step};
}

}  // namespace mixprec::cuda
