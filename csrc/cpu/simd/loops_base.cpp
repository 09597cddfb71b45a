// The loops for any processor, in portable C++.
#include "formulas.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#else
#include <cfenv>
#endif

namespace mixprec::cpu::base {
namespace {

typedef float Vec __attribute__((vector_size(16)));
inline Vec load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }
inline Vec broadcast(float x) { return Vec{x, x, x, x}; }
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
constexpr int MR = 4, NV = 2, NR = 8, kAttentionRows = 4;

typedef Indices<0, 1, 2, 3> LaneIndices;

// Philox: counters side by side, the low halves' product, and how two vectors are interleaved.
typedef uint64_t Lanes __attribute__((vector_size(16)));
inline Lanes product(Lanes a, uint32_t b) {
#if defined(__SSE2__)
  return (Lanes)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(b));
#else
  return (a & 0xFFFFFFFFu) * b;
#endif
}
constexpr Lanes kIota = {0, 1}, kFirstPairs = {0, 2}, kLastPairs = {1, 3};

typedef PlainRegisters Registers;

// 8 numbers as words of fp32.
template <class T>
inline void decode_8(const T* __restrict x, uint32_t* __restrict out) {
  for (int i = 0; i < 8; ++i) out[i] = float_bits(decode(x[i]));
}

#include "all_loops.h"

}  // namespace

constinit const Loops table = make_table("base", gemm_f32, store_tile, f32_words::attention_kernel);

}  // namespace mixprec::cpu::base
