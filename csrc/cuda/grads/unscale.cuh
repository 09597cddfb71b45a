// unscale_ on the GPU: g <- g * inv_scale, found_inf, and on request the number of elements of each
// gradient that are Inf, NaN, zero and subnormal.
#pragma once

#include "cuda/common/vec.cuh"
#include "cuda/grads/chunk_stats.cuh"

namespace mixprec::cuda {

template <class T>
__device__ __forceinline__ typename Unscale<T>::Real widened(T x) {
  if constexpr (sizeof(T) == 8) {
    return x;
  } else {
    return decode(x);
  }
}

template <class T, bool counting>
__global__ void __launch_bounds__(kThreads)
    unscale_kernel(const __grid_constant__ GradLaunch grads, const float* inv_scale,
                   float* found_inf, const ChunkStats chunks) {
  constexpr int n = 2 * kVector<T>;  // two loads in flight: the stores after them may alias
  typename Unscale<T>::Real s = *inv_scale;
  bool bad = false;
  for (int c = blockIdx.x; c < grads.chunks(); c += gridDim.x) {
    Chunk chunk = grads.chunk(c);
    T* g = grads.at<T>(0, chunk);
    KindCounter counter;
    for_each<n>(split<n>(chunk.size, g), threadIdx.x, kThreads, [&](auto width, int64_t i) {
      T x[decltype(width)::value];
      load(g + i, x);
#pragma unroll
      for (T& value : x) {
        T rounded = Unscale<T>::round(Unscale<T>::apply(value, s));
        bad |= Unscale<T>::bad(value) | Unscale<T>::bad(rounded);
        if constexpr (counting) counter.add(Unscale<T>::kind(value, widened(rounded)));
        value = rounded;
      }
      store(g + i, x);
    });
    if constexpr (counting) counter.finish(chunks.counts, place_of(grads, chunk));
  }
  raise_flag(found_inf, bad);
}

// One launch per dtype in the list (more for long lists), and one that adds the counts. sms: the
// GPU's number of SMs.
inline cudaError_t unscale(const GradList& grads, const float* inv_scale, float* found_inf,
                           int64_t* counts, const ChunkStats& chunks, int sms,
                           cudaStream_t stream) {
  cudaError_t error = for_grads(grads, [&](auto t, const GradLaunch& list) {
    using T = typename decltype(t)::type;
    auto* kernel = counts != nullptr ? unscale_kernel<T, true> : unscale_kernel<T, false>;
    return launch(kernel, grid_for(list.chunks(), sms), kThreads, 0, stream, list, inv_scale,
                  found_inf, chunks);
  });
  if (error != cudaSuccess || counts == nullptr) return error;
  return add_chunks(grads, chunks, nullptr, counts, sms, stream);
}

}  // namespace mixprec::cuda
