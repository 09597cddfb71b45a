// grad_stats_ on the GPU: for each gradient the sum of (g * inv_scale)^2 and the number of elements
// that are Inf, NaN, zero and subnormal; and found_inf.
#pragma once

#include "cuda/common/convert.cuh"
#include "cuda/common/vec.cuh"
#include "cuda/grads/chunk_stats.cuh"

namespace mixprec::cuda {

// The square of a number of fp32 is exact in fp64: fused or not, the sum is rounded once.
__device__ __forceinline__ double add_square(double sum, float x) {
  return __builtin_fma(static_cast<double>(x), static_cast<double>(x), sum);
}
__device__ __forceinline__ double add_square(double sum, double x) { return sum + x * x; }

template <class T, bool counting>
__global__ void __launch_bounds__(kThreads)
    grad_stats_kernel(const __grid_constant__ GradLaunch grads, const float* inv_scale,
                      float* found_inf, const ChunkStats chunks) {
  using Real = typename Unscale<T>::Real;
  constexpr int n = 2 * kVector<T>;
  Real s = inv_scale != nullptr ? *inv_scale : 1.0f;
  bool bad = false;
  for (int c = blockIdx.x; c < grads.chunks(); c += gridDim.x) {
    Chunk chunk = grads.chunk(c);
    const T* g = grads.at<T>(0, chunk);
    double sum = 0.0;
    KindCounter counter;
    auto add = [&](auto width, auto packs, int64_t i, int64_t step) {
      constexpr int count = decltype(width)::value, together = decltype(packs)::value;
      T x[together][count];
#pragma unroll
      for (int p = 0; p < together; ++p) load(g + i + p * step, x[p]);
#pragma unroll
      for (int p = 0; p < together; ++p) {  // in the order of the elements
        Real raw[count];
        decode_all(x[p], raw);
#pragma unroll
        for (int j = 0; j < count; ++j) {
          Real unscaled = raw[j] * s;
          bad |= !is_finite_in<Real>(unscaled);
          sum = add_square(sum, unscaled);
          if constexpr (counting) counter.add(Unscale<T>::kind(raw[j], unscaled));
        }
      }
    };
    for_each_group<n, 2>(split<n>(chunk.size, g), threadIdx.x, kThreads, add);
    sum = block_reduce<kThreads, Sum>(sum);
    if (threadIdx.x == 0) chunks.sum_sq[place_of(grads, chunk)] = sum;
    if constexpr (counting) counter.finish(chunks.counts, place_of(grads, chunk));
  }
  raise_flag(found_inf, bad);
}

// One launch per dtype in the list (more for long lists), and one that adds the results. inv_scale
// and counts may be null; the scratch for counts then too.
inline cudaError_t grad_stats(const GradList& grads, const float* inv_scale, float* found_inf,
                              double* sum_sq, int64_t* counts, const ChunkStats& chunks, int sms,
                              cudaStream_t stream) {
  cudaError_t error = for_grads(grads, [&](auto t, const GradLaunch& list) {
    using T = typename decltype(t)::type;
    auto* kernel = counts != nullptr ? grad_stats_kernel<T, true> : grad_stats_kernel<T, false>;
    return launch(kernel, grid_for(kernel, list.chunks(), sms), kThreads, 0, stream, list,
                  inv_scale, found_inf, chunks);
  });
  if (error != cudaSuccess) return error;
  return add_chunks(grads, chunks, sum_sq, counts, sms, stream);
}

}  // namespace mixprec::cuda
