// Replaces csrc/cuda/gemm/kernel/wgmma_sm90.cuh.
#pragma once

#include "cuda/gemm/config/tile_configs.h"
#include "cuda/gemm/kernel/ptx_sm90.cuh"
#include "math/convert.h"

namespace mixprec::cuda::sm90 {

template <class T>
constexpr model::Format kFormat = std::is_same_v<T, Bf16>   ? model::Format::bf16
                                  : std::is_same_v<T, Fp16> ? model::Format::fp16
                                  : std::is_same_v<T, E4m3> ? model::Format::e4m3
                                                            : model::Format::e5m2;

template <class A, class B, int n, Major a_major, Major b_major>
struct Wgmma {
  static_assert(n % 8 == 0 && n >= 8 && n <= 256);
  static_assert(sizeof(A) == 1 ? sizeof(B) == 1 && a_major == Major::k && b_major == Major::k
                               : std::is_same_v<A, B>);

  static void run(float (&d)[n / 2], uint64_t desc_a, uint64_t desc_b, bool accumulate) {
    model::wgmma({kFormat<A>, kFormat<B>, n, a_major == Major::mn, b_major == Major::mn}, d, desc_a,
                 desc_b, accumulate);
  }
};

}  // namespace mixprec::cuda::sm90
