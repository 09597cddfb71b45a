// Numbers of a range, for the formulas of math/activation.h (F there): divisions without the tests
// for numbers that overflow, which are half of what nvcc makes of one.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

#include "cuda/common/rcp.cuh"
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

}  // namespace mixprec::cuda
