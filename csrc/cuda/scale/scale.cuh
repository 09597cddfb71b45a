// The scalar arithmetic of scales, on the GPU so that no scalar goes to the host: scale_from_amax_
// and update_delayed_scales_ (one thread per scale), clip_coef (one block, which adds in a fixed
// order), inv_scale and update_scale_ (one thread).
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

struct DelayedScale {
  float *history, *scale, *amax;  // [L], [], []
  float fmt_max;
};

struct DelayedRule {
  int64_t length;  // L
  float two_to_minus_margin;
  bool power_of_two, most_recent;
};

// Kernel arguments are copied with each launch: 32,000 bytes for a whole model, 256 for the casts
// of one layer.
constexpr int kManyScales = 1000, kFewScales = 8;

template <int capacity>
struct DelayedScales {
  DelayedScale at[capacity];
  int count;
};

template <int capacity>
static __global__ void __launch_bounds__(kThreads)
    delayed_scales_kernel(const __grid_constant__ DelayedScales<capacity> list,
                          const DelayedRule rule) {
  int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (i >= list.count) return;
  const DelayedScale& t = list.at[i];
  *t.scale = update_delayed_scale(t.history, rule.length, *t.amax, *t.scale, t.fmt_max,
                                  rule.two_to_minus_margin, rule.power_of_two, rule.most_recent);
  *t.amax = kUnused;
}

template <int capacity>
cudaError_t update_in_lists(const DelayedScale* tensors, int64_t count, const DelayedRule& rule,
                            cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  for (int64_t first = 0; first < count && error == cudaSuccess; first += capacity) {
    DelayedScales<capacity> list;
    list.count = static_cast<int>(std::min<int64_t>(capacity, count - first));
    std::copy(tensors + first, tensors + first + list.count, list.at);
    error = launch(delayed_scales_kernel<capacity>, {(list.count + kThreads - 1) / kThreads},
                   stream, list, rule);
  }
  return error;
}

inline cudaError_t update_delayed_scales(const DelayedScale* tensors, int64_t count,
                                         const DelayedRule& rule, cudaStream_t stream) {
  if (count <= kFewScales) return update_in_lists<kFewScales>(tensors, count, rule, stream);
  return update_in_lists<kManyScales>(tensors, count, rule, stream);
}

}  // namespace mixprec::cuda
