// Reductions over a block, in an order that depends only on the number of threads.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace mixprec::cuda {

constexpr unsigned kFullWarp = 0xFFFFFFFFu;
constexpr int kWarp = 32;

struct Sum {
  template <class T>
  static __device__ __forceinline__ T apply(T a, T b) {
    return a + b;
  }
};
struct Max {
  static __device__ __forceinline__ uint32_t apply(uint32_t a, uint32_t b) { return a > b ? a : b; }
};

template <class Op, class T>
__device__ __forceinline__ T warp_reduce(T value, int lanes) {
#pragma unroll
  for (int half = lanes / 2; half > 0; half /= 2) {
    value = Op::apply(value, __shfl_xor_sync(kFullWarp, value, half));
  }
  return value;
}

// The result is valid in thread 0 only. May be called in a loop.
template <int threads, class Op, class T>
__device__ __forceinline__ T block_reduce(T value) {
  constexpr int warps = threads / kWarp;
  static_assert(threads % kWarp == 0 && warps <= kWarp && (warps & (warps - 1)) == 0);
  __shared__ T partial[warps];
  int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  value = warp_reduce<Op>(value, kWarp);
  if (lane == 0) partial[warp] = value;
  __syncthreads();
  if (warp == 0) value = warp_reduce<Op>(partial[lane % warps], warps);
  __syncthreads();  // `partial` is read before the next call writes it
  return value;
}

// found_inf <- 1 if any thread of the warp has found one; all threads of the block must call this.
__device__ __forceinline__ void raise_flag(float* found_inf, bool bad) {
  bool any = __any_sync(kFullWarp, bad);
  if (any && threadIdx.x % kWarp == 0) atomicExch(found_inf, 1.0f);
}

}  // namespace mixprec::cuda
