// An activation and its derivative, of a run of elements in registers.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

#include "cuda/common/convert.cuh"
#include "cuda/common/cvt.cuh"
#include "math/activation.h"

namespace mixprec::cuda {

struct NearFloat {
  float at;

  __device__ __forceinline__ NearFloat(float x) : at(x) {}
};

__device__ __forceinline__ NearFloat operator-(NearFloat a) { return -a.at; }
__device__ __forceinline__ NearFloat operator+(NearFloat a, NearFloat b) { return a.at + b.at; }
__device__ __forceinline__ NearFloat operator-(NearFloat a, NearFloat b) { return a.at - b.at; }
__device__ __forceinline__ NearFloat operator*(NearFloat a, NearFloat b) { return a.at * b.at; }

// 1 / b and a / b, rounded to nearest as any division, for 1 <= b < 2^126 and a normal quotient, or
// b = 2: a Newton step makes the reciprocal right, and the remainder, which is exact, the quotient
// (Markstein, 1990). 0 keeps its sign.
__device__ __forceinline__ NearFloat reciprocal(NearFloat b) {
  float r = ptx::rcp(b.at);
  return fmaf(r, fmaf(-b.at, r, 1.0f), r);
}
__device__ __forceinline__ NearFloat operator/(NearFloat a, NearFloat b) {
  float r = reciprocal(b).at, q = a.at * r;
  return fmaf(-r, fmaf(b.at, q, -a.at), q);
}
__device__ __forceinline__ NearFloat operator/(float a, NearFloat b) {
  return a == 1.0f ? reciprocal(b) : NearFloat(a) / b;  // known when this is compiled
}

__device__ __forceinline__ NearFloat times_power(NearFloat y, NearFloat shifted) {
  return mixprec::times_power(y.at, shifted.at);
}
__device__ __forceinline__ NearFloat magnitude(NearFloat x) { return mixprec::magnitude(x.at); }
__device__ __forceinline__ NearFloat high_part(NearFloat x) { return mixprec::high_part(x.at); }
__device__ __forceinline__ NearFloat if_negative(NearFloat x, NearFloat then, NearFloat otherwise) {
  return x.at < 0.0f ? then.at : otherwise.at;
}

// Elements of a run that are computed together. Four instead of two save 2 of 45 instructions an
// element, but in runs of 8 cost the kernels that transpose the third block of an SM (on Hopper, 90
// registers a thread instead of 80).
template <int n>
constexpr int kNearGroup = n >= 16 ? 4 : 2;

// values <- activation(values), slope <- its derivative there, of elements with a bit in `which`,
// one after the other. They move one place per round, because registers have no index.
template <Activation kind, int n>
__device__ __forceinline__ void activate_each(uint32_t which, float (&values)[n],
                                              float (&slope)[n]) {
#pragma unroll 1
  for (int round = 0; round < n; ++round, which >>= 1) {
    ValueAndSlope<float> done = {values[0], slope[0]};
    if ((which & 1u) != 0) done = activation<kind>(values[0]);
#pragma unroll
    for (int j = 0; j + 1 < n; ++j) values[j] = values[j + 1], slope[j] = slope[j + 1];
    values[n - 1] = done.value, slope[n - 1] = done.slope;
  }
}

// values[first, first + kNearGroup<n>) likewise, if none of them is beyond activation_near.
template <Activation kind, int n>
__device__ __forceinline__ bool activate_near(int first, float (&values)[n], float (&slope)[n]) {
  uint32_t largest = 0;  // NaN is beyond any limit
#pragma unroll
  for (int j = first; j < first + kNearGroup<n>; ++j) {
    largest = Max::apply(largest, magnitude_bits(values[j]));
  }
  if (largest > float_bits(activation_near(kind))) {
#pragma unroll
    for (int j = first; j < first + kNearGroup<n>; ++j) slope[j] = 0.0f;
    return false;
  }
#pragma unroll
  for (int j = first; j < first + kNearGroup<n>; ++j) {
    ValueAndSlope<NearFloat> done = activation<kind, true>(NearFloat(values[j]));
    values[j] = done.value.at, slope[j] = done.slope.at;
  }
  return true;
}

// values <- activation(values), slope <- its derivative there
template <Activation kind, int n>
__device__ __forceinline__ void activate(float (&values)[n], float (&slope)[n]) {
  if constexpr (kind == Activation::relu2) {
#pragma unroll
    for (int j = 0; j < n; ++j) {
      ValueAndSlope<float> done = relu2(values[j]);
      values[j] = done.value, slope[j] = done.slope;
    }
  } else {
    uint32_t left = (1u << n) - 1;
    constexpr int grouped = n / kNearGroup<n> * kNearGroup<n>;
#pragma unroll
    for (int first = 0; first < grouped; first += kNearGroup<n>) {
      bool done = activate_near<kind>(first, values, slope);
      left &= done ? ~(((1u << kNearGroup<n>)-1) << first) : ~0u;
    }
    if (left != 0) activate_each<kind>(left, values, slope);
  }
}

// For a kind known at run time.
template <int n>
__device__ __forceinline__ void activate(Activation kind, float (&values)[n], float (&slope)[n]) {
  switch (kind) {
    case Activation::silu:
      return activate<Activation::silu>(values, slope);
    case Activation::gelu:
      return activate<Activation::gelu>(values, slope);
    case Activation::gelu_tanh:
      return activate<Activation::gelu_tanh>(values, slope);
    default:
      return activate<Activation::relu2>(values, slope);
  }
}

}  // namespace mixprec::cuda
