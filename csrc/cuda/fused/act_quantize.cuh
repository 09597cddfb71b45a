// Activations and their gradients as sources of the casting kernels.
#pragma once

#include "cuda/fused/cast_from.cuh"
#include "cuda/fused/computed.cuh"
#include "math/activation.h"

namespace mixprec::cuda {

template <Activation kind>
struct Kind {
  static __device__ __forceinline__ ValueAndSlope<float> at(float x) { return activation<kind>(x); }
};

// f(Kind<kind>{}) for a kind known at run time.
template <class F>
__device__ __forceinline__ void with_kind(Activation kind, const F& f) {
  switch (kind) {
    case Activation::silu:
      return f(Kind<Activation::silu>{});
    case Activation::gelu:
      return f(Kind<Activation::gelu>{});
    case Activation::gelu_tanh:
      return f(Kind<Activation::gelu_tanh>{});
    default:
      return f(Kind<Activation::relu2>{});
  }
}

// x[j] <- f(x[j]), two at a time: the code of an activation is long, and this loop is in many
// kernels. Elements move one place per round, because registers have no index.
template <int n, class F>
__device__ __forceinline__ void for_each_of(float (&x)[n], const F& f) {
  constexpr int together = n == 1 ? 1 : 2;
#pragma unroll 1
  for (int round = 0; round < n / together; ++round) {
    float done[together];
#pragma unroll
    for (int j = 0; j < together; ++j) done[j] = f(x[j]);
#pragma unroll
    for (int j = 0; j + together < n; ++j) x[j] = x[j + together];
#pragma unroll
    for (int j = 0; j < together; ++j) x[n - together + j] = done[j];
  }
}

// activation(x) [* up]
struct Activated : Computed {
  Floats x, up;
  Activation kind;

  template <int n>
  __device__ __forceinline__ void load(int64_t i, float (&y)[n], int count = n,
                                       bool together = true) const {
    float factor[n];
    x.load(i, y, count, together);
    up.load_or(1.0f, i, factor, count, together);
    with_kind(kind, [&](auto f) { for_each_of(y, [&](float x) { return f.at(x).value; }); });
#pragma unroll
    for (int j = 0; j < n; ++j) y[j] = y[j] * factor[j];
  }
};

// The gradient of x, (g [* up]) * activation'(x), or that of up, g * activation(x).
struct ActivatedGradient : Computed {
  Floats g, x, up;  // up: not given for the gradient of up
  Activation kind;
  bool of_up;

  template <int n>
  __device__ __forceinline__ void load(int64_t i, float (&y)[n], int count = n,
                                       bool together = true) const {
    float gradient[n], factor[n];
    g.load(i, gradient, count, together);
    x.load(i, y, count, together);
    up.load_or(1.0f, i, factor, count, together);
    with_kind(kind, [&](auto f) {
      for_each_of(y, [&](float x) {
        ValueAndSlope<float> at = f.at(x);
        return of_up ? at.value : at.slope;
      });
    });
#pragma unroll
    for (int j = 0; j < n; ++j) y[j] = gradient[j] * factor[j] * y[j];
  }
};

inline cudaError_t act_quantize(const Floats& x, const Floats& up, Activation kind,
                                const Quantize& args, int sms, cudaStream_t stream) {
  Activated source = {{all_aligned({x.data, up.data})}, x, up, kind};
  return cast_from(source, args, sms, stream);
}

// args: of the casts of the gradient of x, or of up.
inline cudaError_t act_backward(const Floats& g, const Floats& x, const Floats& up, Activation kind,
                                bool of_up, const Quantize& args, int sms, cudaStream_t stream) {
  bool wide = all_aligned({g.data, x.data, up.data});
  Floats factor = of_up ? Floats{nullptr, x.dtype} : up;
  ActivatedGradient source = {{wide}, g, x, factor, kind, of_up};
  return cast_from(source, args, sms, stream);
}

}  // namespace mixprec::cuda
