// Activations and their gradients as sources of the casting kernels.
#pragma once

#include "cuda/fused/activate.cuh"
#include "cuda/quantize/quantize.cuh"
#include "cuda/quantize/source.cuh"

namespace mixprec::cuda {

// activation(x) [* up]
struct Activated : Computed {
  Floats x, up;
  Activation kind;

  template <int n>
  __device__ __forceinline__ void load(int64_t i, float (&y)[n], int count = n,
                                       bool together = true) const {
    float slope[n];
    Run<n> of_x(x, i, count, together), of_up(up, i, count, together);
    of_x.decode(y);
    activate(kind, y, slope);
    of_up.multiply(y);
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
    float at[n], slope[n];
    Run<n>(x, i, count, together).decode(at);
    activate(kind, at, slope);
#pragma unroll
    for (int j = 0; j < n; ++j) at[j] = of_up ? at[j] : slope[j];
    Run<n>(g, i, count, together).decode(y);
    Run<n>(up, i, count, together).multiply(y);
#pragma unroll
    for (int j = 0; j < n; ++j) y[j] = y[j] * at[j];
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
    if constexpr (n > kRun) {  // a part after the other: both at once take too many registers
#pragma unroll
      for (int first = 0; first < n; first += kRun) {
        float part[2][kRun];
        load(i + first, part, count - first, together);
#pragma unroll
        for (int j = 0; j < 2 * kRun; ++j) y[j / kRun][first + j % kRun] = part[j / kRun][j % kRun];
      }
    } else {
      float value[n], slope[n];
      Run<n> of_x(x, i, count, together), of_g(g, i, count, together), gate(up, i, count, together);
      of_x.decode(value);
      activate(kind, value, slope);
      of_g.decode(y[0]);
#pragma unroll
      for (int j = 0; j < n; ++j) y[1][j] = y[0][j] * value[j];
      gate.multiply(y[0]);
#pragma unroll
      for (int j = 0; j < n; ++j) y[0][j] = y[0][j] * slope[j];
    }
  }
};

inline cudaError_t act_quantize(const Floats& x, const Floats& up, Activation kind,
                                const Quantize& args, const Gpu& gpu) {
  Activated source = {{all_aligned({x.data, up.data})}, x, up, kind};
  return quantize_from(source, {{args}}, gpu);
}

// dx, dup: the casts of the gradients; dup null: not wanted.
inline cudaError_t act_backward(const Floats& g, const Floats& x, const Floats& up, Activation kind,
                                const Quantize& dx, const Quantize* dup, const Gpu& gpu) {
  bool wide = all_aligned({g.data, x.data, up.data});
  ActivatedGradients source = {{wide}, g, x, up, kind, dup != nullptr};
  return quantize_from(source, {{dx, dup != nullptr ? *dup : Quantize{}}}, gpu);
}

}  // namespace mixprec::cuda
