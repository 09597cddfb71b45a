// grad_stats_ on the GPU: the sum of (g * inv_scale)^2 over all gradients, and found_inf.
//
// Each chunk leaves one fp64 partial; the block that finishes last adds them up. Which block that
// is does not matter: the order depends on the list alone, not on the GPU or on timing.
#pragma once

#include "cuda/grads.cuh"
#include "cuda/launch.h"
#include "cuda/reduce.cuh"
#include "cuda/vec.cuh"

namespace mixprec::cuda {

struct GradStats {
  const float* inv_scale;  // null: 1
  float* found_inf;
  double* sum_sq;
  double* partials;  // [chunks], one per chunk of the whole list
  int chunks;
  unsigned* done;  // chunks finished, over all launches of the call; 0 before and after
};

template <class T>
__device__ double square(typename Unscale<T>::Real x) {
  return static_cast<double>(x) * static_cast<double>(x);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    grad_stats_kernel(const __grid_constant__ TensorList<1> grads, const GradStats stats) {
  constexpr int n = 2 * kVector<T>;
  typename Unscale<T>::Real s = stats.inv_scale != nullptr ? *stats.inv_scale : 1.0f;
  bool bad = false;
  unsigned finished = 0;
  for (int c = blockIdx.x; c < grads.chunks(); c += gridDim.x, ++finished) {
    Chunk chunk = grads.chunk(c);
    const T* g = grads.at<T>(0, chunk);
    double sum = 0.0;
    for_each<n>(split<n>(chunk.size, g), threadIdx.x, kThreads, [&](auto width, int64_t i) {
      T x[decltype(width)::value];
      load(g + i, x);
#pragma unroll
      for (const T& value : x) {
        typename Unscale<T>::Real unscaled = Unscale<T>::apply(value, s);
        bad |= Unscale<T>::bad(value) | is_nonfinite(unscaled);
        sum += square<T>(unscaled);
      }
    });
    sum = block_reduce<kThreads, Sum>(sum);
    if (threadIdx.x == 0) {
      stats.partials[grads.tag[chunk.tensor] + chunk.begin / kChunk] = sum;
    }
  }
  raise_flag(stats.found_inf, bad);

  __shared__ bool last;
  if (threadIdx.x == 0) {
    __threadfence();  // the partials of this block before its count
    last = atomicAdd(stats.done, finished) + finished == static_cast<unsigned>(stats.chunks);
    __threadfence();  // and the counts before the partials of the others
  }
  __syncthreads();
  if (!last) return;
  double sum = 0.0;
  for (int i = threadIdx.x; i < stats.chunks; i += kThreads) sum += stats.partials[i];
  sum = block_reduce<kThreads, Sum>(sum);
  if (threadIdx.x == 0) {
    *stats.sum_sq = sum;
    *stats.done = 0;
  }
}

// Chunks of the whole list: the length of `partials`.
inline int64_t grad_stats_chunks(const GradList& grads) {
  int64_t chunks = 0;
  for (const Grad& g : grads) chunks += chunks_of(g.numel);
  return chunks;
}

// One launch per dtype in the list, more where it is long; one for an empty list, which has the sum
// 0. stats.chunks is set here.
inline cudaError_t grad_stats(const GradList& grads, GradStats stats, int sms,
                              cudaStream_t stream) {
  stats.chunks = static_cast<int>(grad_stats_chunks(grads));
  if (stats.chunks == 0) {
    TensorList<1> none;
    none.count = none.first_chunk[0] = 0;
    return launch(grad_stats_kernel<float>, 1, kThreads, 0, stream, none, stats);
  }
  return for_grads(grads, [&](auto t, const TensorList<1>& list) {
    return launch(grad_stats_kernel<typename decltype(t)::type>, grid_for(list.chunks(), sms),
                  kThreads, 0, stream, list, stats);
  });
}

}  // namespace mixprec::cuda
