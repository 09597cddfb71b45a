// The loops for any processor, in portable C++.
#include "loops.h"
#include "math/exp.h"
#include "math/mx.h"
#include "math/norm.h"
#include "math/pack.h"
#include "math/philox.h"
#include "math/rotary.h"
#include "math/rounding.h"
#include "math/scale.h"
#include "math/state8.h"
#include "math/unscale.h"

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
constexpr int MR = 4, NV = 2, NR = 8;

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

#include "gemm_loops.h"
#include "grad_loops.h"
#include "philox_loops.h"
#include "quantize_loops.h"
#include "rotary_loops.h"
#include "state8_loops.h"
#include "tensor_core_panels.h"

// These use tensor_core_panels.h.
#include "tensor_core_loops.h"
#include "tensor_core_short_loops.h"

// These use the ones above.
#include "pack_loops.h"
#include "step_loops.h"
#include "unpack_loops.h"

// These use pack_loops.h.
#include "dequantize_mx_loops.h"
#include "quantize_mx_loops.h"

namespace attention_f32 {
constexpr int kPair = 1, kRows = MR, kVecs = 2;
inline Vec multiply_add(Vec acc, Vec a, Vec b) { return fma(a, b, acc); }
#include "attention_loops.h"
}  // namespace attention_f32
#include "side_by_side.h"

// These use step_loops.h and side_by_side.h.
#include "activation_loops.h"
#include "norm_loops.h"

// All of them.
#include "table_of_loops.h"

}  // namespace

extern const Loops table;
constinit const Loops table = make_table("base", gemm_f32, attention_f32::attention_kernel);

}  // namespace mixprec::cpu::base
