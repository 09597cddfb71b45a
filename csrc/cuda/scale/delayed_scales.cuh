// update_delayed_scales_ on the GPU: one thread per tensor, many tensors per launch.
#pragma once

#include "cuda/common/launch.h"
#include "math/scale.h"

namespace mixprec::cuda {

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
    error = launch(delayed_scales_kernel<capacity>, (list.count + kThreads - 1) / kThreads,
                   kThreads, 0, stream, list, rule);
  }
  return error;
}

inline cudaError_t update_delayed_scales(const DelayedScale* tensors, int64_t count,
                                         const DelayedRule& rule, cudaStream_t stream) {
  if (count <= kFewScales) return update_in_lists<kFewScales>(tensors, count, rule, stream);
  return update_in_lists<kManyScales>(tensors, count, rule, stream);
}

}  // namespace mixprec::cuda
