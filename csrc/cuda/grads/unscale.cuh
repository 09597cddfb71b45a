// unscale_ on the GPU: g <- g * inv_scale, found_inf, and on request the number of elements of each
// gradient that are Inf, NaN, zero and subnormal.
#pragma once

#include "cuda/common/convert.cuh"
#include "cuda/common/vec.cuh"
#include "cuda/grads/chunk_stats.cuh"

namespace mixprec::cuda {

constexpr int kUnscalePacks = 4;  // loaded before the first one is stored: the stores may alias

template <class T, bool counting>
__global__ void __launch_bounds__(kThreads)
    unscale_kernel(const __grid_constant__ GradLaunch grads, const float* inv_scale,
                   float* found_inf, const ChunkStats chunks) {
  constexpr int n = kVector<T>;
  // Not kThreads: with a distance that it knows nvcc loads each pack right before it is stored.
  const int64_t stride = blockDim.x;
  using Real = typename Unscale<T>::Real;
  Real s = *inv_scale;
  bool bad = false;
  for (int c = blockIdx.x; c < grads.chunks(); c += gridDim.x) {
    Chunk chunk = grads.chunk(c);
    T* g = grads.at<T>(0, chunk);
    KindCounter counter;
    auto multiply = [&](auto width, auto packs, int64_t i, int64_t step) {
      constexpr int count = decltype(width)::value, together = decltype(packs)::value;
      T x[together][count];
#pragma unroll
      for (int p = 0; p < together; ++p) load(g + i + p * step, x[p]);
#pragma unroll
      for (int p = 0; p < together; ++p) {
        Real raw[count], unscaled[count];
        decode_all(x[p], raw);
#pragma unroll
        for (int j = 0; j < count; ++j) {
          unscaled[j] = raw[j] * s;
          bad |= !is_finite_in<T>(unscaled[j]);
        }
        round_all(unscaled, x[p]);
        store(g + i + p * step, x[p]);
        if constexpr (counting) {
          decode_all(x[p], unscaled);
#pragma unroll
          for (int j = 0; j < count; ++j) counter.add(Unscale<T>::kind(raw[j], unscaled[j]));
        }
      }
    };
    for_each_group<n, kUnscalePacks>(split<n>(chunk.size, g), threadIdx.x, stride, multiply);
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
