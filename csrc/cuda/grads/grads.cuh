// A list of gradients of any dtypes, for unscale_ and grad_stats_, and the statistics of each: one
// kernel writes a result per chunk, a second one adds those of each gradient. Nothing has to be
// cleared beforehand and no block waits for another. The order of summation depends on the list
// alone, on the sizes of its tensors and on their alignment (split in vec.cuh), not on the GPU or
// on timing.
#pragma once

#include <vector>

#include "cuda/common/launch.h"
#include "cuda/common/reduce.cuh"
#include "cuda/common/tensor_list.cuh"
#include "dispatch.h"
#include "math/unscale.h"

namespace mixprec::cuda {

struct Grad {
  Dtype dtype;  // fp32, bf16, fp16 or fp64
  void* data;   // device memory, numel elements
  int64_t numel;
};
using GradList = std::vector<Grad>;

// The tags of a gradient: the number of chunks before it in the whole list, of all dtypes, and its
// index in that list.
enum GradTag { kFirstChunk, kRow };
using GradLaunch = TensorList<1, 2>;

inline int64_t chunks_in(const GradList& grads) {
  int64_t chunks = 0;
  for (const Grad& g : grads) chunks += chunks_of(g.numel);
  return chunks;
}

// Calls f(list) for the gradients for which belongs(grad) is true.
template <class Belongs, class F>
cudaError_t for_some_grads(const GradList& grads, const Belongs& belongs, const F& f) {
  int64_t first = 0;
  auto entry = [&](int64_t i, TensorEntry<1, 2>& e) {
    const Grad& g = grads[i];
    e = {{g.data}, g.numel, {static_cast<int32_t>(first), static_cast<int32_t>(i)}};
    first += chunks_of(g.numel);
    return belongs(g);
  };
  return for_lists<1, 2>(static_cast<int64_t>(grads.size()), entry, f);
}

// Calls f(Type<T>, list) for the gradients of each dtype T that are not empty.
template <class F>
cudaError_t for_grads(const GradList& grads, const F& f) {
  auto of_type = [&](Dtype dtype, auto t) {
    return for_some_grads(
        grads, [&](const Grad& g) { return g.dtype == dtype && g.numel > 0; },
        [&](const GradLaunch& list) { return f(t, list); });
  };
  cudaError_t error = of_type(Dtype::f32, Type<float>{});
  if (error == cudaSuccess) error = of_type(Dtype::bf16, Type<Bf16>{});
  if (error == cudaSuccess) error = of_type(Dtype::f16, Type<Fp16>{});
  if (error == cudaSuccess) error = of_type(Dtype::f64, Type<double>{});
  return error;
}

// The least magnitude that is rounded to Inf in T: half a step above the largest number.
template <class T>
constexpr float kRoundsToInf = __builtin_inff();
template <>
inline constexpr float kRoundsToInf<Bf16> = 0x1.FFp127f;
template <>
inline constexpr float kRoundsToInf<Fp16> = 65520.0f;

// Whether x stays finite when it is rounded to T: one instruction, and false for NaN.
template <class T, class Real>
__device__ __forceinline__ bool is_finite_in(Real x) {
  if constexpr (sizeof(Real) == 8) {
    return !is_nonfinite(x);
  } else {
    return __builtin_fabsf(x) < kRoundsToInf<T>;
  }
}

constexpr int kKinds = 4;  // Inf, NaN, zeros, subnormals

// Scratch with one number per chunk of the whole list; null: not requested.
struct ChunkStats {
  double* sum_sq;
  uint64_t* counts;  // of the four kinds, 16 bits each
};
static_assert(kChunk < 1 << 16);

struct KindCounter {
  uint32_t seen[kKinds] = {};

  __device__ __forceinline__ void add(const GradKind& k) {
    seen[0] += k.inf;
    seen[1] += k.nan;
    seen[2] += k.zero;
    seen[3] += k.subnormal;
  }

  // Called by all threads of the block, each with its part of one chunk.
  __device__ __forceinline__ void finish(uint64_t* counts, int chunk) const {
    uint64_t packed = 0;
#pragma unroll
    for (int k = 0; k < kKinds; ++k) packed |= uint64_t{seen[k]} << (16 * k);
    packed = block_reduce<kThreads, Sum>(packed);
    if (threadIdx.x == 0) counts[chunk] = packed;
  }
};

// The index of a chunk of a launch in the scratch.
__device__ __forceinline__ int place_of(const GradLaunch& grads, const Chunk& chunk) {
  return grads.tag[kFirstChunk][chunk.tensor] + static_cast<int>(chunk.begin / kChunk);
}

// The sum of of(c) over the chunks c of a warp's gradient, in lane 0.
template <class T, class Of>
__device__ __forceinline__ T add_in_warp(int first, int count, const Of& of) {
  T sum = 0;
#pragma unroll 4
  for (int c = static_cast<int>(threadIdx.x) % kWarp; c < count; c += kWarp) sum += of(first + c);
  return warp_reduce<Sum>(sum, kWarp);
}

// sum_sq [grads], counts [grads, 4], from `chunks`. One warp per number.
static __global__ void __launch_bounds__(kThreads)
    add_chunks_kernel(const __grid_constant__ GradLaunch grads, const ChunkStats chunks,
                      double* sum_sq, int64_t* counts) {
  constexpr int numbers = 1 + kKinds, warps = kThreads / kWarp;
  int warp = static_cast<int>(blockIdx.x * warps + threadIdx.x / kWarp);
  bool writes = threadIdx.x % kWarp == 0;
  for (int n = warp; n < grads.count * numbers; n += static_cast<int>(gridDim.x) * warps) {
    int t = n / numbers, k = n % numbers - 1;
    int first = grads.tag[kFirstChunk][t], row = grads.tag[kRow][t];
    int count = static_cast<int>(chunks_of(grads.numel[t]));
    if (k < 0 && sum_sq != nullptr) {
      double sum = add_in_warp<double>(first, count, [&](int c) { return chunks.sum_sq[c]; });
      if (writes) sum_sq[row] = sum;
    }
    if (k >= 0 && counts != nullptr) {
      int64_t seen = add_in_warp<int64_t>(first, count, [&](int c) {
        return static_cast<int64_t>(chunks.counts[c] >> (16 * k) & 0xFFFFu);
      });
      if (writes) counts[int64_t{row} * kKinds + k] = seen;
    }
  }
}

inline cudaError_t add_chunks(const GradList& grads, const ChunkStats& chunks, double* sum_sq,
                              int64_t* counts, const Gpu& gpu) {
  return for_some_grads(
      grads, [](const Grad&) { return true; },
      [&](const GradLaunch& list) {
        return launch_over(add_chunks_kernel, list.count, gpu, list, chunks, sum_sq, counts);
      });
}

}  // namespace mixprec::cuda
