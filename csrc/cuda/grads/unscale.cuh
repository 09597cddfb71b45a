// unscale_ on the GPU: g <- g * inv_scale, found_inf, and on request the number of elements of each
// gradient that are Inf, NaN, zero and subnormal.
#pragma once

#include "cuda/common/convert.cuh"
#include "cuda/common/vec.cuh"
#include "cuda/grads/chunk_stats.cuh"

namespace mixprec::cuda {

template <class T, bool counting>
__global__ void __launch_bounds__(kThreads)
    unscale_kernel(const __grid_constant__ GradLaunch grads, const float* inv_scale,
                   float* found_inf, const ChunkStats chunks) {
  constexpr int n = 2 * kVector<T>;  // two loads in flight: the stores after them may alias
  using Real = typename Unscale<T>::Real;
  Real s = *inv_scale;
  bool bad = false;
  for (int c = blockIdx.x; c < grads.chunks(); c += gridDim.x) {
    Chunk chunk = grads.chunk(c);
    T* g = grads.at<T>(0, chunk);
    KindCounter counter;
    for_each<n>(split<n>(chunk.size, g), threadIdx.x, kThreads, [&](auto width, int64_t i) {
      constexpr int count = decltype(width)::value;
      T x[count];
      Real raw[count], unscaled[count];
      load(g + i, x);
      decode_all(x, raw);
#pragma unroll
      for (int j = 0; j < count; ++j) {
        unscaled[j] = raw[j] * s;
        bad |= !is_finite_in<T>(unscaled[j]);
      }
      round_all(unscaled, x);
      store(g + i, x);
      if constexpr (counting) {
        decode_all(x, unscaled);
#pragma unroll
        for (int j = 0; j < count; ++j) counter.add(Unscale<T>::kind(raw[j], unscaled[j]));
      }
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
    return launch(kernel, grid_for(kernel, list.chunks(), sms), kThreads, 0, stream, list,
                  inv_scale, found_inf, chunks);
  });
  if (error != cudaSuccess || counts == nullptr) return error;
  return add_chunks(grads, chunks, nullptr, counts, sms, stream);
}

}  // namespace mixprec::cuda
