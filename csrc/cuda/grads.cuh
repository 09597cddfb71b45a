// A list of gradients of any dtypes, as unscale_ and grad_stats_ take it.
#pragma once

#include <vector>

#include "cuda/tensor_list.cuh"
#include "dispatch.h"
#include "math/unscale.h"

namespace mixprec::cuda {

struct Grad {
  Dtype dtype;  // fp32, bf16, fp16 or fp64
  void* data;   // device memory, numel elements
  int64_t numel;
};
using GradList = std::vector<Grad>;

// f(Type<T>, list) for the gradients of each dtype T. The tag of a tensor is the number of chunks
// before it in the whole list, whatever their dtypes.
template <class F>
cudaError_t for_grads(const GradList& grads, const F& f) {
  auto of_type = [&](Dtype dtype, auto t) {
    int64_t first = 0;
    auto entry = [&](int64_t i, TensorEntry<1>& e) {
      const Grad& g = grads[i];
      e = {{g.data}, g.numel, static_cast<int32_t>(first)};
      first += chunks_of(g.numel);
      return g.dtype == dtype;
    };
    return for_lists<1>(static_cast<int64_t>(grads.size()), entry,
                        [&](const TensorList<1>& list) { return f(t, list); });
  };
  cudaError_t error = of_type(Dtype::f32, Type<float>{});
  if (error == cudaSuccess) error = of_type(Dtype::bf16, Type<Bf16>{});
  if (error == cudaSuccess) error = of_type(Dtype::f16, Type<Fp16>{});
  if (error == cudaSuccess) error = of_type(Dtype::f64, Type<double>{});
  return error;
}

}  // namespace mixprec::cuda
