// A list of gradients of any dtypes, for unscale_ and grad_stats_.
#pragma once

#include <vector>

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

}  // namespace mixprec::cuda
