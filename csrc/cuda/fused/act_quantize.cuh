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

// (x[j], y[j]) <- f(x[j]), four at a time, likewise.
template <int n, class F>
__device__ __forceinline__ void for_each_of(float (&x)[n], float (&y)[n], const F& f) {
  constexpr int together = n < 4 ? n : 4;
#pragma unroll 1
  for (int round = 0; round < n / together; ++round) {
    ValueAndSlope<float> done[together];
#pragma unroll
    for (int j = 0; j < together; ++j) done[j] = f(x[j]);
#pragma unroll
    for (int j = 0; j + together < n; ++j) x[j] = x[j + together], y[j] = y[j + together];
#pragma unroll
    for (int j = 0; j < together; ++j) {
      x[n - together + j] = done[j].value;
      y[n - together + j] = done[j].slope;
    }
  }
}

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

// The gradients of x and, if of_up, of up.
struct ActivatedGradients : Computed {
  static constexpr int kOutputs = 2;

  Floats g, x, up;
  Activation kind;
  bool of_up;

  MIXPREC_HD int outputs() const { return of_up ? 2 : 1; }
  __device__ __forceinline__ ActivatedGradient only(int output) const {
    return {*this, g, x, output == 0 ? up : Floats{nullptr, x.dtype}, kind, output == 1};
  }

  template <int n>
  __device__ __forceinline__ void load(int64_t i, float (&y)[2][n], int count = n,
                                       bool together = true) const {
    float value[n], slope[n];
    x.load(i, value, count, together);
    with_kind(kind, [&](auto f) { for_each_of(value, slope, [&](float x) { return f.at(x); }); });
    g.load(i, y[1], count, together);
    up.load_or(1.0f, i, y[0], count, together);
#pragma unroll
    for (int j = 0; j < n; ++j) {
      y[0][j] = y[1][j] * y[0][j] * slope[j];
      y[1][j] = y[1][j] * value[j];
    }
  }
};

inline cudaError_t act_quantize(const Floats& x, const Floats& up, Activation kind,
                                const Quantize& args, int sms, cudaStream_t stream) {
  Activated source = {{all_aligned({x.data, up.data})}, x, up, kind};
  return cast_from(source, {{args}}, sms, stream);
}

// dx, dup: the casts of the gradients; dup null: not wanted.
inline cudaError_t act_backward(const Floats& g, const Floats& x, const Floats& up, Activation kind,
                                const Quantize& dx, const Quantize* dup, int sms,
                                cudaStream_t stream) {
  bool wide = all_aligned({g.data, x.data, up.data});
  ActivatedGradients source = {{wide}, g, x, up, kind, dup != nullptr};
  return cast_from(source, {{dx, dup != nullptr ? *dup : Quantize{}}}, sms, stream);
}

}  // namespace mixprec::cuda
