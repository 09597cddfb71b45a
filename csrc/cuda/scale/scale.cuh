// The scalar arithmetic of scales, on the GPU so that no scalar goes to the host: scale_from_amax_
// (one thread per scale), clip_coef (one block, which adds in a fixed order), inv_scale and
// update_scale_ (one thread).
#pragma once

#include "cuda/common/launch.h"
#include "cuda/common/reduce.cuh"
#include "math/scale.h"

namespace mixprec::cuda {

// scale, scale_inv, amax [count]
static __global__ void __launch_bounds__(kThreads)
    scale_from_amax_kernel(float* scale, float* scale_inv, const float* amax, int64_t count,
                           float fmt_max, float two_to_minus_margin, bool power_of_two) {
  int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  float s = scale_from_amax(amax[i], fmt_max, two_to_minus_margin, power_of_two, scale[i]);
  scale[i] = s;
  scale_inv[i] = 1.0f / s;
}

static __global__ void inv_scale_kernel(const float* scale, float* result) {
  *result = static_cast<float>(1.0 / static_cast<double>(*scale));
}

// min(1, max_norm / (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_; NaN stays NaN.
static __global__ void __launch_bounds__(kThreads)
    clip_coef_kernel(const double* sum_sq, int64_t count, double max_norm, float* result) {
  double sum = 0.0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) sum += sum_sq[i];
  sum = block_reduce<kThreads, Sum>(sum);
  if (threadIdx.x != 0) return;
  *result = mixprec::clip_coef(sum, max_norm);
}

// The state of the loss scale: device memory, one element each, counters [3].
struct LossScaleState {
  float* scale;
  int32_t *growth_tracker, *hysteresis_tracker;
  int64_t* counters;
};

static __global__ void update_scale_kernel(const LossScaleState state, const float* found_inf,
                                           const float* underflow, float grow_on_underflow,
                                           const LossScaleRule rule) {
  LossScale s = {*state.scale,      *state.growth_tracker, *state.hysteresis_tracker,
                 state.counters[0], state.counters[1],     state.counters[2]};
  bool grow = underflow != nullptr && *underflow > grow_on_underflow;
  s = update_loss_scale(s, *found_inf != 0.0f, grow, rule);
  *state.scale = s.scale;
  *state.growth_tracker = s.growth_tracker;
  *state.hysteresis_tracker = s.hysteresis_tracker;
  state.counters[0] = s.skipped;
  state.counters[1] = s.applied;
  state.counters[2] = s.skipped_in_a_row;
}

inline cudaError_t scale_from_amax(float* scale, float* scale_inv, const float* amax, int64_t count,
                                   float fmt_max, float two_to_minus_margin, bool power_of_two,
                                   cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  return launch(scale_from_amax_kernel, (count + kThreads - 1) / kThreads, kThreads, 0, stream,
                scale, scale_inv, amax, count, fmt_max, two_to_minus_margin, power_of_two);
}

inline cudaError_t inv_scale(const float* scale, float* result, cudaStream_t stream) {
  return launch(inv_scale_kernel, 1, 1, 0, stream, scale, result);
}

inline cudaError_t clip_coef(const double* sum_sq, int64_t count, double max_norm, float* result,
                             cudaStream_t stream) {
  return launch(clip_coef_kernel, 1, kThreads, 0, stream, sum_sq, count, max_norm, result);
}

// underflow: may be null.
inline cudaError_t update_scale(const LossScaleState& state, const float* found_inf,
                                const float* underflow, float grow_on_underflow,
                                const LossScaleRule& rule, cudaStream_t stream) {
  return launch(update_scale_kernel, 1, 1, 0, stream, state, found_inf, underflow,
                grow_on_underflow, rule);
}

}  // namespace mixprec::cuda
