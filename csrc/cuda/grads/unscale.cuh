// unscale_ on the GPU: g <- g * inv_scale, and found_inf. grad_stats_: for each gradient the sum of
// (g * inv_scale)^2, and found_inf. Both on request with the number of elements of each gradient
// that are Inf, NaN, zero and subnormal.
#pragma once

#include "cuda/common/convert.cuh"
#include "cuda/common/vec.cuh"
#include "cuda/grads/grads.cuh"

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
    auto multiply = [&]<int count, int together>(Int<count>, Int<together>, int64_t i,
                                                 int64_t step) {
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

// One launch per dtype in the list (more for long lists), and one that adds the counts.
inline cudaError_t unscale(const GradList& grads, const float* inv_scale, float* found_inf,
                           int64_t* counts, const ChunkStats& chunks, const Gpu& gpu) {
  cudaError_t error = for_grads(grads, [&]<class T>(Type<T>, const GradLaunch& list) {
    auto* kernel = counts != nullptr ? unscale_kernel<T, true> : unscale_kernel<T, false>;
    return launch_over(kernel, list.chunks(), gpu, list, inv_scale, found_inf, chunks);
  });
  if (error != cudaSuccess || counts == nullptr) return error;
  return add_chunks(grads, chunks, nullptr, counts, gpu);
}

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
    auto add = [&]<int count, int together>(Int<count>, Int<together>, int64_t i, int64_t step) {
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
                              double* sum_sq, int64_t* counts, const ChunkStats& chunks,
                              const Gpu& gpu) {
  cudaError_t error = for_grads(grads, [&]<class T>(Type<T>, const GradLaunch& list) {
    auto* kernel = counts != nullptr ? grad_stats_kernel<T, true> : grad_stats_kernel<T, false>;
    return launch_over(kernel, list.chunks(), gpu, list, inv_scale, found_inf, chunks);
  });
  if (error != cudaSuccess) return error;
  return add_chunks(grads, chunks, sum_sq, counts, gpu);
}

}  // namespace mixprec::cuda
