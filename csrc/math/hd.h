// Definitions that let the formulas compile for the host, for every instruction set, and for GPUs.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define MIXPREC_HD __host__ __device__ __forceinline__
#else
// Always inlined: the linker must never pick a copy compiled for AVX-512 for other code.
#define MIXPREC_HD __attribute__((always_inline)) inline
#endif

namespace mixprec {

MIXPREC_HD uint32_t float_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t u;
  __builtin_memcpy(&u, &x, sizeof u);
  return u;
#endif
}

MIXPREC_HD float bits_float(uint32_t u) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(u);
#else
  float x;
  __builtin_memcpy(&x, &u, sizeof x);
  return x;
#endif
}

// Inf or NaN. Tested on the bits, so that no compiler flag can remove the test.
MIXPREC_HD bool is_nonfinite_bits(uint32_t u) { return (u & 0x7F800000u) == 0x7F800000u; }
MIXPREC_HD bool is_nonfinite(float x) { return is_nonfinite_bits(float_bits(x)); }
MIXPREC_HD bool is_nonfinite(double x) { return !(x - x == 0.0); }

MIXPREC_HD float square_root(float x) { return __builtin_sqrtf(x); }
MIXPREC_HD double square_root(double x) { return __builtin_sqrt(x); }

}  // namespace mixprec
