// The kernel of csrc/cuda/scale/scale.cuh as a C function over host memory, for ctypes.
#include "cuda/scale/scale.cuh"

using namespace mixprec::cuda;

extern "C" int update_delayed_scales(const DelayedScale* tensors, int64_t count,
                                     const DelayedRule* rule) {
  return mixprec::cuda::update_delayed_scales(tensors, count, *rule, nullptr);
}
