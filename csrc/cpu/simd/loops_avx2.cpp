// The loops for AVX2 with FMA and F16C. Does not use std: the linker could pick an inline function
// of the standard library compiled for AVX2 for the rest of the program.
#include "formulas.h"

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC target("avx2,fma,f16c,bmi2")

namespace mixprec::cpu::avx2 {
namespace {

typedef __m256 Vec;
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec broadcast(float x) { return _mm256_set1_ps(x); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
constexpr int MR = 6, NV = 2, NR = 16, kAttentionRows = 6;

typedef Indices<0, 1, 2, 3, 4, 5, 6, 7> LaneIndices;

// Philox: counters side by side, the low halves' product, and how two vectors are interleaved.
typedef uint64_t Lanes __attribute__((vector_size(32)));
inline Lanes product(Lanes a, uint32_t b) {
  return (Lanes)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
}
constexpr Lanes kIota = {0, 1, 2, 3}, kFirstPairs = {0, 4, 1, 5}, kLastPairs = {2, 6, 3, 7};

typedef PlainRegisters Registers;

// clang-format off: the order is this one
#include "decode_f16c.h"
#include "all_loops.h"
// clang-format on

}  // namespace

constinit const Loops table = make_table("avx2", gemm_f32, store_tile, f32_words::attention_kernel);

}  // namespace mixprec::cpu::avx2
#endif
