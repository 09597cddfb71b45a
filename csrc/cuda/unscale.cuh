// unscale_ on the GPU: g <- g * inv_scale, and found_inf.
#pragma once

#include "cuda/grads.cuh"
#include "cuda/launch.h"
#include "cuda/reduce.cuh"
#include "cuda/vec.cuh"

namespace mixprec::cuda {

template <class T>
__global__ void __launch_bounds__(kThreads)
    unscale_kernel(const __grid_constant__ TensorList<1> grads, const float* inv_scale,
                   float* found_inf) {
  constexpr int n = 2 * kVector<T>;  // two loads in flight: the stores after them may alias
  typename Unscale<T>::Real s = *inv_scale;
  bool bad = false;
  for (int c = blockIdx.x; c < grads.chunks(); c += gridDim.x) {
    Chunk chunk = grads.chunk(c);
    T* g = grads.at<T>(0, chunk);
    for_each<n>(split<n>(chunk.size, g), threadIdx.x, kThreads, [&](auto width, int64_t i) {
      T x[decltype(width)::value];
      load(g + i, x);
#pragma unroll
      for (T& value : x) {
        T rounded = Unscale<T>::round(Unscale<T>::apply(value, s));
        bad |= Unscale<T>::bad(value) | Unscale<T>::bad(rounded);
        value = rounded;
      }
      store(g + i, x);
    });
  }
  raise_flag(found_inf, bad);
}

// One launch per dtype in the list, more where it is long. sms: the GPU's number of SMs.
inline cudaError_t unscale(const GradList& grads, const float* inv_scale, float* found_inf, int sms,
                           cudaStream_t stream) {
  return for_grads(grads, [&](auto t, const TensorList<1>& list) {
    return launch(unscale_kernel<typename decltype(t)::type>, grid_for(list.chunks(), sms),
                  kThreads, 0, stream, list, inv_scale, found_inf);
  });
}

}  // namespace mixprec::cuda
